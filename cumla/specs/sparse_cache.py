"""Specs of the operations that insert rows into the paged caches and gather them back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16, BYTES, FLOAT32, FLOATS, INT32, SLOTS
from ..dispatch.debug_checks import sparse_cache as checks
from ..layout import (
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    INDEXER_FP8,
    INDEXER_MXFP4,
    V32_FP8,
    V32_NOPE_FP8,
    CacheLayout,
)
from ..ops.sparse_cache import (
    cp_gather_indexer_k_quant_cache,
    dequantize_and_gather_k_cache,
    indexer_k_quant_and_cache,
    quantize_and_insert_k_cache,
)
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Variant

V41 = (DSV41_FP8, DSV41_FP4, DSV41_FP8_SPLIT, DSV41_FP4_SPLIT)


def insert(x: Inputs, layout: CacheLayout, is_ue8m0: bool = True, slots: Any = np.int64) -> dict[str, Any]:
    """slots: their dtype."""
    return {
        "k": x.rows(x.size.rows, layout.head_dim, dtype=x.choose(BFLOAT16, np.float16, np.float32)),
        "k_cache": x.new_cache(layout), "slot_mapping": x.slots(x.size.rows, slots), "block_size": x.size.block_size,
        "is_ue8m0": is_ue8m0, "layout": layout,
    }  # fmt: skip


def gather(x: Inputs, layout: CacheLayout) -> dict[str, Any]:
    """The last rows of contexts, between rows of the workspace that are not theirs."""
    step, rows = x.step, x.longest(x.step.gathered) + 2 * x.size.spare
    lens = None if step.gather_lens is None else x.put(step.gather_lens, np.int32)
    return {
        "out": x.unwritten(x.size.requests, rows, layout.head_dim, dtype=x.choose(BFLOAT16, np.float16, np.float32)),
        "k_cache": x.cache(layout), "seq_lens": x.put(step.seq_lens, np.int32), "gather_lens": x.choose(lens, None),
        "block_table": x.table(x.size.requests, x.size.context), "block_size": x.size.block_size,
        "offset": x.size.spare, "layout": layout,
    }  # fmt: skip


def insert_keys(x: Inputs, layout: CacheLayout = INDEXER_FP8) -> dict[str, Any]:
    cache = x.new_cache(layout)
    return {
        "k": x.rows(x.size.rows, layout.head_dim, dtype=x.choose(BFLOAT16, np.float16, np.float32)),
        "kv_cache": cache if cache.ndim == 3 else layout.view(cache, x.size.block_size),
        "slot_mapping": x.slots(x.size.rows), "quant_block_size": layout.scale_tile,
    }  # fmt: skip


def gather_keys(x: Inputs, layout: CacheLayout = INDEXER_FP8, as_e4m3: bool = True) -> dict[str, Any]:
    """as_e4m3: keys of an MXFP4 cache, too, with a float32 scale."""
    lens = x.step.seq_lens
    rows = int(lens.sum()) + x.size.spare
    width = layout.head_dim if as_e4m3 else layout.quantized_bytes
    scales = x.unwritten(rows, dtype=np.float32) if as_e4m3 else x.unwritten(rows, layout.scale_bytes, dtype=np.uint8)
    return {
        "kv_cache": x.cache(layout), "dst_k": x.unwritten(rows, width, dtype=np.uint8), "dst_scale": scales,
        "block_table": x.table(x.size.requests, x.size.context), "cu_seq_lens": x.starts(lens),
    }  # fmt: skip


def of_each(arguments: Any, *layouts: CacheLayout) -> list[Variant]:
    return [Variant(x.name, functools.partial(arguments, layout=x)) for x in layouts]


SPECS = (
    OperationSpec(
        quantize_and_insert_k_cache, "sparse_cache",
        {"k": Array(FLOATS), "k_cache": Array(CACHE, "out"), "slot_mapping": Array(SLOTS, holds="slots")},
        (
            *of_each(insert, DSV4_FP8, V32_FP8),
            Variant("V32_FP8, any scale", functools.partial(insert, layout=V32_FP8, is_ue8m0=False)),
            *of_each(insert, INDEXER_FP8, *V41, V32_NOPE_FP8, INDEXER_MXFP4),
        ),
        checks.quantize_and_insert_k_cache,
    ),
    OperationSpec(
        dequantize_and_gather_k_cache, "sparse_cache",
        {
            "out": Array(FLOATS, "out"), "k_cache": Array(CACHE), "seq_lens": Array(INT32, holds="lengths"),
            "gather_lens": Array(INT32, holds="lengths"), "block_table": Array(INT32, holds="pages"),
        },
        (*of_each(gather, *V41, V32_NOPE_FP8, INDEXER_MXFP4, DSV4_FP8, V32_FP8),), checks.dequantize_and_gather_k_cache,
    ),
    OperationSpec(
        indexer_k_quant_and_cache, "sparse_cache",
        {"k": Array(FLOATS), "kv_cache": Array(CACHE, "out"), "slot_mapping": Array(SLOTS, holds="slots")},
        (Variant("", insert_keys),), checks.quantize_and_insert_k_cache,
    ),
    OperationSpec(
        cp_gather_indexer_k_quant_cache, "sparse_cache",
        {
            "kv_cache": Array(CACHE), "dst_k": Array((*BYTES, *FLOATS), "out"),
            "dst_scale": Array((*BYTES, *FLOAT32), "out"), "block_table": Array(INT32, holds="pages"),
            "cu_seq_lens": Array(INT32, holds="starts"),
        },
        (Variant("", gather_keys), Variant("INDEXER_MXFP4", functools.partial(gather_keys, layout=INDEXER_MXFP4))),
        checks.cp_gather_indexer_k_quant_cache,
    ),
)  # fmt: skip
