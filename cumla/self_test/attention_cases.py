"""Cases of attention, sparse and dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import bounds
from ..bounds import DECODE_LSE, DECODE_OUT, PREFILL_LSE, PREFILL_OUT
from ..layout import (
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
from ..ops.dense_attention import dense_mla_decode, mha_varlen
from ..ops.sparse_attention import merge_attn_states, sparse_mla_decode, sparse_mla_prefill
from .arrays import BLOCK, HEADS, NUM_BLOCKS, Bench
from .case import Case, Run

DECODE = (DECODE_OUT, DECODE_LSE)
PREFILL = (PREFILL_OUT, PREFILL_LSE, PREFILL_LSE)
DENSE_PREFILL = (PREFILL_OUT, PREFILL_LSE)
SPECIAL_HEADS = 64  # has other kernels on Hopper than HEADS
MERGE = (bounds.MERGE, bounds.MERGE)


def _decode(layout: CacheLayout, second: CacheLayout | None = None) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        slots = NUM_BLOCKS * BLOCK
        extra: dict[str, Any] = {}
        if second is not None:
            lengths = bench.put([[4, 0], [9, 1]], np.int32)
            extra = {
                "extra_k_cache": bench.cache(second),
                "extra_layout": second,
                "extra_indices": bench.indices(slots, 2, 2, 9),
                "extra_topk_length": lengths,
            }
        return sparse_mla_decode(
            bench.normal(2, 2, bench.heads, layout.head_dim), bench.cache(layout), bench.indices(slots, 2, 2, 11),
            layout=layout, topk_length=bench.put([11, 0], np.int32),
            attn_sink=bench.normal(bench.heads, dtype=np.float32), **extra, backend=bench.backend,
        )  # fmt: skip

    return run


def _special_lists(bench: Bench, rows: int, *shape: int) -> tuple[Any, Any]:
    """Lists int32 [*shape, 11] of 8 queries, some without any key, and lengths of every kind."""
    indices = bench.rng.integers(0, rows, (8, 11))
    indices[1, ::2], indices[2], indices[3], indices[4], indices[7] = -1, -1, rows, 5, -1
    lengths = [11, 9, 11, 12, 5, 0, -3, 2**31 - 1]
    return bench.put(indices.reshape(*shape, 11), np.int32), bench.put(np.reshape(lengths, shape), np.int32)


def _special_sink(bench: Bench) -> Any:
    """Sinks that cycle through -inf (no effect), finite, and +inf (takes all weight)."""
    return bench.put(np.resize([-np.inf, 0.5, np.inf], bench.heads), np.float32)


def _special_decode(layout: CacheLayout, two_caches: bool) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        slots = NUM_BLOCKS * BLOCK
        indices, lengths = _special_lists(bench, slots, 4, 2)
        extra: dict[str, Any] = {}
        if two_caches:  # combines each list with another one
            extra_indices, extra_lengths = _special_lists(bench, slots, 2, 2, 2)
            extra = {
                "extra_k_cache": bench.cache(layout),
                "extra_indices": extra_indices.swapaxes(0, 2).reshape(4, 2, 11),
                "extra_topk_length": extra_lengths.swapaxes(0, 2).reshape(4, 2),
            }
        return sparse_mla_decode(
            bench.normal(4, 2, bench.heads, layout.head_dim), bench.cache(layout), indices, layout=layout,
            topk_length=lengths, attn_sink=_special_sink(bench), **extra, backend=bench.backend,
        )  # fmt: skip

    return run


def _special_prefill(head_dim: int) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        indices, lengths = _special_lists(bench, 20, 8)
        return sparse_mla_prefill(
            bench.normal(8, bench.heads, head_dim), bench.small(20, head_dim), indices, topk_length=lengths,
            attn_sink=_special_sink(bench), backend=bench.backend,
        )  # fmt: skip

    return run


def _prefill(head_dim: int) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        return sparse_mla_prefill(
            bench.normal(4, bench.heads, head_dim), bench.small(20, head_dim), bench.indices(20, 4, 13),
            attn_sink=bench.normal(bench.heads, dtype=np.float32), topk_length=bench.put([13, 0, 1, 9], np.int32),
            backend=bench.backend,
        )  # fmt: skip

    return run


def _merge(bench: Bench) -> Sequence[Any]:
    parts = [bench.normal(4, bench.heads, 64, dtype=np.float32) for _ in range(2)]
    logs = [bench.normal(bench.heads, 4, dtype=np.float32) for _ in range(2)]
    logs[0][:, 1] = np.inf
    out = bench.xp.zeros((4, bench.heads, 64), np.float32)
    lse = bench.xp.zeros((bench.heads, 4), np.float32)
    merge_attn_states(out, parts[0], logs[0], parts[1], logs[1], lse, backend=bench.backend)
    return out, lse


def _mha(causal: bool) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        q_lens, k_lens = (3, 0, 70, 5), (9, 4, 130, 2)
        q, kv, k_pe = (
            bench.normal(sum(q_lens), bench.heads, 192), bench.small(sum(k_lens), bench.heads, 256),
            bench.small(sum(k_lens), 64),
        )  # fmt: skip
        starts = [bench.put(np.concatenate([[0], np.cumsum(lens)]), np.int32) for lens in (q_lens, k_lens)]
        out, lse = mha_varlen(
            q, kv[..., :128], kv[..., 128:], *starts, k_pe=k_pe, softmax_scale=0.3, causal=causal, backend=bench.backend
        )
        return out, lse

    return run


def _dense_decode(fp8: bool) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        shape = (NUM_BLOCKS, BLOCK, MLA_BF16.head_dim)
        cache = bench.put(bench.rng.integers(0, 0x70, shape), np.uint8) if fp8 else bench.small(*shape)
        table = bench.indices(NUM_BLOCKS, 3, 4)
        lens = bench.put([20, 0, 7], np.int32)
        out, lse = dense_mla_decode(
            bench.normal(3, 2, bench.heads, MLA_BF16.head_dim), cache, table, lens, scale=2.0**-10 if fp8 else None,
            softmax_scale=0.2, backend=bench.backend,
        )  # fmt: skip
        return out, lse

    return run


CASES = (
    Case("sparse_mla_decode", "DSV4_FP8, two caches", "sparse_attention", DECODE, _decode(DSV4_FP8, DSV4_FP8)),
    Case("sparse_mla_decode", "V32_FP8", "sparse_attention", DECODE, _decode(V32_FP8)),
    Case("sparse_mla_decode", "MLA_BF16", "sparse_attention", DECODE, _decode(MLA_BF16)),
    *(
        Case("sparse_mla_decode", variant, "sparse_attention", DECODE, _decode(*formats))
        for variant, *formats in (
            ("DSV41_FP8", DSV41_FP8),
            ("DSV41_FP8, DSV41_FP4", DSV41_FP8, DSV41_FP4),
            ("DSV41_FP4", DSV41_FP4),
            ("V32_NOPE_FP8", V32_NOPE_FP8),
            ("DSV41_FP8_SPLIT", DSV41_FP8_SPLIT),
            ("DSV41_FP8_SPLIT, DSV41_FP4_SPLIT", DSV41_FP8_SPLIT, DSV41_FP4_SPLIT),
            ("DSV41_FP4_SPLIT", DSV41_FP4_SPLIT),
        )
    ),
    Case("sparse_mla_prefill", "512", "sparse_attention", PREFILL, _prefill(512)),
    Case("sparse_mla_prefill", "576", "sparse_attention", PREFILL, _prefill(576)),
    *(
        Case("sparse_mla_decode", f"{layout.name}, special values", "sparse_attention", DECODE, run, SPECIAL_HEADS)
        for layout, run in ((x, _special_decode(x, x is DSV4_FP8)) for x in (DSV4_FP8, V32_FP8, MLA_BF16))
    ),
    *(
        Case("sparse_mla_prefill", f"{dim}, special values", "sparse_attention", PREFILL, _special_prefill(dim), heads)
        for dim, heads in ((512, SPECIAL_HEADS), (576, HEADS))
    ),
    Case("mha_varlen", "causal", "dense_attention", DENSE_PREFILL, _mha(True)),
    Case("mha_varlen", "not causal", "dense_attention", DENSE_PREFILL, _mha(False)),
    Case("dense_mla_decode", "bfloat16", "dense_attention", DECODE, _dense_decode(False)),
    Case("dense_mla_decode", "e4m3, one scale", "dense_attention", DECODE, _dense_decode(True)),
    Case("merge_attn_states", "float32", "sparse_attention", MERGE, _merge),
)
