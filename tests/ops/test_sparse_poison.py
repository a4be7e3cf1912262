"""Sparse decode over rows poisoned anywhere: any RoPE value, any scale, lists of any length, all tile heights."""

import numpy as np
import pytest

import cumla
from support.attention import Problem, make_cache, make_indices, make_q
from support.lab import BF16

VALUES = [np.nan, np.inf, -np.inf, 1e6, -7e4, 65536.0, 65280.0, 3e38]
SCALES = [255, 254, 200, 160, 90, 60]
SEEDS = [seed if seed in (3, 15, 215) else pytest.param(seed, marks=pytest.mark.slow) for seed in (*range(24), 215)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
@pytest.mark.parametrize("seed", SEEDS)
def test_poison_of_any_kind(lab, seed, monkeypatch):
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    rng, layout = np.random.default_rng(seed), cumla.DSV4_FP8
    monkeypatch.setattr(sparse_kernels, "tile_heads", lambda *arguments: [16, 32, 64][seed % 3])
    batch, s_q, heads = int(rng.integers(1, 5)), int(rng.integers(1, 3)), int(rng.choice([3, 16, 40, 64, 70]))
    lengths = int(rng.choice([1, 63, 64, 65, 130])), int(rng.choice([1, 64, 150]))
    caches = [make_cache(rng, layout, 4, 64) for _ in lengths]
    for cache in caches:
        rows = cache.reshape(4, -1)[:, : 64 * layout.row_bytes].reshape(4, 64, layout.row_bytes)
        rope = rows[..., layout.rope_offset :].view(BF16)
        for _ in range(int(rng.integers(0, 3))):
            rope[rng.integers(4), rng.integers(64), rng.integers(64)] = rng.choice(VALUES)
        if rng.random() < 0.4:
            scales = cache[rng.integers(4)].reshape(-1)[layout.scale_start(64) :]
            scales[layout.scale_stride * rng.integers(64) + rng.integers(layout.num_scales)] = rng.choice(SCALES)
    indices, extra_indices = (make_indices(rng, batch, s_q, n, 256) for n in lengths)
    indices[rng.random(indices.shape) < 0.1] = -1
    options = {}
    for name, n in zip(("topk_length", "extra_topk_length"), lengths, strict=True):
        if rng.random() < 0.5:
            options[name] = rng.integers(0, n + 1, batch).astype(np.int32)
    if rng.random() < 0.5:
        options["attn_sink"] = np.linspace(-5, 5, heads, dtype=np.float32)
    q = make_q(rng, batch, s_q, heads, layout)
    if rng.random() < 0.5:  # large values have weight, but not all of it
        q[..., layout.quantized_dim :] *= np.array(2.0**-18, BF16)
    Problem(
        q, caches[0], indices, extra_k_cache=caches[1], extra_indices=extra_indices,
        batch_invariant=bool(rng.random() < 0.5), **options,
    ).check(lab)  # fmt: skip
