"""Sparse attention over values of any size and NaN, on every backend and kernel, against the float64 reference."""

import numpy as np
import pytest

import cumla
from cumla.kernels.cuda.launch import recorded_launches
from support.attention import (
    Problem,
    make_cache,
    make_indices,
    make_q,
    marks_of_kernels,
    nothing_attended_again,
    values_of_weights,
)
from support.bounds import assert_prefill
from support.lab import BF16, Lab, to_float

FP8 = (cumla.DSV4_FP8, cumla.V32_FP8)
EMULATED_POISON = [("window", np.inf), ("extra", -1e30), ("both", 1e6), ("both", 3e38)]
pytestmark = marks_of_kernels(
    of_the_reference={
        "test_nan_stays_with_its_token", "test_poisoned_rows", "test_rows_not_attended_may_be_anything",
        "test_nan_in_prefill_stays_with_its_token",
    }
)  # fmt: skip


def is_beyond_float32(x):
    """numba_cuda attends in float32 only, without an exact kernel to recompute tiles, as documented."""
    return x.backend == "numba_cuda" and not np.isnan(x.get("value", 1e6))


def rows_of(cache, layout):
    """The rows of a cache of pages of 64 tokens, without their scales."""
    return cache.reshape(len(cache), -1)[:, : 64 * layout.row_bytes].reshape(-1, 64, layout.row_bytes)


def rope_of(cache, layout):
    return rows_of(cache, layout)[..., layout.rope_offset :].view(BF16)


def marks(lab, plan):
    """The tiles that fast kernels of the cuda backend flag for the exact kernel, and its counters."""
    return lab.get(plan.workspace.array("unsafe", 0, np.int32, lab.put(np.zeros(1, np.int32))))


@pytest.mark.parametrize("size", [1e-30, 1e-5, 30.0, 1e6, 1e30])
def test_q_of_any_size(lab, kernel, rng, size):
    layout = cumla.DSV4_FP8
    cache, q = make_cache(rng, layout, 4, 64), make_q(rng, 2, 1, 8, layout)
    q[1] = (q[1].astype(np.float64) * size).astype(BF16)  # the other token stays ordinary
    Problem(q, cache, make_indices(rng, 2, 1, 100, 256), softmax_scale=0.04 / max(size, 1)).check(lab)


@pytest.mark.parametrize("place", [0, 30, 32, 62, 64 + 40])
def test_scales_that_float16_lacks_in_one_place(lab, kernel, rng, place):
    """The only two keys are neighbours in either half of a block of 64; their scales decide."""
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64, spread=0)
    for i in range(layout.num_scales):
        cache[3].reshape(-1)[layout.scale_start(64) + i :: layout.scale_stride] = 100  # 2^-27
    indices = make_indices(rng, 2, 1, 128, 192, 0.0)
    indices[1] = -1
    indices[1, 0, place : place + 2] = 3 * 64 + 5, 3 * 64 + 9
    q = make_q(rng, 2, 1, 16, layout)
    q[1] *= np.array(2.0**14, BF16)
    q[1, ..., -64:] = 0  # in RoPE, which has no scales
    Problem(q, cache, indices, softmax_scale=4.0).check(lab)


@pytest.mark.parametrize("size", [2.0**-20, 2.0**-40])
def test_small_q_may_decide(lab, kernel, rng, size):
    """Where the scale compensates, bits that float16 lacks count."""
    layout = cumla.DSV4_FP8
    q = make_q(rng, 2, 1, 8, layout, size)
    Problem(q, make_cache(rng, layout, 4, 64), make_indices(rng, 2, 1, 100, 256), softmax_scale=0.04 / size).check(lab)


def test_large_q_may_bring_every_score_down(lab, kernel, rng):
    """All scores are -inf in float16, as if there were no tokens; one finite score would make the result NaN."""
    layout = cumla.DSV4_FP8
    cache, q = make_cache(rng, layout, 4, 64), make_q(rng, 2, 1, 8, layout)
    rows = cache.reshape(4, -1)[:, : 64 * layout.row_bytes].reshape(4, 64, layout.row_bytes)
    rows[..., 7], q[..., 7] = 0xB8, 2.0**17  # e4m3's -1
    Problem(q, cache, make_indices(rng, 2, 1, 128, 256, 0.0), softmax_scale=4 / 2.0**17).check(lab)


