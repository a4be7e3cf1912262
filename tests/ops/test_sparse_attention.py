"""Sparse attention on every backend and kernel, against the float64 reference."""

import numpy as np
import pytest

import cumla
from support.attention import Problem, make_cache, make_indices, make_q
from support.bounds import assert_decode, assert_prefill, assert_within, largest_values
from support.lab import BF16, Lab, to_float

FP8 = (cumla.DSV4_FP8, cumla.V32_FP8)
LAYOUTS = (*FP8, cumla.MLA_BF16, cumla.DSV4_BF16)


EXACT_EMULATED = {"test_one_cache", "test_two_caches_and_sink", "test_prefill"}
SAYS_OF_THE_REFERENCE = {
    "test_merge_of_parts_that_are_empty_or_no_numbers", "test_nan_stays_with_its_token", "test_poisoned_rows",
    "test_rows_not_attended_may_be_anything", "test_strided_arguments", "test_nan_in_prefill_stays_with_its_token",
}  # fmt: skip


def is_the_reference_itself(x):
    """What results are compared with."""
    return x.backend == "reference" and x.test not in SAYS_OF_THE_REFERENCE


def has_no_such_kernel(x):
    """Only the cuda backend has several."""
    return x.get("kernel", "chosen") != "chosen" and x.backend != "cuda"


def is_beyond_float32(x):
    """numba_cuda attends in float32 alone, without an exact kernel behind it: it says so."""
    return x.backend == "numba_cuda" and not np.isnan(x.get("value", 1e6))


def is_slow_to_emulate(x):
    """And the other kernels call this one where they must."""
    return x.emulated and x.get("kernel") == "exact" and x.test not in EXACT_EMULATED


pytestmark = [
    pytest.mark.attention,
    pytest.mark.nowhere(when=has_no_such_kernel),
    pytest.mark.nowhere(when=is_slow_to_emulate),
    pytest.mark.nowhere(when=is_the_reference_itself),
]


@pytest.fixture(params=["chosen", "portable", "exact"])
def kernel(request, lab):
    """Every kernel of the cuda backend; the other backends have one."""
    if request.param == "chosen":
        yield request.param
        return
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    with sparse_kernels.forced(request.param):
        yield request.param


def values_of_weights(lab, kernel, kv, indices):
    """`largest` for assert_prefill: the kernel that Hopper takes for prefill has bfloat16 weights."""
    return largest_values(kv, indices) if lab.backend == "cuda" and kernel == "chosen" else 1.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [1, 8, 64, 100, 128])
@pytest.mark.nowhere(when=lambda x: x.emulated and x.get("heads") not in (1, 100))  # which are one tile and two
@pytest.mark.thorough(
    when=lambda x: x.get("heads") not in (1, 100) or (x.get("heads"), x.get("kernel")) == (100, "exact")
)
def test_one_cache(lab, kernel, rng, layout, heads):
    cache = make_cache(rng, layout, 9, 53)
    Problem(
        make_q(rng, 3, 2, heads, layout), cache, make_indices(rng, 3, 2, 150, 9 * 53), layout=layout,
        topk_length=np.array([150, 0, 70], np.int32),
    ).check(lab)  # fmt: skip


