"""Norms and RoPE, and the inserts and quantisation fused with them, against the plain formulas, on every backend."""

import ml_dtypes
import numpy as np
import pytest
from ops.test_compressor import BF16, DTYPES, assert_rows, cache_of, is_float32_off_the_host, rows_of

from cumla import (
    DSV4_BF16,
    DSV4_F32,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    INDEXER_BF16,
    INDEXER_F32,
    INDEXER_FP8,
    apply_rope,
    fused_q_kv_rmsnorm,
    indexer_knorm_rope_and_insert,
    inverse_rope_and_quantize,
    norm_rope_and_insert,
    qnorm_rope_and_insert,
    quantize_and_insert_k_cache,
)
from oracles.basics import layer_norm, rms_norm, rotated


@pytest.mark.nowhere(when=is_float32_off_the_host)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_queries_and_keys(lab, rng, dtype):
    both = rng.standard_normal((5, 384 + 512), np.float32).astype(DTYPES[dtype])
    weights = [rng.standard_normal(n, np.float32) for n in (384, 512)]
    placed = lab.put(both)
    got = fused_q_kv_rmsnorm(placed[:, :384], placed[:, 384:], *map(lab.put, weights), 1e-6, backend=lab.backend)
    for x, weight, y in zip((both[:, :384], both[:, 384:]), weights, got, strict=True):
        want = rms_norm(x.astype(np.float64), 1e-6, weight)
        np.testing.assert_allclose(
            lab.get(y).astype(np.float64), want, rtol=1e-5 if dtype == "float32" else 2.0**-7, atol=1e-6
        )


@pytest.mark.nowhere(when=is_float32_off_the_host)
@pytest.mark.parametrize("layout", [DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, DSV4_BF16, DSV4_F32], ids=str)
def test_queries_and_window_rows(lab, rng, layout):
    dtype = np.float32 if layout is DSV4_F32 else BF16
    tokens, heads = (3, 2) if lab.tiny else (7, 5)
    q = rng.standard_normal((tokens, heads, 512), np.float32).astype(dtype)
    kv = rng.standard_normal((tokens, 512), np.float32).astype(dtype)
    cos_sin = rng.standard_normal((64, 64), np.float32)
    positions = rng.integers(0, 64, tokens)
    slots = rng.permutation(64)[: tokens - 1].astype(np.int64)  # the last token has no slot
    slots[0] = -1
    before, cache = cache_of(layout, 4, 16), lab.put(cache_of(layout, 4, 16))
    got = qnorm_rope_and_insert(
        lab.put(q), lab.put(kv), cache, lab.put(slots), lab.put(positions), lab.put(cos_sin), layout=layout,
        backend=lab.backend,
    )  # fmt: skip
    want = rotated(rms_norm(q.astype(np.float64), 1e-6), cos_sin[positions][:, None])
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 2.0**-7, "atol": 1e-3}
    np.testing.assert_allclose(lab.get(got).astype(np.float64), want, **near)
    rows, rotated_rows = rows_of(lab.get(cache), layout), rotated(kv.astype(np.float64), cos_sin[positions])
    for token in range(1, tokens - 1):
        assert_rows(rows[slots[token]], rotated_rows[token], layout)
    untouched = np.setdiff1d(np.arange(64), slots)
    np.testing.assert_array_equal(rows[untouched], rows_of(before, layout)[untouched])


LATENT = [DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, DSV41_FP4, DSV41_FP4_SPLIT, DSV4_BF16, DSV4_F32]


@pytest.mark.nowhere(when=is_float32_off_the_host)
@pytest.mark.parametrize("layout", LATENT, ids=str)
@pytest.mark.parametrize("weight", [None, "float32", "bfloat16"])
@pytest.mark.thorough(
    when=lambda x: (
        (x.emulated or x.simulated)
        and (x.get("weight") == "bfloat16") != (x.get("layout") is DSV41_FP4 or x.get("layout") is DSV4_BF16)
    )
)
def test_rows_without_queries(lab, rng, layout, weight):
    """Norm, rotation and quantisation give the bytes of a direct insert of the row."""
    dtype = np.float32 if layout is DSV4_F32 else BF16
    tokens = 3 if lab.tiny else 7
    kv = rng.standard_normal((tokens, 512), np.float32).astype(dtype)
    weights = None if weight is None else rng.standard_normal(512, np.float32).astype(DTYPES[weight])
    angles = rng.uniform(0, 7, (64, 32))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions, slots = rng.integers(0, 64, tokens), rng.permutation(64)[: tokens - 1].astype(np.int64)
    slots[0] = -1
    before, cache = cache_of(layout, 4, 16), lab.put(cache_of(layout, 4, 16))
    norm_rope_and_insert(
        lab.put(kv), cache, lab.put(slots), lab.put(positions), lab.put(cos_sin), weight=lab.put(weights),
        layout=layout, backend=lab.backend,
    )  # fmt: skip
    x = kv.astype(np.float64)
    if weight is not None:
        x = rms_norm(x, 1e-6, weights.astype(np.float64))
    rows, want = rows_of(lab.get(cache), layout), rotated(x, cos_sin[positions])
    for token in range(1, tokens - 1):
        assert_rows(rows[slots[token]], want[token], layout)
    untouched = np.setdiff1d(np.arange(64), slots)
    np.testing.assert_array_equal(rows[untouched], rows_of(before, layout)[untouched])