def test_rope_of_any_size_in_results(lab, kernel, rng):
    layout, size = cumla.DSV4_FP8, 2.0**20
    cache, q = make_cache(rng, layout, 4, 64), make_q(rng, 2, 1, 8, layout)
    rows = cache.reshape(4, -1)[:, : 64 * layout.row_bytes].reshape(4, 64, layout.row_bytes)
    rows[..., layout.rope_offset :].view(BF16)[..., 5] = (size * rng.standard_normal((4, 64))).astype(BF16)
    q[..., layout.quantized_dim + 5] = 0  # the scores are ordinary
    Problem(q, cache, make_indices(rng, 2, 1, 100, 256)).check(lab, size=size)


@pytest.mark.parametrize("byte", [0, 1, 100, 104, 105, 112, 126, 127, 135, 143, 200, 254])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("byte") in (1, 100, 112, 127, 143, 200))
def test_every_scale_byte(lab, kernel, rng, byte):
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64)
    for page in (2, 3):  # the first token attends to pages 0 and 1 alone
        cache[page].reshape(-1)[layout.scale_start(64) + 3 :: layout.scale_stride] = byte
    indices = make_indices(rng, 2, 1, 100, 256)
    indices[0] = np.where(indices[0] < 128, indices[0], -1)
    factor = 2.0 ** min(0, 125 - byte)
    q = make_q(rng, 2, 1, 16, layout)
    q[1] = (q[1].astype(np.float64) * factor).astype(BF16)
    Problem(q, cache, indices).check(lab, size=448.0 * 2.0 ** (byte - 127) / 8)


def test_float32_scales(lab, kernel, rng):
    layout = cumla.V32_FP8
    for smallest, largest in ((-6, 0), (-20, 10), (-120, -100), (60, 100)):
        cache = make_cache(rng, layout, 4, 64)
        scales = np.exp2(rng.uniform(smallest, largest, (4, 64, 4))).astype(np.float32)
        cache[:, :, 512:528] = scales.view(np.uint8)
        q = make_q(rng, 2, 1, 16, layout, 8 / 448 * 2.0**-largest)  # scores then have ordinary size
        Problem(q, cache, make_indices(rng, 2, 1, 100, 256)).check(lab, size=448.0 * 2.0**largest / 8)


@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
def test_small_scales_may_decide(lab, kernel, rng, layout):
    """Scales that float16 lacks: with a large q the keys under them make all the difference."""
    cache = make_cache(rng, layout, 4, 64, spread=0)
    for page in cache:
        if layout is cumla.DSV4_FP8:
            for i in range(layout.num_scales):
                page.reshape(-1)[layout.scale_start(64) + i :: layout.scale_stride] = 100  # 2^-27
        else:
            scales = page[:, layout.scale_start(64) :][:, : 4 * layout.num_scales]
            scales[...] = np.full((64, layout.num_scales), 1.3 * 2.0**-27, np.float32).view(np.uint8)
    q = make_q(rng, 2, 1, 16, layout, size=2.0**14)
    q[..., -64:] = 0  # in RoPE, which has no scales
    Problem(q, cache, make_indices(rng, 2, 1, 100, 256), softmax_scale=4.0).check(lab)


def test_nan_stays_with_its_token(lab, kernel, rng):
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64)
    page = cache[2].reshape(-1)
    page[5] = 0x7F  # a quantised value of slot 128, and a RoPE value of slot 129
    page[layout.row_bytes + layout.rope_offset + 6 :][:2] = np.array([np.nan], BF16).view(np.uint8)
    q, indices = make_q(rng, 4, 1, 16, layout), make_indices(rng, 4, 1, 90, 128, 0.0)
    indices[1, 0, 7], indices[2, 0, 80] = 128, 129
    q[3, 0, 4, 100] = np.nan
    out, lse = Problem(q, cache, indices).on(lab)
    out, lse = to_float(lab.get(out)), lab.get(lse)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1:3]).all()
    assert np.isnan(out[3, 0, 4]).all()
    assert np.isfinite(out[3, 0, :4]).all()
    want, _ = Problem(q[:1], cache, indices[:1]).on(Lab("reference", False))
    np.testing.assert_allclose(out[:1], to_float(want), atol=1e-3, rtol=2.01 / 128)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.nowhere(when=is_beyond_float32)
