"""Weights and scales of the indexer that are subnormal float32 count as 0 on every backend, as on CUDA (-ftz=true)."""

import numpy as np
import pytest
from ops.test_indexer import HEAD_DIM, paged, put_keys, ragged

import cumla
from support.lab import BF16

SUBNORMAL = np.float32(2.0**-127)  # times the largest product of a head, it would be far from 0


def assert_no_scores(found, seen):
    np.testing.assert_array_equal(found, np.where(seen, 0, -np.inf))


@pytest.mark.parametrize("kind", ["fp8", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [64, 5])
def test_subnormal_weights_and_scales_of_ranges_count_as_0(lab, rng, kind, heads):
    """For some heads, and then for all; then scales of all keys."""
    keys, heads = 12 if lab.tiny else 70, 2 if lab.tiny else heads
    q, kv, weights, _, _ = ragged(rng, 2, heads, keys, kind)
    starts, ends = np.array([0, 3], np.int32), np.array([keys, keys - 2], np.int32)
    seen = (np.arange(keys) >= starts[:, None]) & (np.arange(keys) < ends[:, None])

    def found(weights, kv=kv):
        arguments = [lab.put(q), put_keys(lab, kv), *map(lab.put, (weights, starts, ends))]
        return lab.get(cumla.fp8_mqa_logits(*arguments, True, backend=lab.backend))

    some = weights.copy()
    some[:, ::2] = SUBNORMAL
    np.testing.assert_array_equal(found(some), found(np.where(some == SUBNORMAL, np.float32(0), some)))
    assert_no_scores(found(np.full_like(weights, -SUBNORMAL)), seen)
    if kind == "fp8":
        assert_no_scores(found(np.full_like(weights, 2.0**100), (kv[0], np.full_like(kv[1], SUBNORMAL))), seen)


@pytest.mark.parametrize("layout", [cumla.INDEXER_FP8, cumla.INDEXER_BF16, cumla.INDEXER_F32], ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [64, 4])
def test_subnormal_weights_and_scales_of_pages_count_as_0(lab, rng, layout, heads):
    block_size, heads = (3, 1) if lab.tiny else (64, heads)
    q, cache, weights, table = paged(rng, layout, block_size, 2, 1, heads, 3)
    table[:] = np.arange(6).reshape(2, 3)
    lens = np.array([3 * block_size, 2 * block_size - 1], np.int32)
    seen = np.arange(3 * block_size) < lens[:, None]

    def found(weights):
        arguments = [lab.put(x) for x in (q, cache, weights, lens, table)]
        return lab.get(cumla.fp8_paged_mqa_logits(*arguments, clean_logits=True, layout=layout, backend=lab.backend))

    assert_no_scores(found(np.full_like(weights, SUBNORMAL)), seen)
    if layout.num_scales:
        for page in cache:
            page.reshape(-1)[layout.scale_start(block_size) :][: 4 * block_size].view(np.float32)[:] = SUBNORMAL
        assert_no_scores(found(np.full_like(weights, 2.0**100)), seen)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_subnormal_weights_of_queries_are_0(lab, rng, quantize, dtype):
    """Also if a factor makes weights subnormal, and if a query scale would make them normal again."""
    q = (rng.standard_normal((3, 4, HEAD_DIM)) * 2.0**20).astype(np.float32)
    given = np.array([[2.0**-127, -(2.0**-130), 1.0, 0.0], [2.0**-120, 2.0**-100, 2.0**-126, 3.0], [1.0] * 4], dtype)
    table = np.ones((0, 64), np.float32)  # empty: no rotation
    for softmax_scale in (2.0**-10, 2.0**10, 2.0**-127):
        found = cumla.fused_indexer_q_rope_quant(
            lab.put(np.zeros(3, np.int64)), lab.put(q), lab.put(table), lab.put(given), softmax_scale, 1.0,
            quantize=quantize, backend=lab.backend,
        )[1]  # fmt: skip
        want = given.astype(np.float64)
        want[np.abs(want) < 2.0**-126] = 0
        if quantize:
            want *= 2.0 ** np.ceil(np.log2(np.abs(q.astype(BF16).astype(np.float64)).max(axis=2) / 448))
        want = want * (softmax_scale if softmax_scale >= 2.0**-126 else 0.0)
        want[np.abs(want) < 2.0**-126] = 0
        np.testing.assert_array_equal(lab.get(found), want.astype(np.float32))
