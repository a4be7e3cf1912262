"""Cases of operations that write, read and copy cached rows, and of the norms and rotations before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bounds import EQUAL, ROUNDED, SUMS
from ..dispatch.call import BFLOAT16
from ..layout import (
    DSV4_BF16,
    INDEXER_BF16,
    CacheLayout,
)
from ..ops.compressor import compress_and_insert
from ..ops.latents import compress_latents
from ..ops.linear import fp8_block_linear
from ..ops.norm_rope import (
    apply_rope,
    fused_q_kv_rmsnorm,
    indexer_knorm_rope_and_insert,
    inverse_rope_and_quantize,
    norm_rope_and_insert,
    qnorm_rope_and_insert,
)
from .arrays import BLOCK, NUM_BLOCKS, QUERY_LENS, Bench
from .case import UNWRITTEN, Case, Run


def _cos_sin(bench: Bench, positions: int, rope_dim: int) -> Any:
    """Cosines and sines of positions, in the format of a cos_sin_cache."""
    angles = np.arange(positions)[:, None] / 100.0 ** (np.arange(rope_dim // 2) / rope_dim)
    return bench.put(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), np.float32)


def _norms(bench: Bench) -> Sequence[Any]:
    results: tuple[Any, Any] = fused_q_kv_rmsnorm(
        bench.normal(4, 96), bench.normal(4, 64), bench.normal(96, dtype=np.float32),
        bench.normal(64, dtype=np.float32), backend=bench.backend,
    )  # fmt: skip
    return results


def window_rows(layout: CacheLayout) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        cache = layout.allocate(NUM_BLOCKS, BLOCK, bench.xp)
        if not layout.num_scales:
            cache = cache.view(BFLOAT16)
        q = qnorm_rope_and_insert(
            bench.normal(4, bench.heads, 512), bench.normal(4, 512), cache, bench.put([7, -1, 0, 34], np.int64),
            bench.put([3, 0, 9, 5], np.int64), _cos_sin(bench, 20, 64), layout=layout, backend=bench.backend,
        )  # fmt: skip
        return q, cache

    return run


def latent_rows(layout: CacheLayout) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        cache = layout.allocate(NUM_BLOCKS, BLOCK, bench.xp)
        if not layout.num_scales:
            cache = cache.view(BFLOAT16)
        norm_rope_and_insert(
            bench.normal(4, 512), cache, bench.put([7, -1, 0, 34], np.int64), bench.put([3, 0, 9, 70], np.int64),
            _cos_sin(bench, 64, 64), weight=bench.normal(512, dtype=np.float32), layout=layout, backend=bench.backend,
        )  # fmt: skip
        return (cache,)

    return run


def _indexer_keys(bench: Bench) -> Sequence[Any]:
    cache = bench.xp.zeros((NUM_BLOCKS, BLOCK, 128), BFLOAT16)
    indexer_knorm_rope_and_insert(
        bench.normal(4, 128, dtype=np.float32), bench.normal(128, dtype=np.float32),
        bench.normal(128, dtype=np.float32), cache, bench.put([7, -1, 0, 34], np.int64),
        bench.put([3, 0, 9, 5], np.int64), _cos_sin(bench, 20, 64), layout=INDEXER_BF16, backend=bench.backend,
    )  # fmt: skip
    return (cache,)


def _rope(bench: Bench) -> Sequence[Any]:
    x, positions = bench.normal(4, bench.heads, 192), bench.put([3, 0, 9, 5], np.int64)
    rotated = apply_rope(x, positions, _cos_sin(bench, 20, 64), backend=bench.backend)
    return rotated, apply_rope(x, positions, _cos_sin(bench, 20, 64), inverse=True, backend=bench.backend)


def _quantised_output(bench: Bench) -> Sequence[Any]:
    _, scales = inverse_rope_and_quantize(
        bench.normal(4, 4, 512), bench.put([3, 0, 9, 5], np.int64), _cos_sin(bench, 20, 64), 2, backend=bench.backend
    )
    return (scales,)


def compress(layout: CacheLayout, indexer: CacheLayout | None = None) -> Run:
    """Two requests at ratio 4, whose last rows overlap with states of an earlier step; optionally with an indexer's."""

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
            _cos_sin(bench, 20, 64), compress_ratio=4, layout=layout, backend=bench.backend, **more,
        )  # fmt: skip
        return state, cache, *(more[name] for name in ("index_state_cache", "index_k_cache") if more)

    return run


def _latents(ratio: int) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        latents = bench.xp.full((6, 512), UNWRITTEN, np.float32)
        rows, weight = bench.normal(6, 512 * ratio, dtype=np.float32), bench.normal(512, dtype=np.float32)
        if ratio == 1:
            slots = bench.put([3, -1, 5, 0, 1, 2], np.int64)
            compress_latents(rows, weight, slots, latents, compress_ratio=1, backend=bench.backend)
            return (latents,)
        positions, rings = np.array([12, 1, 15, 16, 17, 18]), np.array([0, 1, 2, 2, 2, 2])
        state = bench.normal(4, 2, 1024, dtype=np.float32)
        restart = bench.normal(4, 1024, dtype=np.float32), bench.put([0, 1, 9, 0], np.int32)
        compress_latents(
            rows, weight, bench.put(rings * 2 + positions % 2, np.int64), latents, compress_ratio=2,
            positions=bench.put(positions, np.int64), query_start_loc=bench.starts(QUERY_LENS), state_cache=state,
            restart_rows=restart[0], restart_positions=restart[1], backend=bench.backend,
        )  # fmt: skip
        return latents, state, *restart

    return run


def _linear(*groups: int) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        codes = bench.rng.integers(0, 256, (*groups, 200, 288)).astype(np.uint8)
        codes[codes % 128 == 127] = 0  # NaN
        scales = np.exp2(bench.rng.uniform(-10, -8, (*groups, 2, 3)))
        return (
            fp8_block_linear(
                bench.normal(5, *groups, 288), bench.put(codes), bench.put(scales, np.float32), float32_output=True,
                backend=bench.backend,
            ),
        )  # fmt: skip

    return run


CASES = (
    Case("fused_q_kv_rmsnorm", "", "norm_rope", (ROUNDED, ROUNDED), _norms),
    Case("qnorm_rope_and_insert", "DSV4_BF16", "norm_rope", (ROUNDED, ROUNDED), window_rows(DSV4_BF16)),
    Case("norm_rope_and_insert", "DSV4_BF16", "norm_rope", (ROUNDED,), latent_rows(DSV4_BF16)),
    Case("indexer_knorm_rope_and_insert", "INDEXER_BF16", "norm_rope", (ROUNDED,), _indexer_keys),
    Case("apply_rope", "there and back", "norm_rope", (ROUNDED, ROUNDED), _rope),
    Case("inverse_rope_and_quantize", "scales", "norm_rope", (ROUNDED,), _quantised_output),
    Case("compress_latents", "ratio 1", "latents", (ROUNDED,), _latents(1)),
    Case("compress_latents", "ratio 2", "latents", (ROUNDED, EQUAL, EQUAL, EQUAL), _latents(2)),
    Case("compress_and_insert", "DSV4_BF16, ratio 4", "compressor", (ROUNDED, ROUNDED), compress(DSV4_BF16)),
    Case(
        "compress_and_insert",
        "DSV4_BF16, both",
        "compressor",
        (ROUNDED,) * 4,
        compress(DSV4_BF16, INDEXER_BF16),
    ),
    Case("fp8_block_linear", "", "projection", (SUMS,), _linear()),
    Case("fp8_block_linear", "groups", "projection", (SUMS,), _linear(2)),
)