@pytest.mark.parametrize("where", ["window", "extra", "both"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6, -1e30, 3e38])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("where"), x.get("value")) not in EMULATED_POISON)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("kernel") == "portable" and x.get("where") != "both")
def test_poisoned_rows(lab, kernel, rng, where, value):
    """One value of one row, to which one request attends, while another attends to rows that were never written."""
    layout, heads = cumla.DSV4_FP8, 20 if lab.emulated else 64
    cache, extra = make_cache(rng, layout, 4, 64), make_cache(rng, layout, 4, 64)
    cache[3] = extra[3] = 0
    for poisoned in {"window": [cache], "extra": [extra], "both": [cache, extra]}[where]:
        rope_of(poisoned, layout)[2, 9, 31] = value
    indices, extra_indices = (make_indices(rng, 4, 2, n, 128) for n in (70, 150))
    indices[1, :, 66] = extra_indices[1, :, 3] = 128 + 9
    indices[2], extra_indices[2] = 192 + indices[2] % 64, 192 + extra_indices[2] % 64
    out, lse = Problem(
        make_q(rng, 4, 2, heads, layout), cache, indices, extra_k_cache=extra, extra_indices=extra_indices,
        topk_length=np.array([70, 67, 70, 1], np.int32), attn_sink=np.linspace(-5, 5, heads, dtype=np.float32),
    ).check(lab)  # fmt: skip
    assert np.isfinite(lse[[0, 2, 3]]).all()
    assert not to_float(out[2]).any()


@pytest.fixture
def reasons(lab, kernel):
    """Records the marks of Hopper's decode, call after call."""
    from cumla.kernels.cuda.device import is_hopper
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels
    from cumla.kernels.cuda.sparse.work import EXACT_COUNTERS

    if not is_hopper(0):
        pytest.skip("needs the marks of Hopper's kernels")
    found, launch_epilogue = [], sparse_kernels.launch_epilogue

    def observe(work, problem, memory, **options):
        found.append(lab.get(memory.unsafe)[EXACT_COUNTERS:][: work.tiles].copy())
        launch_epilogue(work, problem, memory=memory, **options)

    with pytest.MonkeyPatch.context() as patch, recorded_launches():
        patch.setattr(sparse_kernels, "launch_epilogue", observe)
        yield found


RECOMPUTE, ALL_NAN = 1, 2  # as in csrc/common/sparse/work.cuh


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda" or x.get("kernel") != "chosen")
@pytest.mark.parametrize("keys", [1, 3, 65])
@pytest.mark.parametrize("size", [0.0, 2.0**-24, 2.0**-19, 1.0])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("keys") != 3 and x.get("size") != 2.0**-19)
def test_tiles_with_large_rope_are_recomputed(lab, kernel, rng, reasons, keys, size):
    """Keys whose V overflows float16: without weight, a few, all keys, too many, no other keys."""
    layout, batch = cumla.DSV4_FP8, 132 if lab.on_device and not lab.emulated else 3
    cache = make_cache(rng, layout, 8, 64)
    rope = rope_of(cache, layout)
    rope[4, :, 31], rope[5, :, 30] = 1e6, -7e4
    indices = make_indices(rng, batch, 1, 200, 256, absent=0.0)
    places = rng.permutation(200)[:keys]
    indices[1:, 0, places] = rng.permutation(128)[:keys] + 256
    indices[2, 0] = np.where(np.isin(np.arange(200), places), indices[2, 0], -1)  # no other keys
    q = make_q(rng, batch, 1, 40, layout)
    q[..., layout.quantized_dim + 30 :][..., :2] *= np.array(size, BF16)
    problem = Problem(
        q, cache, indices, attn_sink=np.linspace(-5, 5, 40, dtype=np.float32), batch_invariant=True
    )  # whole tiles
    problem.check(lab)
    found = reasons[-1].reshape(batch, -1)
    assert not found[0].any()
    assert (found[1:] == RECOMPUTE).all()


