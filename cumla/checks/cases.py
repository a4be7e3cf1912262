"""Small random cases of every public op, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import bounds
from ..bounds import DECODE_LSE, DECODE_OUT, EQUAL, PREFILL_LSE, PREFILL_OUT, ROUNDED, SCORES, Bound
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_BF16, DSV4_FP8, INDEXER_BF16, INDEXER_FP8, MLA_BF16, V32_FP8, CacheLayout
from ..ops.advance import advance_step
from ..ops.blocks import copy_blocks, swap_blocks
from ..ops.compressor import compress_and_insert
from ..ops.dense_attention import dense_mla_decode, mha_varlen
from ..ops.dense_cache import concat_and_cache_mla, gather_cache
from ..ops.indexer import (
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    fused_indexer_q_rope_quant,
    get_paged_mqa_logits_metadata,
)
from ..ops.indexer_topk import indexer_topk, top_k_per_row
from ..ops.indices import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
    compute_swa_indices_and_lens,
)
from ..ops.norm_rope import (
    apply_rope,
    fused_q_kv_rmsnorm,
    indexer_knorm_rope_and_insert,
    inverse_rope_and_quantize,
    qnorm_rope_and_insert,
)
from ..ops.sparse_attention import merge_attn_states, sparse_mla_decode, sparse_mla_prefill
from ..ops.sparse_cache import (
    cp_gather_indexer_k_quant_cache,
    dequantize_and_gather_k_cache,
    indexer_k_quant_and_cache,
    quantize_and_insert_k_cache,
)
from .arrays import BLOCK, NUM_BLOCKS, SEQ_LENS, Bench

WINDOW = 8
UNWRITTEN = 165  # fills what an op must leave alone
DECODE = (DECODE_OUT, DECODE_LSE)
PREFILL = (PREFILL_OUT, PREFILL_LSE, PREFILL_LSE)
DENSE_PREFILL = (PREFILL_OUT, PREFILL_LSE)
MERGE = (bounds.MERGE, bounds.MERGE)


@dataclass(frozen=True)
class Case:
    """run(bench) returns the results to compare; `kernels` is the file of kernels it needs."""

    op: str
    variant: str
    kernels: str
    bounds: Sequence[Bound]
    run: Callable[[Bench], Sequence[Any]]


def _insert(layout: CacheLayout, is_ue8m0: bool = True) -> Callable[[Bench], Sequence[Any]]:
    def run(bench: Bench) -> Sequence[Any]:
        pages = bench.xp.full((NUM_BLOCKS, layout.page_bytes(BLOCK)), UNWRITTEN, np.uint8)
        slots = bench.rng.permutation(NUM_BLOCKS * BLOCK)[:9]
        slots[::4] = -1
        quantize_and_insert_k_cache(
            bench.normal(9, layout.head_dim), pages, bench.put(slots), BLOCK, is_ue8m0, layout=layout,
            backend=bench.backend,
        )  # fmt: skip
        return (pages,)

    return run


def _gather(layout: CacheLayout) -> Callable[[Bench], Sequence[Any]]:
    def run(bench: Bench) -> Sequence[Any]:
        batch, out = bench.batch(), bench.xp.zeros((3, 24, layout.head_dim), BFLOAT16)
        dequantize_and_gather_k_cache(
            out, bench.cache(layout), batch["seq_lens"], bench.put([5, 2, 11], np.int32), batch["block_table"],
            BLOCK, 2, layout=layout, backend=bench.backend,
        )  # fmt: skip
        return (out.astype(np.float32),)

    return run


def _indexer_insert(bench: Bench) -> Sequence[Any]:
    cache = INDEXER_FP8.allocate(NUM_BLOCKS, BLOCK, bench.xp)
    slots = bench.put(bench.rng.permutation(NUM_BLOCKS * BLOCK)[:9])
    indexer_k_quant_and_cache(bench.normal(9, 128), cache, slots, backend=bench.backend)
    return (cache,)


def _indexer_gather(bench: Bench) -> Sequence[Any]:
    cache, batch = bench.cache(INDEXER_FP8), bench.batch()
    keys, scales = bench.xp.zeros((40, 128), np.uint8), bench.xp.zeros(40, np.float32)
    cp_gather_indexer_k_quant_cache(
        cache, keys, scales, batch["block_table"], bench.starts(SEQ_LENS), backend=bench.backend
    )
    return keys, scales


def _scores(bench: Bench, *shape: int) -> Any:
    """e4m3 bytes of queries or keys, at most 1."""
    return bench.put(bench.rng.integers(0, 0x39, shape), np.uint8)


def _indexer_queries(bench: Bench) -> Sequence[Any]:
    q, weights = fused_indexer_q_rope_quant(
        bench.put([3, 0, 9], np.int64), bench.normal(3, 5, 128), bench.normal(7, 64, dtype=np.float32),
        bench.normal(3, 5, dtype=np.float32), quantize=False, backend=bench.backend,
    )  # fmt: skip
    return q, weights


def _indexer_scores(bench: Bench) -> Sequence[Any]:
    q, k, scales = _scores(bench, 5, 64, 128), _scores(bench, 70, 128), abs(bench.normal(70, dtype=np.float32))
    ranges = bench.indices(60, 5), bench.indices(75, 5)
    weights = bench.normal(5, 64, dtype=np.float32) / np.float32(np.sqrt(64 * 128))  # as indexers scale theirs
    return (fp8_mqa_logits(q, k, weights, *ranges, True, kv_scales=scales, backend=bench.backend),)


def _indexer_paged(bench: Bench) -> dict[str, Any]:
    table = bench.put(bench.rng.permutation(NUM_BLOCKS)[:6].reshape(3, 2), np.int32)
    return {
        "q": _scores(bench, 3, 2, bench.heads, 128), "weights": bench.normal(6, bench.heads, dtype=np.float32),
        "context_lens": bench.put([9, 2, 0], np.int32), "block_table": table, "backend": bench.backend,
    }  # fmt: skip


def _indexer_paged_scores(bench: Bench) -> Sequence[Any]:
    cache = bench.cache(INDEXER_FP8)
    return (fp8_paged_mqa_logits(kv_cache=cache, clean_logits=True, **_indexer_paged(bench)),)


def _indexer_schedule(bench: Bench) -> Sequence[Any]:
    lens = bench.put([1000, 0, 500, 64], np.int32)
    return (get_paged_mqa_logits_metadata(lens, 64, 5, backend=bench.backend),)


def _top_k(bench: Bench) -> Sequence[Any]:
    logits = bench.put(bench.rng.integers(-20, 20, (5, 90)), np.float32)
    return (top_k_per_row(logits, 16, None, bench.indices(100, 5), backend=bench.backend),)


def _indexer_topk(bench: Bench) -> Sequence[Any]:
    return (indexer_topk(kv=bench.cache(INDEXER_FP8), topk=4, **_indexer_paged(bench)),)


def _concat(kv_cache_dtype: str, width: int, dtype: Any) -> Callable[[Bench], Sequence[Any]]:
    def run(bench: Bench) -> Sequence[Any]:
        cache = bench.xp.zeros((NUM_BLOCKS, BLOCK, width), dtype)
        slots = bench.put(bench.rng.permutation(NUM_BLOCKS * BLOCK)[:9])
        concat_and_cache_mla(
            bench.normal(9, 512), bench.normal(9, 64), cache, slots, kv_cache_dtype, 0.5, backend=bench.backend
        )
        return (cache.view(np.uint8),)

    return run


def _mla_gather(bench: Bench) -> Sequence[Any]:
    batch, out = bench.batch(), bench.xp.zeros((40, 576), np.float32)
    cache = bench.put(bench.rng.integers(0, 127, (NUM_BLOCKS, BLOCK, 576)), np.uint8)
    gather_cache(
        cache, out, batch["block_table"], bench.starts((4, 2, 15)), 3, bench.put([9, 0, 4], np.int32), scale=0.25,
        backend=bench.backend,
    )  # fmt: skip
    return (out,)


def _copy(bench: Bench) -> Sequence[Any]:
    caches = [bench.cache(DSV4_FP8), bench.normal(NUM_BLOCKS, 3, 4)]
    pairs = bench.put([[0, 3], [1, 5], [NUM_BLOCKS, 2], [4, -1]], np.int64)
    copy_blocks(caches, pairs, backend=bench.backend)
    return caches[0], caches[1].view(np.uint8)


def _swap(bench: Bench) -> Sequence[Any]:
    source, target = bench.cache(DSV4_FP8), bench.cache(DSV4_FP8)
    swap_blocks(source, target, bench.put([[0, 3], [2, 5]], np.int64), backend=bench.backend)
    return (target,)


def _advance(bench: Bench) -> Sequence[Any]:
    tokens, positions, slots = (bench.xp.full(5, UNWRITTEN, np.int64) for _ in range(3))
    batch = bench.batch()
    advance_step(
        5, 3, BLOCK, tokens, bench.put([7, 8, 9], np.int64), positions, batch["seq_lens"], slots, batch["block_table"],
        backend=bench.backend,
    )  # fmt: skip
    return tokens, positions, slots, batch["seq_lens"]


def _swa_indices(bench: Bench) -> Sequence[Any]:
    batch = bench.batch()
    return compute_swa_indices_and_lens(
        **batch, block_size=BLOCK, window_size=WINDOW, num_tokens=6, backend=bench.backend
    )


def _global_topk(compact: bool) -> Callable[[Bench], Sequence[Any]]:
    def run(bench: Bench) -> Sequence[Any]:
        batch = bench.batch()
        return compute_global_topk_indices_and_lens(
            bench.indices(4 * BLOCK, 6, 7), batch["token_to_req_indices"], batch["block_table"], BLOCK,
            batch["is_valid_token"], compact=compact, backend=bench.backend,
        )  # fmt: skip

    return run


def _combine(bench: Bench) -> Sequence[Any]:
    batch = bench.batch()
    gather_lens = bench.put([8, 2, 11], np.int32)
    return combine_topk_swa_indices(
        bench.indices(5, 6, 7), batch["query_start_loc"], batch["seq_lens"], gather_lens, WINDOW, 4, 6, 16, 5,
        backend=bench.backend,
    )  # fmt: skip


def _flashinfer(bench: Bench) -> Sequence[Any]:
    batch = bench.batch()
    return build_flashinfer_mixed_sparse_indices(
        bench.indices(30, 2, WINDOW), bench.indices(4 * BLOCK, 2, 6), None, bench.indices(4 * BLOCK, 4, 6),
        batch["query_start_loc"], batch["seq_lens"], batch["token_to_req_indices"], batch["block_table"], BLOCK,
        batch["block_table"], BLOCK, WINDOW, 4, 6, True, batch["is_valid_token"], 9, None, backend=bench.backend,
    )  # fmt: skip


def _decode(layout: CacheLayout, two_caches: bool) -> Callable[[Bench], Sequence[Any]]:
    def run(bench: Bench) -> Sequence[Any]:
        slots = NUM_BLOCKS * BLOCK
        extra: dict[str, Any] = {}
        if two_caches:
            lengths = bench.put([[4, 0], [9, 1]], np.int32)
            extra = {
                "extra_k_cache": bench.cache(layout),
                "extra_indices": bench.indices(slots, 2, 2, 9),
                "extra_topk_length": lengths,
            }
        return sparse_mla_decode(
            bench.normal(2, 2, bench.heads, layout.head_dim), bench.cache(layout), bench.indices(slots, 2, 2, 11),
            layout=layout, topk_length=bench.put([11, 0], np.int32),
            attn_sink=bench.normal(bench.heads, dtype=np.float32), **extra, backend=bench.backend,
        )  # fmt: skip

    return run


def _prefill(head_dim: int) -> Callable[[Bench], Sequence[Any]]:
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


def _mha(causal: bool) -> Callable[[Bench], Sequence[Any]]:
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


def _dense_decode(fp8: bool) -> Callable[[Bench], Sequence[Any]]:
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


def _turns(bench: Bench, positions: int, rope_dim: int) -> Any:
    """Cosines and sines of positions, as a cos_sin_cache has them."""
    angles = np.arange(positions)[:, None] / 100.0 ** (np.arange(rope_dim // 2) / rope_dim)
    return bench.put(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), np.float32)


def _norms(bench: Bench) -> Sequence[Any]:
    results: tuple[Any, Any] = fused_q_kv_rmsnorm(
        bench.normal(4, 96), bench.normal(4, 64), bench.normal(96, dtype=np.float32),
        bench.normal(64, dtype=np.float32), backend=bench.backend,
    )  # fmt: skip
    return results


def window_rows(layout: CacheLayout) -> Callable[[Bench], Sequence[Any]]:
    def run(bench: Bench) -> Sequence[Any]:
        cache = layout.allocate(NUM_BLOCKS, BLOCK, bench.xp)
        if not layout.num_scales:
            cache = cache.view(BFLOAT16)
        q = qnorm_rope_and_insert(
            bench.normal(4, bench.heads, 512), bench.normal(4, 512), cache, bench.put([7, -1, 0, 34], np.int64),
            bench.put([3, 0, 9, 5], np.int64), _turns(bench, 20, 64), layout=layout, backend=bench.backend,
        )  # fmt: skip
        return q, cache

    return run


def _indexer_keys(bench: Bench) -> Sequence[Any]:
    cache = bench.xp.zeros((NUM_BLOCKS, BLOCK, 128), BFLOAT16)
    indexer_knorm_rope_and_insert(
        bench.normal(4, 128, dtype=np.float32), bench.normal(128, dtype=np.float32),
        bench.normal(128, dtype=np.float32), cache, bench.put([7, -1, 0, 34], np.int64),
        bench.put([3, 0, 9, 5], np.int64), _turns(bench, 20, 64), layout=INDEXER_BF16, backend=bench.backend,
    )  # fmt: skip
    return (cache,)


def _rope(bench: Bench) -> Sequence[Any]:
    x, positions = bench.normal(4, bench.heads, 192), bench.put([3, 0, 9, 5], np.int64)
    turned = apply_rope(x, positions, _turns(bench, 20, 64), backend=bench.backend)
    return turned, apply_rope(x, positions, _turns(bench, 20, 64), inverse=True, backend=bench.backend)


def _quantised_output(bench: Bench) -> Sequence[Any]:
    _, scales = inverse_rope_and_quantize(
        bench.normal(4, 4, 512), bench.put([3, 0, 9, 5], np.int64), _turns(bench, 20, 64), 2, backend=bench.backend
    )
    return (scales,)


def compress(layout: CacheLayout, indexer: CacheLayout | None = None) -> Callable[[Bench], Sequence[Any]]:
    """Two requests at ratio 4, whose last rows overlap with states of an earlier step; maybe an indexer's, too."""

    def run(bench: Bench) -> Sequence[Any]:
        dim = layout.head_dim
        state = bench.normal(4, 4, 4 * dim, dtype=np.float32)
        cache = layout.allocate(NUM_BLOCKS, BLOCK, bench.xp)
        if not layout.num_scales:
            cache = cache.view(BFLOAT16)
        more: dict[str, Any] = {}
        if indexer is not None:
            more = {
                "index_kv_score": bench.normal(6, 512, dtype=np.float32),
                "index_position_bias": bench.normal(4, 256, dtype=np.float32),
                "index_norm_weight": bench.normal(128, dtype=np.float32),
                "index_state_cache": bench.normal(4, 4, 512, dtype=np.float32),
                "index_k_cache": bench.xp.zeros((NUM_BLOCKS, BLOCK, 128), BFLOAT16),
            }  # fmt: skip
        compress_and_insert(
            bench.normal(6, 4 * dim, dtype=np.float32), bench.normal(4, 2 * dim, dtype=np.float32),
            bench.normal(dim, dtype=np.float32), state, bench.put([8, 9, 10, 11, 2, 3], np.int64),
            bench.put([[1, 2], [3, 0]], np.int32), cache, bench.put([-1, -1, -1, 12, -1, 3], np.int64),
            bench.put([4, 5, 6, 7, 6, 7], np.int64), bench.put([0, 0, 0, 0, 1, 1], np.int32), bench.starts((4, 2)),
            _turns(bench, 20, 64), compress_ratio=4, layout=layout, backend=bench.backend, **more,
        )  # fmt: skip
        return state, cache, *(more[name] for name in ("index_state_cache", "index_k_cache") if more)

    return run


