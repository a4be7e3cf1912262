"""Specs of dense attention: of packed sequences with keys of their own heads, and decode over paged latent rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import DECODE_LSE, DECODE_OUT, PREFILL_LSE, PREFILL_OUT
from ..dispatch.call import BFLOAT16, BYTES, FLOAT32, INT32
from ..dispatch.debug_checks import dense_attention as checks
from ..kernels.types.plan import DenseDecodePlan
from ..layout import MLA_BF16
from ..ops.dense_attention import HALVES, dense_mla_decode, mha_varlen
from .inputs import Inputs
from .sparse_attention import decode_results
from .spec import Array, OperationSpec, Result, Variant, dtype_name, shape

NOPE, ROPE, V = 128, 64, 128  # values of a head
STARTS = Array(INT32, holds="starts")


def packed(x: Inputs, causal: bool, accumulate: bool = False) -> dict[str, Any]:
    """New tokens over themselves and what is before them; not causal: over the latter alone.

    accumulate: results are merged into those of other keys.
    """
    step, heads, dtype = x.packed, x.size.heads, x.choose(BFLOAT16, np.float16)
    nope, rope, v_dim = x.choose((NOPE, ROPE, V), (192, 0, 64), (64, 0, 128))
    lens = step.seq_lens if causal else np.maximum(step.seq_lens - step.query_lens, 0)
    queries, keys = step.num_tokens, int(lens.sum())
    kv = x.keys(keys, heads, nope + v_dim, dtype=dtype)
    arguments = {
        "q": x.queries(queries, heads, nope + rope, dtype=dtype), "k": kv[..., :nope], "v": kv[..., nope:],
        "cu_seqlens_q": x.starts(step.query_lens), "cu_seqlens_k": x.starts(lens),
        "k_pe": x.keys(keys, rope, dtype=dtype) if rope else None, "softmax_scale": 0.3, "causal": causal,
    }  # fmt: skip
    if not accumulate:
        return arguments
    return arguments | {"accumulate": True, "out": x.floats(queries, heads, v_dim), "lse": x.floats(heads, queries)}


def decode(x: Inputs, is_fp8: bool = False) -> dict[str, Any]:
    """is_fp8: values of the cache are multiplied by a scale."""
    size, dtype = x.size, x.choose(BFLOAT16, np.float16)
    queries, pages = max(size.tokens // max(size.requests, 1), 1), (size.pages, size.block_size, MLA_BF16.head_dim)
    columns = -(-(size.context + queries) // size.block_size)
    return {
        "q": x.queries(size.requests, queries, size.heads, MLA_BF16.head_dim, dtype=dtype),
        "k_cache": x.e4m3(*pages, end=0x70) if is_fp8 else x.keys(*pages, dtype=dtype),
        "block_table": x.entries(size.pages, size.requests, columns), "cache_seqlens": x.cached(),
        "scale": 2.0**-10 if is_fp8 else None, "softmax_scale": 0.2, "causal": x.choose(True, False),
        "batch_invariant": x.choose(False, True),
    }  # fmt: skip


def packed_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, heads, _ = shape(arguments, "q", "T", "h", "d")
    _, _, v_dim = shape(arguments, "v", "N", "h", "d_v")
    return Result((tokens, heads, v_dim), dtype_name(arguments["q"])), Result((heads, tokens), "float32")


def decode_scratch(arguments: Mapping[str, Any]) -> int:
    from ..kernels.cuda import dense_attention

    batch, s_q, heads, _ = shape(arguments, "q", "b", "s_q", "h", "d")
    _, columns = shape(arguments, "block_table", "R", "B")
    longest, bound = columns * int(arguments["k_cache"].shape[1]), arguments.get("max_seqlen")
    longest = longest if bound is None else min(longest, bound)
    mode = bool(arguments.get("batch_invariant", False))
    return dense_attention.workspace_bytes(batch, s_q, heads, longest, dense_attention.device_sms(0), mode)


SPECS = (
    OperationSpec(
        mha_varlen, "dense_attention",
        {
            "q": Array(HALVES), "k": Array(HALVES), "v": Array(HALVES), "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS,
            "k_pe": Array(HALVES),
        },
        (
            Variant("causal", functools.partial(packed, causal=True)),
            Variant("not causal", functools.partial(packed, causal=False)),
            Variant("accumulate", functools.partial(packed, causal=False, accumulate=True)),
        ),
        checks.mha_varlen, results=packed_results, bounds=(PREFILL_OUT, PREFILL_LSE), outputs=("out", "lse"),
    ),
    OperationSpec(
        dense_mla_decode, "dense_attention",
        {
            "q": Array(HALVES), "k_cache": Array((*HALVES, *BYTES)), "block_table": Array(INT32, holds="pages"),
            "cache_seqlens": Array(INT32, holds="lengths"), "scale": Array(FLOAT32),
        },
        (Variant("bfloat16", decode), Variant("e4m3, one scale", functools.partial(decode, is_fp8=True))),
        checks.dense_mla_decode, results=decode_results, bounds=(DECODE_OUT, DECODE_LSE), outputs=("out", "lse"),
        scratch=decode_scratch, plan=DenseDecodePlan,
    ),
)  # fmt: skip