@pytest.mark.parametrize("layout", [DSV41_FP8, DSV41_FP4, DSV41_FP4_SPLIT], ids=str)
def test_rows_that_are_not_rotated_have_the_bytes_of_an_insert(lab, rng, layout):
    kv = rng.standard_normal((3, 512), np.float32).astype(BF16)
    kv[1, 5], kv[2, 20] = np.nan, np.inf
    slots, zeros = lab.put(np.arange(3)), lab.put(np.zeros(3, np.int64))
    cos_sin = lab.put(np.array([[1.0, 0.0]], np.float32))
    caches = [lab.put(layout.allocate(1, 4)) for _ in range(2)]
    norm_rope_and_insert(lab.put(kv), caches[0], slots, zeros, cos_sin, layout=layout, backend=lab.backend)
    quantize_and_insert_k_cache(lab.put(kv), caches[1], slots, layout=layout, backend=lab.backend)
    np.testing.assert_array_equal(*map(lab.get, caches))


@pytest.mark.parametrize("layout", [DSV41_FP8, DSV41_FP4, DSV41_FP4_SPLIT, DSV4_FP8], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_quantised_as_they_are_or_through_bfloat16(lab, rng, layout, weighted):
    """Values of 12 bits and cosines of few bits make float32 exact on every backend: all bytes are known."""
    tokens = 2 if lab.tiny else 6
    kv, weight = rng.integers(-255, 256, (tokens, 512)) / 64, None
    if weighted:  # rows of 1 and -1: the norm changes nothing
        kv, weight = rng.choice([-1.0, 1.0], (tokens, 512)), (rng.integers(-4095, 4096, 512) / 512).astype(np.float32)
    cos_sin = rng.choice([0.75, -0.5, 1.25, 0.625, 1.5], (tokens, 64)).astype(np.float32)
    rows = rotated(kv if weight is None else kv * weight, cos_sin)
    found = []
    for round_rows in (True, False):
        cache = lab.put(layout.allocate(1, tokens))
        norm_rope_and_insert(
            lab.put(kv.astype(BF16)), cache, lab.put(np.arange(tokens)), lab.put(np.arange(tokens)), lab.put(cos_sin),
            weight=lab.put(weight), eps=1e-20, round_rows=round_rows, layout=layout, backend=lab.backend,
        )  # fmt: skip
        values, scales, rope = layout.parts(lab.get(cache))
        given = rows.astype(BF16).astype(np.float64) if round_rows else rows
        want_values, want_scales = quantised_by_ml_dtypes(given[:, : layout.quantized_dim], layout)
        np.testing.assert_array_equal(values.reshape(tokens, -1), want_values)
        np.testing.assert_array_equal(scales.reshape(tokens, -1)[:, : want_scales.shape[1]], want_scales)
        tail = np.ascontiguousarray(rope).view(np.uint8).reshape(tokens, -1)
        np.testing.assert_array_equal(tail, rows[:, layout.quantized_dim :].astype(BF16).view(np.uint8))
        found.append(values.copy())
    differ = (found[0] != found[1]).mean()
    if weighted:
        assert differ > 0.001
    elif layout is DSV4_FP8:  # its quantised values are not rotated
        assert differ == 0


def quantised_by_ml_dtypes(rows, layout):
    """Bytes of values and scales: a tile's largest value decides its scale, to nearest even."""
    tiles = rows.reshape(len(rows), -1, layout.scale_tile)
    largest = np.abs(tiles).max(axis=2)
    if layout.value_type == "e4m3":
        exponents = np.maximum(
            np.ceil(np.log2(largest / 448)), layout.min_exponent
        )  # no power of two is as near as 2^-40
        values = (tiles * 2.0 ** -exponents[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        return values.view(np.uint8).reshape(len(rows), -1), (exponents + 127).astype(np.uint8)
    scales = np.maximum(largest.astype(np.float32) / np.float32(6), np.float32(2.0**-9)).astype(ml_dtypes.float8_e4m3fn)
    codes = (tiles.astype(np.float32) / scales.astype(np.float32)[..., None]).astype(ml_dtypes.float4_e2m1fn)
    codes = codes.view(np.uint8).reshape(len(rows), -1, 2)
    return codes[..., 0] | codes[..., 1] << 4, scales.view(np.uint8)


@pytest.mark.nowhere(when=lambda c: c.get("layout") is INDEXER_F32 and c.backend not in ("reference", "cpu"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [INDEXER_FP8, INDEXER_BF16, INDEXER_F32], ids=str)
def test_indexer_keys(lab, rng, layout, dtype):
    """LayerNorm with weight and bias, the first 64 values rotated in halves, the last token without a slot."""
    tokens = 5
    wide = rng.standard_normal((tokens, 128 + 8), np.float32).astype(DTYPES[dtype])
    weight, bias = rng.standard_normal((2, 128), np.float32)
    cos_sin, positions = rng.standard_normal((16, 64), np.float32), np.array([3, 0, 15, -4, 40])
    slots = np.array([17, -1, 0, 63], np.int64)
    before, cache = cache_of(layout, 4, 16), lab.put(cache_of(layout, 4, 16))
    indexer_knorm_rope_and_insert(
        lab.put(wide)[:, :128], lab.put(weight), lab.put(bias), cache, lab.put(slots), lab.put(positions),
        lab.put(cos_sin), layout=layout, backend=lab.backend,
    )  # fmt: skip
    x = layer_norm(wide[:, :128].astype(np.float64), 1e-6, weight, bias)
    want = rotated(x, cos_sin[np.clip(positions, 0, 15)], halves=True, first=True)
    rows = rows_of(lab.get(cache), layout)
    for token in (0, 2, 3):
        assert_rows(rows[slots[token]], want[token], layout)
    untouched = np.setdiff1d(np.arange(64), slots)
    np.testing.assert_array_equal(rows[untouched], rows_of(before, layout)[untouched])


@pytest.mark.nowhere(when=lambda x: x.simulated and x.get("dim") > 128)  # slow
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192, 512])
def test_rope(lab, rng, dim, inverse):
    x = rng.standard_normal((3, 4, dim), np.float32).astype(BF16)
    cos_sin = rng.standard_normal((32, 64), np.float32)
    positions = np.array([0, 31, 7], np.int32)
    got = apply_rope(lab.put(x), lab.put(positions), lab.put(cos_sin), inverse=inverse, backend=lab.backend)
    want = rotated(x.astype(np.float64), cos_sin[positions][:, None], inverse)
    np.testing.assert_allclose(lab.get(got).astype(np.float64), want, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_array_equal(lab.get(got)[..., :-64].view(np.uint16), x[..., :-64].view(np.uint16))


@pytest.mark.parametrize("is_ue8m0", [False, True])
def test_inverse_rope_with_quantisation(lab, rng, is_ue8m0):
    tokens, heads, groups = 3, 4, 2
    o = rng.standard_normal((tokens, heads, 512), np.float32).astype(BF16)
    o[1, 2, :128] = 0
    o[2, 0, 5] = np.nan
    cos_sin = rng.standard_normal((32, 64), np.float32)
    positions = np.array([3, 40, -2])  # positions outside the table are clamped
    values, scales = inverse_rope_and_quantize(
        lab.put(o), lab.put(positions), lab.put(cos_sin), groups, is_ue8m0=is_ue8m0, backend=lab.backend
    )
    back = rotated(o.astype(np.float64), cos_sin[np.clip(positions, 0, 31)][:, None], inverse=True)
    x = back.reshape(tokens, groups, -1, 128).transpose(1, 0, 2, 3)
    amax = np.maximum(np.nan_to_num(np.abs(x)).max(axis=3), 1e-10)
    scales = lab.get(scales)
    if is_ue8m0:
        assert (np.log2(scales) % 1 == 0).all()
        assert (scales >= amax / 448 * (1 - 2.0**-8)).all()
        assert (scales <= 2 * amax / 448 * (1 + 2.0**-8)).all()
    else:
        np.testing.assert_allclose(scales, amax / 448, rtol=2.0**-8)
    held = np.ascontiguousarray(lab.get(values)).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    got = held.reshape(x.shape) * scales[..., None]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    error = np.nan_to_num(np.abs(got - x))
    assert (error <= np.nan_to_num(np.abs(x)) / 15 + scales[..., None] * 2.0**-9).all()
