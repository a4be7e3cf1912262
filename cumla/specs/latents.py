"""Spec of V4.1's compressor."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..bounds import ROUNDED
from ..dispatch.call import FLOAT32, INT32, SLOTS
from ..dispatch.debug_checks import latents as checks
from ..ops.latents import DIM, VALUES, compress_latents
from .inputs import Inputs
from .spec import Array, OperationSpec, Variant


def compress(x: Inputs, ratio: int, dtype: Any = np.float32, capacity: int = 2, restart: bool = True) -> dict[str, Any]:
    """dtype: of weights and results; capacity: rows of a ring; restart: what a step needs to be run again is kept."""
    step = x.step
    rings = step.requests * capacity + step.positions % capacity
    arguments = {
        "kv_score": x.floats(step.num_tokens, DIM * ratio), "norm_weight": x.rows(DIM, dtype=dtype),
        "slot_mapping": x.put(rings, np.int64) if ratio == 2 else x.slots(step.num_tokens),
        "latents": x.unwritten(step.num_tokens, DIM, dtype=dtype), "compress_ratio": ratio,
    }  # fmt: skip
    if ratio == 1:
        return arguments
    requests = x.size.requests + x.size.spare
    arguments |= {
        "positions": x.put(step.positions, np.int64), "query_start_loc": x.starts(step.query_lens),
        "state_cache": x.states(requests, capacity, 2 * DIM),
    }  # fmt: skip
    if restart:  # of every other request, at the step's first position
        restarts = np.zeros(requests, np.int32)
        restarts[1 : x.size.requests : 2] = (step.seq_lens - step.query_lens)[1::2]
        arguments |= {"restart_rows": x.states(requests, 2 * DIM), "restart_positions": x.put(restarts)}
    return arguments


SPECS = (
    OperationSpec(
        compress_latents, "latents",
        {
            "kv_score": Array(VALUES), "norm_weight": Array(VALUES), "slot_mapping": Array(SLOTS, holds="slots"),
            "latents": Array(VALUES, "out", bound=ROUNDED), "positions": Array(SLOTS, holds="positions"),
            "query_start_loc": Array(INT32, holds="starts"), "state_cache": Array(FLOAT32, "in out"),
            "restart_rows": Array(FLOAT32, "in out"), "restart_positions": Array(INT32, "in out", "positions"),
        },
        (
            Variant("ratio 1", functools.partial(compress, ratio=1)),
            Variant("ratio 2", functools.partial(compress, ratio=2)),
        ),
        checks.compress_latents, optional_writes=(("state_cache",), ("restart_rows", "restart_positions")),
    ),
)  # fmt: skip
