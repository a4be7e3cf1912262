"""Specs of the indexer's queries and scores."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import EQUAL, SCORES
from ..dispatch.call import BFLOAT16, BYTES, FLOAT32, FLOATS, INT32, SLOTS
from ..dispatch.debug_checks import indexer as checks
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..ops.indexer import (
    HEAD_DIM,
    PLAIN,
    TABLE,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    fused_indexer_q_rope_quant,
    get_paged_mqa_logits_metadata,
)
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Result, Variant, shape

HOPPER_HEADS = 64  # which have kernels of their own there
VALUES = (*BYTES, *PLAIN)  # of queries and keys
LENGTHS, STARTS = Array(INT32, holds="lengths"), Array(INT32, holds="starts")
PAGED = {  # what scores of pages read
    "q": Array(VALUES), "kv_cache": Array(CACHE), "weights": Array(FLOAT32), "context_lens": LENGTHS,
    "block_table": Array(INT32, holds="pages"),
}  # fmt: skip
PACKED = {  # what scores of packed keys read, without their scales
    "q": Array(VALUES), "kv": Array(VALUES), "weights": Array(FLOAT32), "cu_seqlen_ks": STARTS, "cu_seqlen_ke": LENGTHS,
}  # fmt: skip
KV_SCALES = Array((*FLOAT32, *BYTES), packed=True)


def queries(
    x: Inputs, quantize: bool = True, q_format: str = "fp8", dtype: Any = BFLOAT16, rotated: bool = True,
    hadamard: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """rotated: positions are in RoPE's table, but for the last one; hadamard: with SSMax and a rotation of keys."""
    rows, heads = x.size.rows, x.size.heads
    positions = x.positions(rows) if rotated else x.put(np.full(rows, -1))
    positions[-1:] = 2 * x.size.context
    factors = {"hadamard": True, "ssmax_scale": x.floats(heads), "ssmax_bias": x.floats(heads)} if hadamard else {}
    return factors | {
        "positions": positions, "index_q": x.rows(rows, heads, HEAD_DIM, dtype=x.choose(dtype, np.float16, np.float32)),
        "index_q_cos_sin_cache": x.rotation(x.size.context), "index_weights": x.floats(rows, heads),
        "rope_first": x.choose(False, True), "is_neox": x.choose(False, True), "quantize": quantize,
        "q_format": x.choose(q_format, "fp8", "mxfp4") if quantize else q_format,
    }  # fmt: skip


def packed(x: Inputs, heads: int = 0) -> dict[str, Any]:
    """Queries of prompts over packed keys. heads: 0: those of the size."""
    tokens, keys = x.size.tokens, x.size.keys
    heads = x.choose(heads or x.size.heads, 32, 64)
    starts, ends = x.ranges(tokens, keys)
    if x.choose(INDEXER_FP8, INDEXER_MXFP4) is INDEXER_FP8:
        kv, scales = x.index_values(keys, HEAD_DIM), x.scales(keys)
    else:
        kv, scales = (x.index_values(keys, n) for n in (INDEXER_MXFP4.row_bytes, INDEXER_MXFP4.scale_bytes))
    return {
        "q": x.index_values(tokens, heads, HEAD_DIM), "kv": kv, "weights": x.index_weights(tokens, heads),
        "cu_seqlen_ks": starts, "cu_seqlen_ke": ends, "kv_scales": scales,
    }  # fmt: skip


def packed_logits(x: Inputs) -> dict[str, Any]:
    return {**packed(x, HOPPER_HEADS), "max_seqlen_k": x.choose(0, 5, 300)}


def paged(x: Inputs, layout: CacheLayout = INDEXER_FP8, next_n: int = 2) -> dict[str, Any]:
    """Queries of decodes over the pages of their requests."""
    size, next_n = x.size, x.choose(next_n, 1, 3, 6)
    requests, heads = size.requests, x.choose(size.heads, 32, 64)
    return {
        "q": x.index_values(requests, next_n, heads, HEAD_DIM), "kv_cache": x.cache(layout),
        "weights": x.index_weights(requests * next_n, heads), "context_lens": x.context_lens(requests, next_n),
        "block_table": x.table(requests, size.context), "layout": layout,
    }  # fmt: skip


def paged_logits(x: Inputs, layout: CacheLayout) -> dict[str, Any]:
    return {**paged(x, layout), "clean_logits": True}


def schedule(x: Inputs, block_size: int = 1, num_sms: int = 5) -> dict[str, Any]:
    return {"context_lens": x.context_lens(x.size.requests, 1), "block_kv": block_size, "num_sms": num_sms}


def queries_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, heads, dim = shape(arguments, "index_q", "T", "H", "D")
    if arguments.get("q_format") == "mxfp4_rows":
        dim = INDEXER_MXFP4.token_bytes
    dtype = "uint8" if arguments.get("quantize", True) else "float32"
    return Result((tokens, heads, dim), dtype), Result((tokens, heads), "float32")


def packed_width(arguments: Mapping[str, Any]) -> Any:
    return arguments.get("max_seqlen_k") or arguments["kv"].shape[0]


def paged_width(arguments: Mapping[str, Any], cache: str) -> Any:
    width = arguments.get("max_context_len")
    return width if width is not None else arguments["block_table"].shape[1] * arguments[cache].shape[1]


def packed_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, _, _ = shape(arguments, "q", "M", "H", "D")
    return (Result((tokens, packed_width(arguments)), "float32"),)


def paged_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    batch, next_n, _, _ = shape(arguments, "q", "B", "next_n", "H", "D")
    return (Result((batch * next_n, paged_width(arguments, "kv_cache")), "float32"),)


def schedule_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    return (Result((arguments["num_sms"] + 1, 2), "int32"),)


SPECS = (
    OperationSpec(
        fused_indexer_q_rope_quant, "indexer",
        {
            "positions": Array(SLOTS, holds="positions"), "index_q": Array(FLOATS),
            "index_q_cos_sin_cache": Array(TABLE), "index_weights": Array(FLOATS),
            "ssmax_scale": Array(FLOAT32), "ssmax_bias": Array(FLOAT32),
        },
        (
            Variant("not quantised", functools.partial(queries, quantize=False)),
            Variant("ssmax_scale", functools.partial(queries, quantize=False, hadamard=True)),
            # Not rotated: a rounding to bfloat16 would give other codes.
            Variant("mxfp4_rows", functools.partial(queries, q_format="mxfp4_rows", rotated=False), (EQUAL, SCORES)),
        ),
        checks.fused_indexer_q_rope_quant, results=queries_results, bounds=(SCORES, SCORES), outputs=("out",),
    ),
    OperationSpec(
        fp8_mqa_logits, "indexer", {**PACKED, "kv_scales": KV_SCALES}, (Variant("", packed_logits),), checks.mqa_logits,
        results=packed_results, bounds=(SCORES,), outputs=("out",),
    ),
    OperationSpec(
        fp8_paged_mqa_logits, "indexer", {**PAGED, "schedule_metadata": STARTS},
        (
            Variant("", functools.partial(paged_logits, layout=INDEXER_FP8)),
            Variant("INDEXER_MXFP4", functools.partial(paged_logits, layout=INDEXER_MXFP4)),
        ),
        checks.paged_mqa_logits, results=paged_results, bounds=(SCORES,), outputs=("out",),
    ),
    OperationSpec(
        get_paged_mqa_logits_metadata, "indexer", {"context_lens": LENGTHS}, (Variant("", schedule),),
        checks.paged_mqa_logits_metadata, results=schedule_results, bounds=(EQUAL,), outputs=("out",),
    ),
)  # fmt: skip