@pytest.mark.parametrize(("block_size", "extra_block_size"), [(256, 64), (1, 2), (53, 576), (64, 1)])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("block_size") not in (256, 53))
def test_two_caches_and_sink(lab, kernel, rng, block_size, extra_block_size):
    layout = cumla.DSV4_FP8
    pages, extra_pages = -(-700 // block_size), -(-900 // extra_block_size)
    stride = layout.page_bytes(block_size) + 576
    cache = make_cache(rng, layout, pages, block_size, stride)
    extra = make_cache(rng, layout, extra_pages, extra_block_size)
    lengths = rng.integers(-3, 300, (4, 2), dtype=np.int32)
    lengths[1, 1] = 0
    heads = 16 if lab.emulated else 64
    Problem(
        make_q(rng, 4, 2, heads, layout), cache, make_indices(rng, 4, 2, 128, pages * block_size), layout=layout,
        topk_length=np.array([128, 5, 64, 0], np.int32), extra_k_cache=extra,
        extra_indices=make_indices(rng, 4, 2, 200, extra_pages * extra_block_size), extra_topk_length=lengths,
        attn_sink=np.linspace(-5, 5, heads, dtype=np.float32),
    ).check(lab)  # fmt: skip


@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
@pytest.mark.parametrize(
    ("batch", "topk"), [(1, 1), (1, 64), (1, 4000), (2, 640), (3, 2000), (40, 200), (100, 2100), (300, 130)]
)
@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")  # which alone shares a token's work out
@pytest.mark.thorough(when=lambda x: x.get("batch") * x.get("topk") > 6000 and x.get("layout") is cumla.V32_FP8)
@pytest.mark.thorough(when=lambda x: x.get("batch") * x.get("topk") > 100_000)
def test_work_is_shared_out(lab, rng, layout, batch, topk):
    """From one long token, cut many times, to more tokens than there are multiprocessors."""
    batch = min(batch, 40) if lab.emulated else batch  # the emulated device has few multiprocessors
    cache = make_cache(rng, layout, 20, 64)
    Problem(make_q(rng, batch, 1, 64, layout), cache, make_indices(rng, batch, 1, topk, 1280)).check(lab)


def test_many_short_tokens(lab, kernel, rng):
    """So much work in all that a share may begin anywhere in a tile of one block: the first one must not skip it."""
    layout, batch = cumla.DSV4_FP8, 200
    lengths = rng.integers(0, 65, batch, dtype=np.int32)
    Problem(
        make_q(rng, batch, 1, 8, layout), make_cache(rng, layout, 4, 64), make_indices(rng, batch, 1, 64, 256, 0.0),
        topk_length=lengths,
    ).check(lab)  # fmt: skip


def test_uneven_lengths(lab, kernel, rng):
    layout = cumla.DSV4_FP8
    batch = 24 if kernel == "chosen" and lab.backend == "cuda" and not lab.emulated else 6
    heads, longest = (66, 500) if lab.emulated else (128, 3000)
    cache = make_cache(rng, layout, 30, 64)
    lengths = np.minimum(rng.pareto(0.5, (batch, 2)) * 20, longest).astype(np.int32)
    Problem(
        make_q(rng, batch, 2, heads, layout), cache, make_indices(rng, batch, 2, longest, 1920, 0.0),
        topk_length=lengths,
    ).check(lab)  # fmt: skip


@pytest.mark.parametrize("batch", [5, 3])
def test_plan_for_other_lengths_is_only_slower(lab, rng, batch):
    """With more tokens than the emulated device has multiprocessors, and with fewer."""
    layout = cumla.DSV4_FP8
    cache, plan = make_cache(rng, layout, 30, 64), cumla.DecodePlan()
    topk = 600 if lab.emulated else 2000
    q, indices = make_q(rng, batch, 1, 64, layout), make_indices(rng, batch, 1, topk, 1920)
    for lengths in ([topk] * 5, [0, 1, 64, 65, topk], [1] * 5, [topk // 4, topk // 2, topk * 3 // 4, topk, 3]):
        Problem(q, cache, indices, topk_length=np.array(lengths[-batch:], np.int32)).check(lab, plan=plan)
    plan.renew()
    Problem(q, cache, indices, topk_length=np.array([7, topk, 0, 5, 9][:batch], np.int32)).check(lab, plan=plan)


def test_the_same_bits_every_time_and_in_every_batch(lab, kernel, rng):
    layout, heads = cumla.DSV4_FP8, 8 if lab.emulated else 64
    cache, q = make_cache(rng, layout, 30, 64), make_q(rng, 3, 2, heads, layout)
    indices, lengths = make_indices(rng, 3, 2, 700, 1920), np.array([700, 300, 650], np.int32)
    for options in ({}, {"batch_invariant": True}):
        first = Problem(q, cache, indices, topk_length=lengths, **options).on(lab)
        again = Problem(q, cache, indices, topk_length=lengths, **options).on(lab)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(lab.get(x).view(np.uint8), lab.get(y).view(np.uint8))
    for b in range(3):  # with the last options: alone
        alone = Problem(q[b : b + 1], cache, indices[b : b + 1], topk_length=lengths[b : b + 1], **options).on(lab)
        for x, y in zip(first, alone, strict=True):
            np.testing.assert_array_equal(lab.get(x)[b : b + 1].view(np.uint8), lab.get(y).view(np.uint8))


@pytest.mark.parametrize("size", [1e-30, 1e-5, 30.0, 1e6, 1e30])
def test_q_of_any_size(lab, kernel, rng, size):
    layout = cumla.DSV4_FP8
    cache, q = make_cache(rng, layout, 4, 64), make_q(rng, 2, 1, 8, layout)
    q[1] = (q[1].astype(np.float64) * size).astype(BF16)  # the other token stays ordinary
    Problem(q, cache, make_indices(rng, 2, 1, 100, 256), softmax_scale=0.04 / max(size, 1)).check(lab)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_merge_of_parts_that_are_empty_or_no_numbers(lab, rng, dtype):
    """An lse of plus or minus infinity says that no key was attended, and the part may then hold anything."""
    inf, nan = np.inf, np.nan
    prefix_lse = np.array([[0.5, inf, -inf, 0.5, 0.5, inf, inf, -inf, -inf, nan, 1.0, nan]], np.float32)
    suffix_lse = np.array([[1.5, 0.5, 0.5, inf, -inf, inf, -inf, inf, -inf, 1.0, nan, inf]], np.float32)
    tokens = prefix_lse.shape[1]
    prefix, suffix = (rng.standard_normal((tokens, 1, 40)).astype(dtype) for _ in range(2))
    prefix[np.isinf(prefix_lse[0])], suffix[np.isinf(suffix_lse[0])] = nan, nan
    sums = np.zeros((tokens, 40)), np.zeros(tokens)
    for part, lse in ((prefix, prefix_lse[0]), (suffix, suffix_lse[0])):
        weight = np.where(np.isinf(lse), 0, np.exp(lse.astype(np.float64)))
        sums[0][...] += np.where(weight[:, None] == 0, 0, weight[:, None] * to_float(part)[:, 0])
        sums[1][...] += weight
    empty = sums[1] == 0
    total = np.where(empty, 1, sums[1])
    want, want_lse = sums[0] / total[:, None], np.where(empty, inf, np.log(total))
    output, output_lse = lab.put(np.full((tokens, 1, 40), 7, dtype)), lab.put(np.full((1, tokens), 7, np.float32))
    arguments = [lab.put(x) for x in (prefix, prefix_lse, suffix, suffix_lse)]
    cumla.merge_attn_states(output, *arguments, output_lse, backend=lab.backend)
    bound = (1e-6, 1e-5) if dtype is np.float32 else (1e-6, 1.01 / 128)
    assert_within("output", to_float(lab.get(output))[:, 0], want, *bound)
    assert_within("output_lse", lab.get(output_lse)[0], want_lse, 1e-6, 1e-5)


@pytest.mark.parametrize("place", [0, 30, 32, 62, 64 + 40])
def test_scales_that_float16_lacks_in_one_place(lab, kernel, rng, place):
    """Two neighbours in a block of 64, in either half of it, which are all that there is; their scales decide."""
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 4, 64, spread=0)
    for i in range(layout.num_scales):
        cache[3].reshape(-1)[layout.scale_start(64) + i :: layout.scale_stride] = 100  # 2^-27
    indices = make_indices(rng, 2, 1, 128, 192, 0.0)
    indices[1] = -1
    indices[1, 0, place : place + 2] = 3 * 64 + 5, 3 * 64 + 9
    q = make_q(rng, 2, 1, 16, layout)
    q[1] *= np.array(2.0**14, BF16)
    q[1, ..., -64:] = 0  # of RoPE, which has no scales
    Problem(q, cache, indices, softmax_scale=4.0).check(lab)


@pytest.mark.parametrize("size", [2.0**-20, 2.0**-40])
def test_small_q_may_decide(lab, kernel, rng, size):
    """Where the scale makes up for it, bits that float16 lacks count."""
    layout = cumla.DSV4_FP8
    q = make_q(rng, 2, 1, 8, layout, size)
    Problem(q, make_cache(rng, layout, 4, 64), make_indices(rng, 2, 1, 100, 256), softmax_scale=0.04 / size).check(lab)


def test_large_q_may_bring_every_score_down(lab, kernel, rng):
    """To minus infinity in float16, as if no token were there; one that is not would make NaN, so all are."""
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
        q = make_q(rng, 2, 1, 16, layout, 8 / 448 * 2.0**-largest)  # so that scores are ordinary
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
    q[..., -64:] = 0  # of RoPE, which has no scales
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


def rows_of(cache, layout):
    """The rows of a cache of pages of 64 tokens, without their scales."""
    return cache.reshape(len(cache), -1)[:, : 64 * layout.row_bytes].reshape(-1, 64, layout.row_bytes)


def rope_of(cache, layout):
    return rows_of(cache, layout)[..., layout.rope_offset :].view(BF16)


EMULATED_POISON = [("window", np.inf), ("extra", -1e30), ("both", 1e6), ("both", 3e38)]


def marks(lab, plan):
    """What the fast kernels of the cuda backend leave for the exact one, and its counters."""
    return lab.get(plan.workspace.array("unsafe", 0, np.int32, lab.put(np.zeros(1, np.int32))))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.nowhere(when=is_beyond_float32)
@pytest.mark.parametrize("where", ["window", "extra", "both"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6, -1e30, 3e38])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("where"), x.get("value")) not in EMULATED_POISON)
def test_poisoned_rows(lab, kernel, rng, where, value):
    """One value of one row, of which one request attends to it, while another attends to rows that nobody wrote."""
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
    """Scores that are equal but for the last bits of a float32: what those say decides."""
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
    """Zeros, scales too, which the fast kernels take for what they are."""
    cache = layout.allocate(4, 64)
    problem = Problem(make_q(rng, 3, 1, 20, layout), cache, make_indices(rng, 3, 1, 100, 256), layout=layout)
    if lab.backend == "cuda" and kernel != "exact":
        from cumla.kernels.cuda.sparse import kernels as sparse_kernels

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_kernels, "attend_exactly", lambda *arguments, **options: None)
            problem.check(lab, plan=(plan := cumla.DecodePlan()))
        assert not marks(lab, plan).any()
    problem.check(lab)


