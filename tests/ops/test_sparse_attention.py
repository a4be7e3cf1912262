"""Sparse attention on every backend and kernel, against the float64 reference: shapes, and divisions of work."""

import numpy as np
import pytest

import cumla
from cumla.bounds import PREFILL_OUT
from support.attention import Problem, make_cache, make_indices, make_q, marks_of_kernels, values_of_weights
from support.bounds import assert_decode, assert_prefill, assert_within
from support.lab import BF16, Lab, to_float

FP8 = (cumla.DSV4_FP8, cumla.V32_FP8)
LAYOUTS = (*FP8, cumla.MLA_BF16, cumla.DSV4_BF16)
pytestmark = marks_of_kernels(
    emulated={"test_one_cache", "test_two_caches_and_sink", "test_prefill", "test_caches_of_v41"},
    of_the_reference={"test_merge_of_parts_that_are_empty_or_no_numbers", "test_strided_arguments"},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [1, 8, 64, 100, 128])
@pytest.mark.nowhere(when=lambda x: x.emulated and x.get("heads") not in (1, 100))  # which are one tile and two
@pytest.mark.thorough(
    when=lambda x: x.get("heads") not in (1, 100) or (x.get("heads"), x.get("kernel")) == (100, "exact")
)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("heads") == 100 and x.get("layout") not in FP8)
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


@pytest.mark.parametrize(
    "formats",
    [
        (cumla.DSV41_FP8, cumla.DSV41_FP4), (cumla.DSV41_FP8_SPLIT, cumla.DSV41_FP4_SPLIT),
        (cumla.DSV41_FP8, cumla.DSV41_FP8), (cumla.DSV41_FP4_SPLIT, cumla.DSV41_FP4_SPLIT),
        (cumla.V32_NOPE_FP8, cumla.V32_NOPE_FP8),
    ],
    ids=lambda x: f"{x[0].name}-{x[1].name}",
)  # fmt: skip
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("formats")[0] is not cumla.DSV41_FP8)
def test_caches_of_v41(lab, kernel, rng, formats):
    """The second list has another format: 128 keys of the window, and the listed compressed keys."""
    first, second = formats
    heads = 1 if lab.emulated and kernel == "exact" else 20
    lengths = rng.integers(-3, 300, (3, 2), dtype=np.int32)
    lengths[1, 1] = 0
    sink = np.linspace(-5, 5, heads, dtype=np.float32)
    sink[0] = -np.inf
    Problem(
        make_q(rng, 3, 2, heads, first), make_cache(rng, first, 12, 32), make_indices(rng, 3, 2, 128, 12 * 32),
        layout=first, topk_length=np.array([128, 0, 70], np.int32), extra_k_cache=make_cache(rng, second, 9, 53),
        extra_indices=make_indices(rng, 3, 2, 200, 9 * 53), extra_topk_length=lengths, extra_layout=second,
        attn_sink=sink,
    ).check(lab)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["V 1e6", "V 1e-8", "V inf", "NaN", "NaN beside V", "scores 1e5", "scores -inf", "absent"]
)
@pytest.mark.nowhere(when=lambda x: x.backend == "reference")
@pytest.mark.thorough(when=lambda x: x.backend != "cuda")
def test_bfloat16_rows_outside_float16_s_range(lab, rng, name):
    """With more heads than the portable kernel supports on Hopper: flagged tiles are recomputed."""
    layout = cumla.MLA_BF16
    q, cache = make_q(rng, 2, 1, 34, layout), make_cache(rng, layout, 4, 8)
    rows, listed = cache.view(BF16), np.broadcast_to(np.arange(32, dtype=np.int32), (2, 1, 32)).copy()
    size = 1.0
    if name.startswith("V 1e"):
        size = float(name[2:])
        rows[..., :512] = to_float(rows[..., :512]) * size
        q = (to_float(q) / size).astype(BF16)
    elif name == "scores 1e5":
        q = (to_float(q) * 1e4).astype(BF16)
    elif name == "scores -inf":
        q[..., :512], q[..., 512:], rows[..., 512:] = 0, -1e25, 1e25
    elif name == "absent":
        listed[1] = -1
    else:
        rows[1, 2, 530 if "beside" in name else 5] = np.inf if name == "V inf" else np.nan
    with np.errstate(all="ignore"):
        Problem(q, cache, listed, layout=layout).check(lab, size=size)


