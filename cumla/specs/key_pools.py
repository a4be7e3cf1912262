"""Spec of pooled index keys."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..bounds import ROUNDED
from ..dispatch.call import FLOAT32, INT32, SLOTS
from ..dispatch.debug_checks import key_pools as checks
from ..layout import INDEXER_BF16, CacheLayout
from ..ops.key_pools import DIM, VALUES, indexer_kpool_and_insert
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Variant


def pooled_keys(
    x: Inputs, layout: CacheLayout, pool: int = 4, capacity: int = 4, dtype: Any = np.float32, restart: bool = True
) -> dict[str, Any]:
    """dtype: of keys, gates and rings; capacity: rows of a ring; restart: what a step needs to be run again is kept."""
    step = x.step
    tokens, requests = step.num_tokens, x.size.requests + x.size.spare
    slots = np.where((step.positions + 1) % pool == 0, np.resize(x.new_slots(tokens), tokens), -1)
    values = x.states if dtype is np.float32 else x.rows
    arguments = {
        "k": values(tokens, DIM), "gate": values(tokens, DIM), "weight": x.floats(DIM), "bias": x.floats(DIM),
        "ape": x.put(x.numbers(pool, DIM), np.float32), "state_cache": values(requests, capacity, 2 * DIM),
        "state_slot_mapping": x.put(step.requests * capacity + step.positions % capacity, np.int64),
        "k_cache": x.new_cache(layout), "slot_mapping": x.put(slots, np.int64),
        "positions": x.put(step.positions, np.int64), "query_start_loc": x.starts(step.query_lens),
        "block_size": x.size.block_size, "layout": layout,
    }  # fmt: skip
    if restart:  # of every other request, at the step's first position
        restarts = np.zeros(requests, np.int32)
        restarts[1 : x.size.requests : 2] = (step.seq_lens - step.query_lens)[1::2]
        arguments["restart_rows"] = values(requests, pool - 1, 2 * DIM)
        arguments["restart_positions"] = x.put(restarts)
    return arguments


STATE = Array(VALUES, "in out", bound=ROUNDED)

SPECS = (
    OperationSpec(
        indexer_kpool_and_insert, "key_pools",
        {
            "k": Array(VALUES), "gate": Array(VALUES), "weight": Array(VALUES), "bias": Array(VALUES),
            "ape": Array(FLOAT32), "state_cache": STATE, "state_slot_mapping": Array(SLOTS, holds="slots"),
            "k_cache": Array(CACHE, "out", bound=ROUNDED), "slot_mapping": Array(SLOTS, holds="slots"),
            "positions": Array(SLOTS, holds="positions"), "query_start_loc": Array(INT32, holds="starts"),
            "restart_rows": STATE, "restart_positions": Array(INT32, "in out", "positions"),
        },
        (Variant("INDEXER_BF16", functools.partial(pooled_keys, layout=INDEXER_BF16)),),
        checks.indexer_kpool_and_insert, optional_writes=(("restart_rows", "restart_positions"),),
    ),
)  # fmt: skip