@pytest.mark.nowhere(when=lambda x: not x.emulated or x.get("kernel") != "chosen")
@pytest.mark.parametrize("below", [12.0, 20.0, 25.02, 25.5, 40.0])
def test_weights_that_float16_has_in_steps(lab, kernel, rng, reasons, below):
    """A large key whose weight is 2^-below of the total: float16's steps would show if the weight were float16."""
    layout, heads = cumla.DSV4_FP8, 16
    cache = make_cache(rng, layout, 2, 64, spread=0)
    rope = rope_of(cache, layout)
    rope[..., 63] = 0
    rope[1, 0] = 7e4
    q = np.zeros((1, 1, heads, layout.head_dim), BF16)  # the other key has the score 0
    q[..., -1] = -(2.0**-14)
    scale = below * np.log(2) / (float(rope[1, 0, 63]) * 2.0**-14)
    indices = np.array([[[3, 64]]], np.int32)
    out, _ = Problem(q, cache, indices, softmax_scale=scale, batch_invariant=True).check(lab)
    assert (reasons[-1] == RECOMPUTE).all()
    np.testing.assert_allclose(to_float(out)[..., 511], 7e4 * 2.0**-below, rtol=0.01, atol=1e-4)


@pytest.mark.nowhere(when=lambda x: not x.emulated or x.get("kernel") != "chosen")
@pytest.mark.parametrize("score", [100.0, 1.1e6, 1.7e6])
def test_a_large_key_beside_one_that_float16_has(lab, kernel, rng, reasons, score):
    """Scores are equal, so that both keys have half the weight, and so large that float32's steps would show."""
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 2, 64, spread=0)
    rope = rope_of(cache, layout)
    rope[..., 62:] = 0
    rope[0, 3, 62], rope[1, 0, 63] = 1.5 * 2.0**15, 1.5 * 2.0**20
    q = np.zeros((1, 1, 16, layout.head_dim), BF16)
    q[..., -2], q[..., -1] = 2.0**-13, 2.0**-18
    indices = np.array([[[1, 3, 2, 64]]], np.int32)
    Problem(q, cache, indices, softmax_scale=score / 6, batch_invariant=True).check(lab)
    assert (reasons[-1] == RECOMPUTE).all()


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda" or x.get("kernel") != "chosen")
def test_nan_in_rope_asks_for_nothing(lab, kernel, rng, reasons):
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64)
    rope = rope_of(cache, layout)
    rope[3, 5, 60], rope[3, 6, 7], rope[3, 7, 2] = np.nan, np.inf, 1e6
    indices = make_indices(rng, 3, 1, 150, 192)
    indices[1, 0, 100], indices[2, 0, [3, 5, 7]] = 192 + 5, [192 + 7, 192 + 6, 192 + 5]
    problem = Problem(make_q(rng, 3, 1, 40, layout), cache, indices, batch_invariant=True)
    if lab.emulated:
        with nothing_attended_again():
            problem.check(lab)
    out, lse = problem.check(lab)
    assert np.isnan(to_float(out[1:])).all()
    assert np.isnan(lse[1:]).all()
    found = reasons[-1].reshape(3, -1)
    assert not found[0].any()
    assert (found[1:] & ALL_NAN).all()


@pytest.mark.parametrize("value", [1e6, 1e30])
def test_every_row_poisoned(lab, kernel, rng, value):
    layout = cumla.V32_FP8
    cache = make_cache(rng, layout, 4, 64)
    rope = rope_of(cache, layout)
    rope[...] = (rng.choice([-value, value], rope.shape)).astype(BF16)
    Problem(make_q(rng, 2, 1, 20, layout), cache, make_indices(rng, 2, 1, 150, 256)).check(lab)


@pytest.mark.nowhere(when=is_beyond_float32)
@pytest.mark.parametrize("value", [2.0**20, 2.0**30])
def test_large_values_that_all_rows_share(lab, kernel, rng, value):
    """Scores differ only in the last bits of a float32, which decide."""
    layout = cumla.DSV4_FP8
    cache, q = make_cache(rng, layout, 4, 64, spread=0), make_q(rng, 2, 1, 8, layout)
    rope_of(cache, layout)[..., 5] = value
    q[..., layout.quantized_dim + 5] = 1
    Problem(q, cache, make_indices(rng, 2, 1, 100, 256)).check(lab)


