"""Specs of sparse attention: decode over paged caches, prefill over gathered rows, and the merge of partial results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import DECODE_LSE, DECODE_OUT, MERGE, PREFILL_LSE, PREFILL_OUT
from ..dispatch.call import BFLOAT16, BYTES, FLOAT32, FLOATS, INT32
from ..dispatch.debug_checks import sparse_attention as checks
from ..dispatch.formats import DEFAULT_BLOCK_SIZES
from ..layout import (
    DSV4_BF16,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    MLA_BF16,
    V32_FP8,
    V32_NOPE_FP8,
    CacheLayout,
)
from ..ops.sparse_attention import (
    ROWS,
    V_DIM,
    merge_attn_states,
    sparse_mla_decode,
    sparse_mla_prefill,
    workspace_bytes,
)
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Result, Variant, dtype_name, shape

SPECIAL_HEADS = 64  # have other kernels on Hopper than the tiny size's heads
SPECIAL_QUERIES, SPECIAL_TOPK = 8, 11
ENTRIES, LENGTHS = Array(INT32, holds="entries"), Array(INT32, holds="lengths")


def decode(
    x: Inputs, layout: CacheLayout, second: CacheLayout | None = None, windows: bool = True, ratio: int = 4,
    second_block_size: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Decodes of one or several tokens each.

    Args:
        windows: the first list is a window, and lists have lengths, as V4's; else it has selected tokens, as V3.2's
        ratio: positions of a row of the second cache
    """
    size, second = x.size, x.choose(second, None, layout)
    queries = max(size.tokens // max(size.requests, 1), 1)
    lists = [("", layout, size.block_size, size.window if windows else size.topk, 0 if windows else 1)]
    if second is not None:
        lists.append(("extra_", second, second_block_size or size.block_size, size.topk, ratio))
    arguments = {"q": x.queries(size.requests, queries, size.heads, layout.head_dim), "layout": layout}
    for prefix, of_cache, block_size, width, positions in lists:
        cache = x.cache(of_cache, block_size)
        slots = cache.shape[0] * cache.shape[1]
        indices, lengths = x.slot_lists(queries, width, slots, block_size, positions)
        arguments |= {f"{prefix}k_cache": cache, f"{prefix}indices": indices}
        if windows:
            arguments[f"{prefix}topk_length"] = x.choose(lengths, None)
    if second is not None:
        arguments["extra_layout"] = second
    sink = x.choose(x.floats(size.heads), None) if windows and size.lengths else None
    return arguments | {"attn_sink": sink, "batch_invariant": x.choose(False, True)}


def decode_values(x: Inputs) -> dict[str, Any]:
    """Caches of bfloat16."""
    return decode(x, x.choose(MLA_BF16, DSV4_BF16))


def special_lists(x: Inputs, rows: int, *axes: int) -> tuple[Any, Any]:
    """Lists of SPECIAL_QUERIES queries, some without any key, and lengths of every kind."""
    indices = x.rng.integers(0, max(rows, 1), (SPECIAL_QUERIES, SPECIAL_TOPK))
    indices[1, ::2], indices[2], indices[3], indices[4], indices[7] = -1, -1, rows, 5, -1
    lengths = [SPECIAL_TOPK, 9, SPECIAL_TOPK, SPECIAL_TOPK + 1, 5, 0, -3, 2**31 - 1]
    return x.put(indices.reshape(*axes, SPECIAL_TOPK), np.int32), x.put(np.reshape(lengths, axes), np.int32)


def special_sink(x: Inputs) -> Any:
    """Sinks that cycle through -inf, which has no effect, a number, and +inf, which takes all weight."""
    return x.put(np.resize([-np.inf, 0.5, np.inf], x.size.heads), np.float32)


def special_decode(x: Inputs, layout: CacheLayout, two_caches: bool = False) -> dict[str, Any]:
    slots = x.size.pages * x.size.block_size
    indices, lengths = special_lists(x, slots, 4, 2)
    arguments = {
        "q": x.queries(4, 2, x.size.heads, layout.head_dim), "k_cache": x.cache(layout), "indices": indices,
        "layout": layout, "topk_length": lengths, "attn_sink": special_sink(x),
    }  # fmt: skip
    if two_caches:  # combines each list with another one
        indices, lengths = special_lists(x, slots, 2, 2, 2)
        arguments |= {
            "extra_k_cache": x.cache(layout), "extra_topk_length": lengths.swapaxes(0, 2).reshape(4, 2),
            "extra_indices": indices.swapaxes(0, 2).reshape(4, 2, SPECIAL_TOPK),
        }  # fmt: skip
    return arguments


def prefill(x: Inputs, head_dim: int, windows: bool = True) -> dict[str, Any]:
    """windows: a window is listed after the selected rows, and lists have lengths."""
    size = x.size
    indices, lengths = x.row_lists(windows)
    sink = x.choose(x.floats(size.heads), None) if windows and size.lengths else None
    return {
        "q": x.queries(size.tokens, size.heads, head_dim), "kv": x.keys(size.rows, head_dim), "indices": indices,
        "attn_sink": sink, "topk_length": x.choose(lengths, None) if windows else None,
        "precision": x.choose(None, "fp8"),
    }  # fmt: skip


def special_prefill(x: Inputs, head_dim: int) -> dict[str, Any]:
    indices, lengths = special_lists(x, x.size.rows, SPECIAL_QUERIES)
    return {
        "q": x.queries(SPECIAL_QUERIES, x.size.heads, head_dim), "kv": x.keys(x.size.rows, head_dim),
        "indices": indices, "attn_sink": special_sink(x), "topk_length": lengths,
    }  # fmt: skip


def merge(x: Inputs, dim: int = 64, dtype: Any = np.float32) -> dict[str, Any]:
    dtype, of_parts = x.choose(dtype, BFLOAT16, np.float16), (x.size.tokens, x.size.heads, dim)
    sums = x.size.heads, x.size.tokens
    return {
        "output": x.unwritten(*of_parts, dtype=dtype), "prefix_output": x.rows(*of_parts, dtype=dtype),
        "prefix_lse": x.logs(*sums), "suffix_output": x.rows(*of_parts, dtype=dtype), "suffix_lse": x.logs(*sums),
        "output_lse": x.choose(x.unwritten(*sums, dtype=np.float32), None),
    }  # fmt: skip


def decode_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    batch, s_q, heads, _ = shape(arguments, "q", "b", "s_q", "h", "d")
    out = Result((batch, s_q, heads, V_DIM), dtype_name(arguments["q"]))
    return out, Result((batch, heads, s_q), "float32")


def decode_scratch(arguments: Mapping[str, Any]) -> int:
    from ..kernels.cuda.sparse import work as sparse_work

    batch, s_q, heads, _ = shape(arguments, "q", "b", "s_q", "h", "d")
    tiles = batch * s_q * -(-heads // sparse_work.HEADS)
    return sparse_work.workspace_bytes(tiles, sparse_work.device_sms(0))


def prefill_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, heads, _ = shape(arguments, "q", "s_q", "h", "d")
    logits = Result((tokens, heads), "float32")
    return Result((tokens, heads, V_DIM), dtype_name(arguments["q"])), logits, logits


def prefill_scratch(arguments: Mapping[str, Any]) -> int:
    kv, (_, heads, width) = arguments["kv"], arguments["q"].shape
    rows, quantized = kv.shape[0], dtype_name(kv) == "uint8"
    if quantized:  # pages
        tokens = arguments.get("block_size") or DEFAULT_BLOCK_SIZES["DSV4_FP8"]
        rows *= tokens if len(kv.shape) == 2 else kv.shape[1]
    return workspace_bytes(arguments.get("precision"), rows, heads, width, quantized)


def over(layout: CacheLayout, second: CacheLayout | None = None, name: str = "") -> Variant:
    """Decodes over caches of these formats."""
    arguments = functools.partial(decode, layout=layout, second=second)
    return Variant(name or (layout.name if second is None else f"{layout.name}, {second.name}"), arguments)


def with_special_values(name: str, arguments: Any, heads: int = SPECIAL_HEADS) -> Variant:
    return Variant(f"{name}, special values", arguments, heads=heads)


SPECS = (
    OperationSpec(
        sparse_mla_decode, "sparse_attention",
        {
            "q": Array(ROWS), "k_cache": Array(CACHE), "indices": ENTRIES, "topk_length": LENGTHS,
            "extra_k_cache": Array(CACHE), "extra_indices": ENTRIES, "extra_topk_length": LENGTHS,
            "attn_sink": Array(FLOAT32),
        },
        (
            over(DSV4_FP8, DSV4_FP8, name="DSV4_FP8, two caches"), over(V32_FP8), Variant("MLA_BF16", decode_values),
            over(DSV41_FP8), over(DSV41_FP8, DSV41_FP4), over(DSV41_FP4), over(V32_NOPE_FP8), over(DSV41_FP8_SPLIT),
            over(DSV41_FP8_SPLIT, DSV41_FP4_SPLIT), over(DSV41_FP4_SPLIT),
            *(
                with_special_values(x.name, functools.partial(special_decode, layout=x, two_caches=x is DSV4_FP8))
                for x in (DSV4_FP8, V32_FP8, MLA_BF16)
            ),
        ),
        checks.sparse_mla_decode, results=decode_results, bounds=(DECODE_OUT, DECODE_LSE), outputs=("out", "lse"),
        scratch=decode_scratch,
    ),
    OperationSpec(
        sparse_mla_prefill, "sparse_attention",
        {
            "q": Array(ROWS), "kv": Array((*ROWS, *BYTES)), "indices": ENTRIES, "attn_sink": Array(FLOAT32),
            "topk_length": LENGTHS,
        },
        (
            Variant("512", functools.partial(prefill, head_dim=512)),
            Variant("576", functools.partial(prefill, head_dim=576)),
            with_special_values("512", functools.partial(special_prefill, head_dim=512)),
            with_special_values("576", functools.partial(special_prefill, head_dim=576), Variant.heads),
        ),
        checks.sparse_mla_prefill, results=prefill_results, bounds=(PREFILL_OUT, PREFILL_LSE, PREFILL_LSE),
        outputs=("out",), scratch=prefill_scratch, plan=None,
    ),
    OperationSpec(
        merge_attn_states, "sparse_attention",
        {
            "output": Array(FLOATS, "out", bound=MERGE), "prefix_output": Array(FLOATS), "prefix_lse": Array(FLOAT32),
            "suffix_output": Array(FLOATS), "suffix_lse": Array(FLOAT32),
            "output_lse": Array(FLOAT32, "out", bound=MERGE),
        },
        (Variant("float32", merge),), optional_writes=(("output_lse",),),
    ),
)  # fmt: skip
