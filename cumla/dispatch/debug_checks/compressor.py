"""Checks of `cumla.debug` for kernels of the compressor of V4."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.types.compressor import first_state
from .values import check_packed, check_pages, check_positions, check_slots, checked_requests, host


def compress_and_insert(arguments: Any) -> None:
    positions, slots, state_table, ratio = (
        arguments.positions,
        arguments.slots,
        arguments.state_block_table,
        arguments.compress_ratio,
    )
    check_positions(arguments, arguments.cos_sin, slots)
    packed = check_packed("query_start_loc", arguments.query_start_loc, len(positions), "tokens")
    at, states, num_reqs = host(positions), arguments.compressors[0].state, len(state_table)
    requests = checked_requests(arguments.token_to_req, at >= 0, num_reqs)
    for prefix, rows in zip(("", "index_"), arguments.compressors, strict=False):
        check_slots(f"slot_mapping of {prefix}k_cache", slots, rows.pages.num_slots, positions, requests)
        num_states = rows.state.shape[0] * rows.state.shape[1]
        check_slots(
            f"state_slot_mapping of {prefix}state_cache", arguments.state_slots, num_states, positions, requests
        )
    window = ratio * arguments.compressors[0].kv_score.shape[1] // (2 * arguments.compressors[0].pages.layout.head_dim)
    starts, overlap = packed[:-1], window > ratio
    begin, end = np.zeros(num_reqs, np.int64), np.zeros(num_reqs, np.int64)
    for i in np.flatnonzero(at >= 0):  # also where the step completes no row: a later step reads the states then
        r = requests[i]
        end[r] = at[i] - (i - starts[r])  # the step's first position
        begin[r] = first_state(end[r], ratio, overlap)
    check_pages("state_block_table", state_table, begin, end, states.shape[1], len(states))