@pytest.mark.nowhere(when=is_beyond_float32)
@pytest.mark.parametrize("poisoned", [1, 3, 40])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("poisoned") == 1)
def test_poison_leaves_no_traces(lab, kernel, rng, poisoned):
    """However many tiles are marked: the same bits every time, alone too if asked for, and no marks afterwards."""
    layout, batch = cumla.DSV4_FP8, 40 if lab.on_device and not lab.emulated else 9
    cache = make_cache(rng, layout, 5, 64)
    rope_of(cache, layout)[4, :, 3] = 1e6
    indices = make_indices(rng, batch, 1, 130 if lab.emulated else 200, 256)
    indices[:poisoned, 0, 17] = 256 + 5
    q, plan = make_q(rng, batch, 1, 16, layout), cumla.DecodePlan()
    for options in ({}, {"batch_invariant": True}):
        first = Problem(q, cache, indices, **options).check(lab, plan=plan)
        if lab.backend == "cuda" and kernel != "exact":
            assert not marks(lab, plan).any()
        again = Problem(q, cache, indices, **options).on(lab, plan=plan)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), lab.get(y).view(np.uint8))
    alone = Problem(q[:1], cache, indices[:1], batch_invariant=True).on(lab)
    for x, y in zip(first, alone, strict=True):
        np.testing.assert_array_equal(x[:1].view(np.uint8), lab.get(y).view(np.uint8))


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