@pytest.mark.parametrize("layout", FP8, ids=lambda x: x.name)
@pytest.mark.parametrize(
    ("batch", "topk"), [(1, 1), (1, 64), (1, 4000), (2, 640), (3, 2000), (40, 200), (100, 2100), (300, 130)]
)
@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")  # the only backend that splits a token's work
@pytest.mark.thorough(when=lambda x: x.get("batch") * x.get("topk") > 6000 and x.get("layout") is cumla.V32_FP8)
@pytest.mark.thorough(when=lambda x: x.get("batch") * x.get("topk") > 100_000)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("batch") == 300)  # 40 there, as another one
def test_work_is_split(lab, rng, layout, batch, topk):
    """From one long token, with many splits, to more tokens than there are multiprocessors."""
    if lab.emulated:  # the emulated device has few SMs
        batch, topk = min(batch, 40), min(topk, 24_000 // batch)
    cache = make_cache(rng, layout, 20, 64)
    Problem(make_q(rng, batch, 1, 64, layout), cache, make_indices(rng, batch, 1, topk, 1280)).check(lab)


def test_many_short_tokens(lab, kernel, rng):
    """Enough work for a split to begin anywhere in a tile of one block: the first split must not skip the block."""
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


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_merge_of_parts_that_are_empty_or_no_numbers(lab, rng, dtype):
    """An infinite lse of either sign means that no key was attended, and the partial result may hold anything."""
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


@pytest.mark.parametrize("first", [64, 1], ids=["aligned", "unaligned"])
def test_prefill_of_strided_queries(lab, kernel, rng, first):
    """Queries are every other token, with some of the heads and values."""
    kv, many = (rng.standard_normal(shape).astype(BF16) for shape in ((200, 512), (6, 9, 704)))
    indices = make_indices(rng, 3, 1, 100, 200)[:, 0]
    q, on_lab = (x[::2, 1:6, first : first + 512] for x in (many, lab.put(many)))
    want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")
    got = cumla.sparse_mla_prefill(on_lab, lab.put(kv), lab.put(indices), backend=lab.backend)
    got = [lab.get(x) for x in got]
    largest = values_of_weights(lab, kernel, kv, indices)
    assert_prefill(to_float(got[0]), got[1], got[2], to_float(want[0]), want[1], want[2], largest=largest)


@pytest.mark.nowhere(when=lambda x: x.backend == "cuda" or x.device)  # only on the host
def test_prefill_of_float32_rows(lab, rng):
    """Results without bfloat16's rounding; indices of any value."""
    q, kv = rng.standard_normal((4, 3, 512)).astype(np.float32), rng.standard_normal((30, 512)).astype(np.float32)
    indices = make_indices(rng, 4, 1, 40, 30)[:, 0]
    want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")
    got = cumla.sparse_mla_prefill(q, kv, indices, backend=lab.backend)
    assert got[0].dtype == np.float32
    for name, x, y in zip(("out", "max_logits", "lse"), got, want, strict=True):
        assert_within(name, x, y, 1e-6, 1e-5)


@pytest.mark.gpu
def test_prefill_of_more_tokens_than_a_grid_has_rows(rng):
    """The same bits twice, compared with the portable kernel, some with float64. Indices and lengths of any value."""
    import cupy

    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    tokens, rows, topk = 70_001, 5000, 70
    normal = cupy.random.default_rng(int(rng.integers(1 << 30))).standard_normal
    q, kv = normal((tokens, 1, 512), np.float32).astype(BF16), normal((rows, 512), np.float32).astype(BF16)
    indices = cupy.asarray(rng.integers(-(2**31), 2**31, (tokens, topk)).astype(np.int32))
    indices[:, ::2] %= rows
    lengths = cupy.asarray(rng.integers(-1, topk + 2, tokens).astype(np.int32))
    first, second = (cumla.sparse_mla_prefill(q, kv, indices, topk_length=lengths) for _ in range(2))
    with sparse_kernels.forced("portable"):
        portable = cumla.sparse_mla_prefill(q, kv, indices, topk_length=lengths)
    for x, y in zip(first, second, strict=True):
        assert bool((x.view(np.uint8) == y.view(np.uint8)).all())
    largest = float(abs(kv.astype(np.float32)).max())
    absolute, relative, _ = PREFILL_OUT.of_values(largest)
    out, other = first[0].astype(np.float32), portable[0].astype(np.float32)
    assert bool((abs(out - other) <= 2 * (absolute + relative * abs(other))).all())
    some = [0, 1, 65534, 65535, 65536, tokens - 1]
    got = [x[some].get() for x in first]
    want = cumla.sparse_mla_prefill(q[some].get(), kv.get(), indices[some].get(), topk_length=lengths[some].get())
    assert_prefill(to_float(got[0]), got[1], got[2], to_float(want[0]), want[1], want[2], largest=largest)
