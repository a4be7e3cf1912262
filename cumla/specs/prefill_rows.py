"""Spec of the rows and lists of a chunk of prefills, which layers call."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..bounds import EQUAL
from ..dispatch.call import FLOATS, INT32
from ..dispatch.debug_checks import prefill_rows as checks
from ..layout import DSV4_FP8, DSV41_FP4, DSV41_FP8, CacheLayout
from ..ops.prefill_rows import gather_prefill_rows
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Variant


def gather(
    x: Inputs, layout: CacheLayout, compressed_layout: CacheLayout, ratio: int = 4, compact: bool = True
) -> dict[str, Any]:
    """Compressed rows, then windows. ratio: 0: windows alone."""
    step, size = x.step, x.size
    topk, rows = (size.topk, size.rows) if ratio else (0, 0)
    compressed: dict[str, Any] = {}
    if ratio:
        table = x.table(size.requests, size.context)
        compressed = {"compressed_cache": x.cache(compressed_layout), "compressed_block_table": table,
                      "compressed_layout": compressed_layout}  # fmt: skip
    return {
        "out": x.unwritten(size.requests, rows + x.longest(step.gathered) + size.spare, layout.head_dim),
        "swa_cache": x.cache(layout), "swa_block_table": x.table(size.requests, size.context),
        "swa_block_size": size.block_size, "seq_lens": x.put(step.seq_lens, np.int32),
        "gather_lens": x.put(step.gathered, np.int32), "query_start_loc": x.starts(step.query_lens),
        "topk_indices": x.selected(np.full(size.tokens, rows), max(topk, 4)), "topk": topk,
        "window_size": size.window, "compress_ratio": ratio, "N": rows, "compact": compact, "layout": layout,
        **compressed,
    }  # fmt: skip


SPECS = (
    OperationSpec(
        gather_prefill_rows, "prefill_rows",
        {
            "out": Array(FLOATS, "out"), "swa_cache": Array(CACHE), "swa_block_table": Array(INT32, holds="pages"),
            "seq_lens": Array(INT32, holds="lengths"), "gather_lens": Array(INT32, holds="lengths"),
            "query_start_loc": Array(INT32, holds="starts"), "topk_indices": Array(INT32, holds="entries"),
            "compressed_cache": Array(CACHE), "compressed_block_table": Array(INT32, holds="pages"),
        },
        (
            Variant("DSV4_FP8", functools.partial(gather, layout=DSV4_FP8, compressed_layout=DSV4_FP8)),
            Variant("DSV41_FP8", functools.partial(gather, layout=DSV41_FP8, compressed_layout=DSV41_FP4)),
        ),
        checks.gather_prefill_rows, bounds=(EQUAL, EQUAL), public=False, compiled=False,
    ),
)  # fmt: skip