def test_strided_arguments(lab, kernel, rng):
    layout = cumla.V32_FP8
    cache = make_cache(rng, layout, 4, 64)
    q = np.zeros((3, 4, 70, 576 + 64), BF16)
    q[:, ::2, 3:67, :576] = make_q(rng, 3, 2, 64, layout)
    indices = np.zeros((6, 2, 300), np.int32)
    indices[::2, :, 4:104] = make_indices(rng, 3, 2, 100, 256)
    out, lse = np.full((3, 2, 66, 520), 7, BF16), np.full((3, 70, 4), 7, np.float32)
    out, lse = lab.put(out), lab.put(lse)
    q, cache, indices = lab.put(q), lab.put(cache), lab.put(indices)
    arguments = q[:, ::2, 3:67, :576], cache, indices[::2, :, 4:104]
    reference = Lab("reference", False)
    want_out, want_lse = cumla.sparse_mla_decode(*(lab.get(x) for x in arguments), backend="reference")
    cumla.sparse_mla_decode(*arguments, out=out[:, :, :64, :512], lse=lse[:, :64, :2], backend=lab.backend)
    out, lse = reference.get(lab.get(out)), lab.get(lse)
    assert_decode(to_float(out[:, :, :64, :512]), lse[:, :64, :2], to_float(want_out), want_lse)
    assert (out[:, :, 64:] == 7).all()
    assert (out[..., 512:] == 7).all()
    assert (lse[:, 64:] == 7).all()
    assert (lse[..., 2:] == 7).all()