@pytest.mark.parametrize("byte", [0, 20, 27, 32, 40, 41, 80])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("byte") in (20, 32, 80))
def test_nothing_but_tiny_values(lab, kernel, rng, byte):
    """Zero would be within the bound of each value, but not of their direction."""
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64)
    for page in cache:
        for i in range(layout.num_scales):
            page.reshape(-1)[layout.scale_start(64) + i :: layout.scale_stride] = byte
    rope_of(cache, layout)[...] = 0
    Problem(make_q(rng, 2, 1, 20, layout), cache, make_indices(rng, 2, 1, 100, 256)).check(lab)


@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
def test_caches_as_allocated(lab, kernel, rng, layout):
    """Values and scales are 0; fast kernels compute them without flags."""
    cache = layout.allocate(4, 64)
    problem = Problem(make_q(rng, 3, 1, 20, layout), cache, make_indices(rng, 3, 1, 100, 256), layout=layout)
    if lab.backend == "cuda" and kernel != "exact":
        with nothing_attended_again():
            problem.check(lab, plan=(plan := cumla.DecodePlan()))
        assert not marks(lab, plan).any()
    problem.check(lab)


@pytest.mark.nowhere(when=is_beyond_float32)
@pytest.mark.parametrize("poisoned", [1, 3, 40])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("poisoned") == 1)
def test_poison_leaves_no_traces(lab, kernel, rng, poisoned):
    """For any number of flagged tiles: the same bits every time, batch-invariant on request, and no flags left."""
    layout, batch = cumla.DSV4_FP8, 40 if lab.on_device and not lab.emulated else 9
    cache = make_cache(rng, layout, 5, 64)
    rope_of(cache, layout)[4, :, 3] = 1e6
    indices = make_indices(rng, batch, 1, 130 if lab.emulated else 200, 256)
    indices[:poisoned, 0, 17] = 256 + 5
    q = make_q(rng, batch, 1, 16, layout)
    for options in ({}, {"batch_invariant": True}):
        plan = cumla.DecodePlan(**options)
        first = Problem(q, cache, indices, **options).check(lab, plan=plan)
        if lab.backend == "cuda" and kernel != "exact":
            assert not marks(lab, plan).any()
        again = Problem(q, cache, indices, **options).on(lab, plan=plan)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), lab.get(y).view(np.uint8))
    alone = Problem(q[:1], cache, indices[:1], batch_invariant=True).on(lab)
    for x, y in zip(first, alone, strict=True):
        np.testing.assert_array_equal(x[:1].view(np.uint8), lab.get(y).view(np.uint8))


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda" or x.get("kernel") == "exact")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_poison_with_any_participants(lab, kernel, rng, monkeypatch, batch_invariant):
    """CTAs of the exact kernel may exit before any tile is marked: the others must give the same result."""
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    layout, plan = cumla.DSV4_FP8, cumla.DecodePlan(batch_invariant=batch_invariant)
    cache = make_cache(rng, layout, 5, 64)
    rope_of(cache, layout)[4, :, 3] = 1e6
    indices = make_indices(rng, 3, 1, 200, 256, absent=0.0)
    indices[1:, 0, 17] = 256 + 5
    problem = Problem(make_q(rng, 3, 1, 33, layout), cache, indices, batch_invariant=batch_invariant)
    first = None
    for count in (1, 2, 20):
        with monkeypatch.context() as patch, recorded_launches():
            patch.setattr(sparse_kernels, "epilogue_ctas", lambda *_, count=count: count)
            found = problem.check(lab, plan=plan) if first is None else map(lab.get, problem.on(lab, plan=plan))
        found = [x.view(np.uint8).tobytes() for x in found]
        assert found == (first or found)
        first = found
        assert not marks(lab, plan).any()


