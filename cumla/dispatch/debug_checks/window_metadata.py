"""Checks of `cumla.debug` for kernels of the metadata of windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.types.metadata import C128A_RATIO
from .values import check_pages, check_slots, host, last_positions


def build_sparse_swa(arguments: Any) -> None:
    check_slots("slot_mapping", arguments.slot_mapping, None)
    starts, begin, lens = last_positions(arguments.query_start_loc, arguments.seq_lens)
    end = lens * (np.diff(starts) > 0)  # padding requests read nothing
    reached = np.full(len(lens), arguments.window_size - 1)
    if arguments.noncausal:  # the tokens of a decode see the whole window of its first token's predecessor
        reached[: arguments.counts.num_decodes] += 1
    first = begin - reached
    if arguments.replay_start is not None:  # whose windows have nothing before it, save those of noncausal decodes
        late = (host(arguments.replay_start) > begin) & (end > 0)
        if late.any():
            r = int(np.argmax(late))
            raise ValueError(
                f"replay_start: request {r} has {host(arguments.replay_start)[r]}, expected at most {begin[r]}, its "
                "first position of this step"
            )
        causal = np.arange(len(lens)) >= (arguments.counts.num_decodes if arguments.noncausal else 0)
        first = np.where(causal, np.maximum(first, host(arguments.replay_start)), first)
    check_pages("block_table_tensor", arguments.block_table, first, end, arguments.block_size)
    table, rows = arguments.c128a_block_table, end // C128A_RATIO
    if table is not None:
        check_pages("c128a_block_table", table, np.zeros_like(end), rows, arguments.c128a_block_size)