@pytest.mark.parametrize(("width", "heads", "topk"), [(512, 64, 200), (576, 128, 64), (512, 3, 700), (576, 16, 1)])
def test_prefill(lab, kernel, rng, width, heads, topk):
    kv = rng.standard_normal((400, width)).astype(BF16)
    q = rng.standard_normal((5, heads, width)).astype(BF16)
    indices = make_indices(rng, 5, 1, topk, 400)[:, 0]
    indices[3] = -1
    lengths = np.array([topk, topk // 2, 0, topk, 1], np.int32)
    sink = np.linspace(-3, 3, heads, dtype=np.float32)
    options = {"topk_length": lengths, "attn_sink": sink}
    want = cumla.sparse_mla_prefill(q, kv, indices, **options, backend="reference")
    options = {name: lab.put(x) for name, x in options.items()}
    got = cumla.sparse_mla_prefill(lab.put(q), lab.put(kv), lab.put(indices), **options, backend=lab.backend)
    got = [lab.get(x) for x in got]
    largest = values_of_weights(lab, kernel, kv, indices)
    assert_prefill(to_float(got[0]), got[1], got[2], to_float(want[0]), want[1], want[2], largest=largest)


@pytest.mark.nowhere(when=lambda x: x.backend == "cuda" or x.device)  # on the host alone
def test_prefill_of_float32_rows(lab, rng):
    """Results without bfloat16's rounding; indices of any value."""
    q, kv = rng.standard_normal((4, 3, 512)).astype(np.float32), rng.standard_normal((30, 512)).astype(np.float32)
    indices = make_indices(rng, 4, 1, 40, 30)[:, 0]
    want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")
    got = cumla.sparse_mla_prefill(q, kv, indices, backend=lab.backend)
    assert got[0].dtype == np.float32
    for name, x, y in zip(("out", "max_logits", "lse"), got, want, strict=True):
        assert_within(name, x, y, 1e-6, 1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-3, 1e6, 1e30])
def test_prefill_of_rows_of_any_size(lab, kernel, rng, size):
    """The first token attends to ordinary rows, the second to large or small ones; max_logits and lse stay right."""
    kv = rng.standard_normal((200, 512))
    kv[100:] *= size
    kv, q = kv.astype(BF16), rng.standard_normal((2, 20, 512)).astype(BF16)
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
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("width") == 512) != (x.get("value") in (np.inf, 1e6)))
def test_prefill_of_poisoned_rows(lab, kernel, rng, width, value):
    """The first token attends to ordinary rows, the second to one poisoned one, the third to nothing else."""
    kv, q = rng.standard_normal((200, width)).astype(BF16), rng.standard_normal((3, 20, width)).astype(BF16)
    kv[100:, 7] = value
    indices = rng.integers(0, 100, (3, 70), dtype=np.int32)
    indices[1, 66] = 150
    indices[2] += 100
    options = {"topk_length": np.array([70, 67, 65], np.int32), "attn_sink": np.linspace(-3, 3, 20, dtype=np.float32)}
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


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 576])
def test_prefill_of_more_tokens_than_a_grid_has_rows(rng, width):
    """The kernel that is chosen beside the portable one, twice: the same bits; some tokens beside float64."""
    import cupy

    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    tokens, heads, rows, topk = 70_001, 2, 5000, 70
    q, kv = (cupy.asarray(rng.standard_normal(shape).astype(BF16)) for shape in ((tokens, heads, width), (rows, width)))
    indices = cupy.asarray(rng.integers(-(2**31), 2**31, (tokens, topk)).astype(np.int32))
    indices[:, ::2] %= rows
    lengths = cupy.asarray(rng.integers(-1, topk + 2, tokens).astype(np.int32))
    first, second = (cumla.sparse_mla_prefill(q, kv, indices, topk_length=lengths) for _ in range(2))
    with sparse_kernels.forced("portable"):
        portable = cumla.sparse_mla_prefill(q, kv, indices, topk_length=lengths)
    for x, y in zip(first, second, strict=True):
        assert x.get().tobytes() == y.get().tobytes()
    largest = float(abs(kv.get().astype(np.float32)).max())
    got, other = ([x.get() for x in results] for results in (first, portable))
    assert_prefill(to_float(got[0]), *got[1:], to_float(other[0]), *other[1:], rounded_sides=2, largest=largest)
    some = [0, 1, 65534, 65535, 65536, tokens - 1]
    want = cumla.sparse_mla_prefill(q.get()[some], kv.get(), indices.get()[some], topk_length=lengths.get()[some])
    assert_prefill(to_float(got[0][some]), got[1][some], got[2][some], to_float(want[0]), *want[1:], largest=largest)