def test_rows_not_attended_may_be_anything(lab, kernel, rng):
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64)
    cache[3] = 0xFF
    indices = make_indices(rng, 2, 2, 300, 192, 0.0)
    indices[1, 1] = -1
    indices[0, 1, :200] = -1  # leading blocks without any token
    out, lse = Problem(make_q(rng, 2, 2, 32, layout), cache, indices).check(lab)
    assert not to_float(out[1, 1]).any()
    assert np.isposinf(lse[1, :, 1]).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_softmax_scale(lab, kernel, rng, scale):
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64)
    Problem(make_q(rng, 2, 1, 16, layout), cache, make_indices(rng, 2, 1, 200, 256), softmax_scale=scale).check(lab)


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-3, 1e6, 1e30])
@pytest.mark.parametrize("heads", [20, 40])  # Hopper has a kernel for each
@pytest.mark.thorough(when=lambda x: x.get("heads") == 40 and (not x.emulated or x.get("size") != 1e6))
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") == 40 and x.get("kernel") == "portable")
def test_prefill_of_rows_of_any_size(lab, kernel, rng, heads, size):
    """The first token attends to ordinary rows, the second to large or small ones; max_logits and lse stay right."""
    kv = rng.standard_normal((200, 512))
    kv[100:] *= size
    kv, q = kv.astype(BF16), rng.standard_normal((2, heads, 512)).astype(BF16)
    q[1] = (q[1].astype(np.float64) / max(size, 1)).astype(BF16)
    indices = rng.integers(0, 100, (2, 150), dtype=np.int32) + np.array([[0], [100]], np.int32)
    want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")
    got = cumla.sparse_mla_prefill(lab.put(q), lab.put(kv), lab.put(indices), backend=lab.backend)
    got = [lab.get(x) for x in got]
    largest = np.broadcast_to(values_of_weights(lab, kernel, kv, indices), (2, 1, 1))
    for token, scale in ((0, 1.0), (1, size)):
        out, expected = to_float(got[0])[token] / scale, to_float(want[0])[token] / scale
        assert_prefill(
            out, got[1][token], got[2][token], expected, want[1][token], want[2][token],
            largest=largest[token] / (scale if kernel == "chosen" and lab.backend == "cuda" else 1.0),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.nowhere(when=is_beyond_float32)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6, 1e30, 3e38])
@pytest.mark.parametrize(("width", "heads"), [(512, 20), (576, 20), (576, 40)])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("width") == 512) != (x.get("value") in (np.inf, 1e6)))
@pytest.mark.thorough(when=lambda x: x.get("heads") == 40 and (not x.emulated or x.get("value") is not np.nan))
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") == 40 and x.get("kernel") == "portable")
def test_prefill_of_poisoned_rows(lab, kernel, rng, width, heads, value):
    """The first token attends to ordinary rows, the second to one poisoned one, the third to nothing else."""
    kv, q = rng.standard_normal((200, width)).astype(BF16), rng.standard_normal((3, heads, width)).astype(BF16)
    kv[100:, 7] = value
    indices = rng.integers(0, 100, (3, 70), dtype=np.int32)
    indices[1, 66] = 150
    indices[2] += 100
    sink = np.linspace(-3, 3, heads, dtype=np.float32)
    options = {"topk_length": np.array([70, 67, 65], np.int32), "attn_sink": sink}
    want = cumla.sparse_mla_prefill(q, kv, indices, **options, backend="reference")
    options = {name: lab.put(x) for name, x in options.items()}
    got = cumla.sparse_mla_prefill(lab.put(q), lab.put(kv), lab.put(indices), **options, backend=lab.backend)
    got = [lab.get(x) for x in got]
    largest = np.abs(to_float(kv[:100])).max()
    assert_prefill(to_float(got[0]), got[1], got[2], to_float(want[0]), want[1], want[2], largest=largest)


def test_nan_in_prefill_stays_with_its_token(lab, kernel, rng):
    kv, q = rng.standard_normal((200, 512)).astype(BF16), rng.standard_normal((3, 20, 512)).astype(BF16)
    kv[150, 9] = np.nan
    indices = rng.integers(0, 150, (3, 100), dtype=np.int32)
    indices[1, 40] = 150
    got = cumla.sparse_mla_prefill(lab.put(q), lab.put(kv), lab.put(indices), backend=lab.backend)
    want = cumla.sparse_mla_prefill(q[::2], kv, indices[::2], backend="reference")
    out, max_logits, lse = (lab.get(x) for x in got)
    assert np.isnan(to_float(out)[1]).all()
    assert np.isnan(lse[1]).all()
    largest = np.broadcast_to(values_of_weights(lab, kernel, kv, np.where(indices == 150, -1, indices)), (3, 1, 1))[::2]
    assert_prefill(
        to_float(out)[::2], max_logits[::2], lse[::2], to_float(want[0]), want[1], want[2], largest=largest
    )  # fmt: skip
