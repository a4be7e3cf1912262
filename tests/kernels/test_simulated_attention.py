"""Attention of the Numba CUDA backend in Numba's simulator, on small cases; tests that take `lab` have large ones."""

import numpy as np
import pytest

import cumla
from cumla.kernels.numba_cuda import latent_attention, launch, projection
from cumla.kernels.reference.sparse_attention import merge_attn_states
from support import special_values
from support.attention import Problem, make_cache, make_indices, make_q
from support.bounds import assert_decode, assert_prefill, assert_within
from support.lab import BF16, Lab, to_float

pytestmark = pytest.mark.skipif(not launch.SIMULATED, reason="for the simulator")

SIMULATOR = Lab("numba_cuda", on_device=False)
LAYOUTS = (cumla.DSV4_FP8, cumla.V32_FP8, cumla.MLA_BF16, cumla.DSV4_BF16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_sparse_decode(rng, layout):
    """Two tiles of heads, several tiles of keys in several splits, and a token without keys."""
    cache = make_cache(rng, layout, 5, 7)
    indices = make_indices(rng, 2, 1, 40, 35)
    problem = Problem(make_q(rng, 2, 1, 9, layout), cache, indices, topk_length=np.array([40, 0], np.int32))
    out, lse = problem.check(SIMULATOR)
    assert not to_float(out[1]).any()
    assert np.isposinf(lse[1]).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (cumla.DSV41_FP8, cumla.DSV41_FP4), (cumla.DSV41_FP8_SPLIT, cumla.DSV41_FP4_SPLIT),
        (cumla.DSV41_FP4, cumla.DSV41_FP4), (cumla.V32_NOPE_FP8, cumla.V32_NOPE_FP8),
    ],
)  # fmt: skip
def test_caches_of_v41(rng, first, second):
    Problem(
        make_q(rng, 1, 2, 3, first), make_cache(rng, first, 3, 5), make_indices(rng, 1, 2, 9, 15), layout=first,
        topk_length=np.array([7], np.int32), extra_k_cache=make_cache(rng, second, 3, 7),
        extra_indices=make_indices(rng, 1, 2, 20, 21), extra_layout=second,
        attn_sink=np.array([-np.inf, 0, 1], np.float32),
    ).check(SIMULATOR)  # fmt: skip


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_two_caches_and_a_sink(rng, batch_invariant):
    layout = cumla.DSV4_FP8
    cache, extra = make_cache(rng, layout, 3, 7, layout.page_bytes(7) + 40), make_cache(rng, layout, 9, 2)
    problem = Problem(
        make_q(rng, 1, 2, 3, layout), cache, make_indices(rng, 1, 2, 11, 21), topk_length=np.array([9], np.int32),
        extra_k_cache=extra, extra_indices=make_indices(rng, 1, 2, 14, 18),
        extra_topk_length=np.array([[3, 14]], np.int32), attn_sink=np.array([-np.inf, 0, 3], np.float32),
        batch_invariant=batch_invariant,
    )  # fmt: skip
    first = problem.check(SIMULATOR, plan=cumla.DecodePlan(batch_invariant=batch_invariant))
    for x, y in zip(first, problem.on(SIMULATOR), strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize(
    ("op", "layout", "extra_topk"),
    [
        ("decode", cumla.DSV4_FP8, 9), ("decode", cumla.V32_FP8, 0), ("prefill", cumla.DSV4_BF16, 0),
        ("prefill", cumla.MLA_BF16, 0),
    ],
)  # fmt: skip
def test_special_values(op, layout, extra_topk):
    for case in special_values.cases(op, layout, 3, ("mixed",), topk=18, extra_topk=extra_topk, few=True):
        special_values.check(case, SIMULATOR)


@pytest.mark.parametrize("topk", [9, 40])  # in one part, and in several
@pytest.mark.parametrize("sink", [None, [-np.inf, 0, 3, -1e38]])
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_beyond_float32(rng, topk, sink, sign):
    """Keys of the largest score have equal weights, others 0; a head of ordinary size; a token without keys."""
    layout = cumla.MLA_BF16
    q, cache = make_q(rng, 2, 1, 4, layout), make_cache(rng, layout, 5, 8)
    q[:, :, 1:, :512], q[:, :, 1:, 512:] = 0, sign * 1e25
    q[:, :, 3] *= 1e12
    rows = cache.view(BF16)
    rows[..., 512:] = 1e25
    rows[1, :, 512:] = sign * 1e24
    q[:, :, 0, 512:] = 0
    indices = np.resize(np.arange(40, dtype=np.int32), (2, 1, topk))
    options = {} if sink is None else {"attn_sink": np.array(sink, np.float32)}
    with np.errstate(over="ignore"):
        out, lse = Problem(
            q, cache, indices, layout=layout, topk_length=np.array([topk, 0], np.int32), **options
        ).check(SIMULATOR)
    assert np.isposinf(lse[1]).all()
    assert np.abs(to_float(out[0])).max(axis=-1).all() or sink is not None


@pytest.mark.parametrize("byte", [0, 126, 134, 254])
def test_scales_of_any_size(rng, byte):
    """With two splits of the keys; a split's output may be larger than the combined output."""
    layout = cumla.DSV4_FP8
    cache = make_cache(rng, layout, 2, 8)
    for page in cache:
        page.reshape(-1)[layout.scale_start(8) + 3 :: layout.scale_stride] = byte
    q = make_q(rng, 1, 1, 2, layout, size=2.0 ** min(0, 125 - byte))
    Problem(q, cache, make_indices(rng, 1, 1, 20, 16)).check(SIMULATOR, size=448.0 * 2.0 ** (byte - 127) / 8)


def test_every_e4m3_byte_is_read_as_it_is_and_nan_stays_with_its_token(rng):
    layout = cumla.DSV4_FP8
    cache = layout.allocate(1, 2)
    rows = cache.reshape(-1)[: 2 * layout.row_bytes].reshape(2, -1)
    codes = np.arange(256, dtype=np.uint8)
    rows[0, :448] = np.resize(codes[codes & 0x7F != 0x7F], 448)
    rows[1, 5] = 0xFF
    cache.reshape(-1)[2 * layout.row_bytes :] = 127  # a scale of 1
    q = np.zeros((2, 1, 1, 512), BF16)
    out, _ = Problem(q, cache, np.array([[[0]], [[1]]], np.int32)).on(SIMULATOR)
    want, _ = Problem(q[:1], cache, np.array([[[0]]], np.int32)).on(Lab("reference", False))
    np.testing.assert_array_equal(to_float(out[0]), to_float(want[0]))
    assert np.isnan(to_float(out[1])[..., 5]).all()


def test_prefill(rng):
    kv, q = rng.standard_normal((20, 576)).astype(BF16), rng.standard_normal((3, 2, 576)).astype(BF16)
    indices = make_indices(rng, 3, 1, 18, 20)[:, 0]
    options = {"topk_length": np.array([18, 0, 3], np.int32), "attn_sink": np.array([0, 2], np.float32)}
    want = cumla.sparse_mla_prefill(q, kv, indices, **options, backend="reference")
    got = cumla.sparse_mla_prefill(q, kv, indices, **options, backend="numba_cuda")
    assert_prefill(to_float(got[0]), got[1], got[2], to_float(want[0]), want[1], want[2])


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@np.errstate(invalid="ignore")  # NaN in the reference
def test_merge(rng, dtype):
    outs = [rng.standard_normal((4, 2, 5)).astype(dtype) for _ in range(2)]
    lses = [rng.standard_normal((2, 4)).astype(np.float32) for _ in range(2)]
    lses[0][0, :2], lses[1][0, 1:3], lses[1][1, 3] = np.inf, -np.inf, np.nan
    outs[0][0, 0], outs[1][1, 0] = np.nan, np.inf  # partial results without keys
    results = [(np.zeros((4, 2, 5), dtype), np.zeros((2, 4), np.float32)) for _ in range(2)]
    merge_attn_states(results[0][0], outs[0], lses[0], outs[1], lses[1], results[0][1])
    cumla.merge_attn_states(results[1][0], outs[0], lses[0], outs[1], lses[1], results[1][1], backend="numba_cuda")
    assert_within("output", to_float(results[1][0]), to_float(results[0][0]), 1e-6, 2.0**-8)
    assert_within("output_lse", results[1][1], results[0][1], 1e-6, 1e-6)


@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("scale", [None, 0.003])
def test_dense_decode(rng, dtype, scale):
    """Requests of several queries, absent pages, and one request without tokens."""
    q = rng.standard_normal((2, 2, 3, 576)).astype(dtype)
    cache = (0.3 * rng.standard_normal((6, 5, 576))).astype(dtype)
    if scale is not None:
        cache = rng.integers(0, 0x7F, cache.shape, dtype=np.uint8)
    table, lens = np.array([[3, -1, 0, 5], [9, 1, 2, 2]], np.int32), np.array([19, 0], np.int32)
    options = {"scale": scale, "softmax_scale": 0.02}
    want = cumla.dense_mla_decode(q, cache, table, lens, **options, backend="reference")
    got = cumla.dense_mla_decode(q, cache, table, lens, **options, backend="numba_cuda")
    assert_decode(to_float(got[0]), got[1], to_float(want[0]), want[1])


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_packed_sequences_and_then_more_keys(rng, dtype):
    """Rows of no sequence, sequences without keys and tiles of several sequences."""
    q = rng.standard_normal((14, 2, 48)).astype(dtype)
    starts_q = np.array([1, 4, 4, 13], np.int32)
    results = [(np.full((14, 2, 16), 7, np.float32), np.full((2, 14), 7, np.float32)) for _ in range(2)]
    for causal, starts_k in ((True, [0, 2, 7, 20]), (False, [0, 9, 9, 9])):
        k, k_pe, v = (rng.standard_normal(s).astype(dtype) for s in ((20, 2, 32), (20, 16), (20, 2, 16)))
        for backend, (out, lse) in zip(("reference", "numba_cuda"), results, strict=True):
            cumla.mha_varlen(
                q, k, v, starts_q, np.array(starts_k, np.int32), k_pe=k_pe, causal=causal, accumulate=not causal,
                out=out, lse=lse, backend=backend,
            )  # fmt: skip
    (want, want_lse), (got, lse) = results
    assert_within("out", got, want, 8e-4, 3.01 / 128)
    assert_within("lse", lse, want_lse, 1e-6, 2.01 / 65536)


def test_heads_of_other_sizes_are_errors(rng):
    q, starts = np.zeros((3, 1, 40), BF16), np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match="q, k_pe, v: got 40, 0 and 40 values a head, expected multiples of 16"):
        cumla.mha_varlen(q, q, q, starts, starts, backend="numba_cuda")


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_products(rng, dtype):
    """More than a tile in each dimension, and transposed factors."""
    a, b = rng.standard_normal((2, 130, 9)).astype(dtype), rng.standard_normal((2, 17, 130)).astype(dtype)
    a, b, out = a.transpose(0, 2, 1), b.transpose(0, 2, 1), np.zeros((2, 9, 17), dtype)
    projection.batched_product(a, b, out)
    assert_within("out", to_float(out), to_float(a) @ to_float(b), 1e-2, 2.0**-7)


def test_parts_fill_the_device_and_no_more():
    assert latent_attention.part_count(2, 20, 132) == 20  # one request of 640 keys: a split is a tile of keys
    assert latent_attention.part_count(2, 512, 132) == latent_attention.MAX_PARTS
    assert latent_attention.part_count(100, 512, 132) == 2
    assert latent_attention.part_count(300, 512, 132) == 1
    assert latent_attention.part_count(1, 0, 132) == 1