CASES = (
    Case("quantize_and_insert_k_cache", "DSV4_FP8", "sparse_cache", (EQUAL,), _insert(DSV4_FP8)),
    Case("quantize_and_insert_k_cache", "V32_FP8", "sparse_cache", (EQUAL,), _insert(V32_FP8)),
    Case("quantize_and_insert_k_cache", "V32_FP8, any scale", "sparse_cache", (EQUAL,), _insert(V32_FP8, False)),
    Case("quantize_and_insert_k_cache", "INDEXER_FP8", "sparse_cache", (EQUAL,), _insert(INDEXER_FP8)),
    Case("dequantize_and_gather_k_cache", "DSV4_FP8", "sparse_cache", (EQUAL,), _gather(DSV4_FP8)),
    Case("dequantize_and_gather_k_cache", "V32_FP8", "sparse_cache", (EQUAL,), _gather(V32_FP8)),
    Case("indexer_k_quant_and_cache", "", "sparse_cache", (EQUAL,), _indexer_insert),
    Case("cp_gather_indexer_k_quant_cache", "", "sparse_cache", (EQUAL, EQUAL), _indexer_gather),
    Case("fused_indexer_q_rope_quant", "not quantised", "indexer", (SCORES, SCORES), _indexer_queries),
    Case("fp8_mqa_logits", "", "indexer", (SCORES,), _indexer_scores),
    Case("fp8_paged_mqa_logits", "", "indexer", (SCORES,), _indexer_paged_scores),
    Case("get_paged_mqa_logits_metadata", "", "indexer", (EQUAL,), _indexer_schedule),
    Case("top_k_per_row", "", "indexer", (EQUAL,), _top_k),
    Case("indexer_topk", "", "indexer", (EQUAL,), _indexer_topk),
    Case("fused_q_kv_rmsnorm", "", "norm_rope", (ROUNDED, ROUNDED), _norms),
    Case("qnorm_rope_and_insert", "DSV4_BF16", "norm_rope", (ROUNDED, ROUNDED), window_rows(DSV4_BF16)),
    Case("indexer_knorm_rope_and_insert", "INDEXER_BF16", "norm_rope", (ROUNDED,), _indexer_keys),
    Case("apply_rope", "there and back", "norm_rope", (ROUNDED, ROUNDED), _rope),
    Case("inverse_rope_and_quantize", "scales", "norm_rope", (ROUNDED,), _quantised_output),
    Case("compress_and_insert", "DSV4_BF16, ratio 4", "compressor", (ROUNDED, ROUNDED), compress(DSV4_BF16)),
    Case(
        "compress_and_insert",
        "DSV4_BF16, both",
        "compressor",
        (ROUNDED,) * 4,
        compress(DSV4_BF16, INDEXER_BF16),
    ),
    Case("concat_and_cache_mla", "bfloat16", "dense_cache", (EQUAL,), _concat("auto", 576, BFLOAT16)),
    Case("concat_and_cache_mla", "e4m3, one scale", "dense_cache", (EQUAL,), _concat("fp8", 576, np.uint8)),
    Case("gather_cache", "e4m3, one scale", "dense_cache", (EQUAL,), _mla_gather),
    Case("copy_blocks", "", "blocks", (EQUAL, EQUAL), _copy),
    Case("swap_blocks", "", "blocks", (EQUAL,), _swap),
    Case("advance_step", "", "advance", (EQUAL,) * 4, _advance),
    Case("compute_swa_indices_and_lens", "", "indices", (EQUAL, EQUAL), _swa_indices),
    Case("compute_global_topk_indices_and_lens", "", "indices", (EQUAL, EQUAL), _global_topk(False)),
    Case("compute_global_topk_indices_and_lens", "compact", "indices", (EQUAL, EQUAL), _global_topk(True)),
    Case("combine_topk_swa_indices", "", "indices", (EQUAL, EQUAL), _combine),
    Case("build_flashinfer_mixed_sparse_indices", "", "indices", (EQUAL, EQUAL), _flashinfer),
    Case("sparse_mla_decode", "DSV4_FP8, two caches", "sparse_attention", DECODE, _decode(DSV4_FP8, True)),
    Case("sparse_mla_decode", "V32_FP8", "sparse_attention", DECODE, _decode(V32_FP8, False)),
    Case("sparse_mla_decode", "MLA_BF16", "sparse_attention", DECODE, _decode(MLA_BF16, False)),
    Case("sparse_mla_prefill", "512", "sparse_attention", PREFILL, _prefill(512)),
    Case("sparse_mla_prefill", "576", "sparse_attention", PREFILL, _prefill(576)),
    Case("mha_varlen", "causal", "dense_attention", DENSE_PREFILL, _mha(True)),
    Case("mha_varlen", "not causal", "dense_attention", DENSE_PREFILL, _mha(False)),
    Case("dense_mla_decode", "bfloat16", "dense_attention", DECODE, _dense_decode(False)),
    Case("dense_mla_decode", "e4m3, one scale", "dense_attention", DECODE, _dense_decode(True)),
    Case("merge_attn_states", "float32", "sparse_attention", MERGE, _merge),
)
