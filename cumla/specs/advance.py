"""Spec of the step forward of a decode batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dispatch.call import INT32, SLOTS
from ..dispatch.debug_checks import advance as checks
from ..ops.advance import advance_step
from .inputs import Inputs
from .spec import Array, OperationSpec, Variant


def advance(x: Inputs) -> dict[str, Any]:
    """Requests, and padding."""
    requests = x.size.requests
    padded = requests + x.size.spare
    return {
        "num_seqs": padded, "num_queries": requests, "block_size": x.size.block_size,
        "input_tokens": x.unwritten(padded, dtype=np.int64),
        "sampled_token_ids": x.put(np.arange(7, 7 + requests), np.int64),
        "input_positions": x.unwritten(padded, dtype=np.int64), "seq_lens": x.put(x.step.seq_lens, np.int32),
        "slot_mapping": x.unwritten(padded, dtype=np.int64), "block_tables": x.table(requests, x.size.context + 1),
    }  # fmt: skip


SPECS = (
    OperationSpec(
        advance_step, "advance",
        {
            "input_tokens": Array(SLOTS, "out"), "sampled_token_ids": Array(SLOTS, holds="tokens"),
            "input_positions": Array(SLOTS, "out"), "seq_lens": Array(INT32, "in out", "lengths"),
            "slot_mapping": Array(SLOTS, "out"), "block_tables": Array(INT32, holds="pages"),
        },
        (Variant("", advance),), checks.advance_step,
    ),
)  # fmt: skip
