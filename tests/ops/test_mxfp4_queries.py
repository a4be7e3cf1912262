"""The indexer's queries in MXFP4 (DeepSeek V4.1): bytes, the same values in e4m3, special values, and their logits."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

import cumla
from support.lab import BF16

DIM, TILE = 128, 32
FP4, FP8 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
PLACES = np.ones((1, 64), np.float32)  # a table; queries at position -1 are not rotated


def quantised(lab, q, q_format, positions=None, table=PLACES, weights=None, **options):
    positions = np.full(len(q), -1) if positions is None else positions
    weights = np.ones(q.shape[:2], np.float32) if weights is None else weights
    given = {"index_weights_softmax_scale": 1.0, "index_weights_head_scale": 1.0, **options}
    found = cumla.fused_indexer_q_rope_quant(
        *map(lab.put, (positions, q, table, weights)), q_format=q_format, backend=lab.backend, **given
    )
    return tuple(lab.get(x) for x in found)


def expected_rows(q):
    """Codes and exponents of queries without NaN or infinity, by NumPy and ml_dtypes."""
    tiles = q.astype(np.float64).reshape(*q.shape[:2], DIM // TILE, TILE)
    amax = np.maximum(np.abs(tiles).max(axis=-1), 6 * 2.0**-126)
    exponents = np.ceil(np.log2(amax / 6)).astype(np.int64)
    values = (tiles / np.ldexp(1.0, exponents)[..., None]).astype(FP4)
    codes = values.view(np.uint8).reshape(q.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponents, values.astype(np.float64)


def awkward(rng, tokens, heads, span):
    """Tiles of different sizes, ties, zeros of both signs; a head's first tile is its largest."""
    q = rng.standard_normal((tokens, heads, DIM // TILE, TILE))
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    q[..., 1, :16] = np.concatenate([ties, -ties])
    below = rng.integers(0, span + 1, (tokens, heads, DIM // TILE))
    q *= np.exp2(rng.integers(-30, 30, (tokens, heads, 1)) - below)[..., None]
    q[..., 2, 3], q[..., 2, 4] = 0.0, -0.0
    q[0, 0, 3] = 0
    return q.reshape(tokens, heads, DIM).astype(BF16)


def test_published_bytes(lab):
    """SHA-256 of a row equals the SHA-256 of a key's values and scales (test_v41_formats.py)."""
    i = np.arange(DIM)
    x = (((37 * i) % 101 - 50) * np.exp2(i // 64 - 3.0)).astype(BF16)[None, None]
    rows, _ = quantised(lab, x, "mxfp4_rows")
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == "7943709b7c5d0597"


def test_rows_are_what_ml_dtypes_makes(lab, rng):
    q = awkward(rng, *((2, 2) if lab.tiny else (5, 33)), span=20)
    weights = rng.standard_normal(q.shape[:2]).astype(np.float32)
    rows, found = quantised(lab, q, "mxfp4_rows", weights=weights, index_weights_softmax_scale=0.5)
    codes, exponents, _ = expected_rows(q)
    np.testing.assert_array_equal(rows[..., :64], codes)
    np.testing.assert_array_equal(rows[..., 64:], exponents + 127)
    np.testing.assert_array_equal(found, weights * np.float32(0.5))


def test_e4m3_has_the_same_values(lab, rng):
    """Exact down to 2^-14 of a head's largest scale; below it rounded to e4m3."""
    for span, tolerance in ((10, 0), (40, 2.0**-10)):
        q = awkward(rng, *((2, 2) if lab.tiny else (4, 33)), span=span)
        bytes_, factors = quantised(lab, q, "mxfp4")
        _, exponents, values = expected_rows(q)
        head = exponents.max(axis=-1) - 6
        np.testing.assert_array_equal(factors, np.ldexp(np.float32(1), head))
        want = (values * np.ldexp(1.0, exponents - head[..., None])[..., None]).reshape(q.shape)
        got = bytes_.view(FP8).astype(np.float64)
        assert (np.abs(got - want) <= tolerance).all()
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_nan_and_infinity(lab, rng):
    """NaN fills its tile and leaves the head's scale to the others; an infinity is 6 times its tile's scale."""
    q = rng.standard_normal((1, 3, DIM)).astype(BF16)
    q[0, 0, 3], q[0, 0, 40], q[0, 0, 41], q[0, 1], q[0, 2] = np.nan, np.inf, -np.inf, np.nan, 0
    rows, _ = quantised(lab, q, "mxfp4_rows")
    codes, scales = rows[0, :, :64], rows[0, :, 64:]
    assert not codes[0, :16].any()
    assert not codes[1:].any()
    assert (codes[0, 20] & 15, codes[0, 20] >> 4) == (7, 15)
    assert (scales[0] == 255).tolist() == [True, False, False, False]
    np.testing.assert_array_equal(scales[1:], np.repeat([[255], [1]], 4, axis=1))
    values, factors = quantised(lab, q, "mxfp4")
    is_nan = values[0] & 0x7F == 0x7F
    np.testing.assert_array_equal(is_nan, np.arange(DIM) < np.array([[TILE], [DIM], [0]]))
    assert not values[0, 2].any()
    exponents = scales[0, 1:].astype(np.int64) - 127
    largest = values[0, 0, 40:42].view(FP8).astype(np.float64) * factors[0, 0]
    np.testing.assert_array_equal(largest, [6 * 2.0 ** exponents[0], -6 * 2.0 ** exponents[0]])
    assert factors[0, 1] == factors[0, 2] == 2.0**-126


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=lambda x: np.dtype(x).name)
def test_rotated_queries(lab, rng, is_neox, dtype):
    """RoPE by angles whose products are exact: bytes are equal on every backend."""
    tokens, heads = (2, 2) if lab.tiny else (5, 9)
    table = np.concatenate([rng.choice([0.5, -0.25, 1], (20, 32)), rng.choice([1, -0.5], (20, 32))], axis=1)
    positions = rng.integers(-1, 22, tokens)
    q = (rng.integers(-9, 10, (tokens, heads, DIM)) * np.exp2(rng.integers(-6, 3, (tokens, heads, 1)))).astype(dtype)
    arguments = positions, q, table.astype(np.float32), rng.standard_normal((tokens, heads)).astype(BF16)
    for q_format in ("mxfp4", "mxfp4_rows"):
        want = cumla.fused_indexer_q_rope_quant(*arguments, is_neox=is_neox, q_format=q_format, backend="reference")
        found = cumla.fused_indexer_q_rope_quant(
            *map(lab.put, arguments), is_neox=is_neox, q_format=q_format, backend=lab.backend
        )
        np.testing.assert_array_equal(lab.get(found[0]), want[0])
        np.testing.assert_allclose(lab.get(found[1]), want[1], rtol=1e-6)


def test_rows_need_no_alignment(lab, rng):
    """Rows are written at any address, and no other bytes are."""
    q = awkward(rng, 3, 2, span=5)
    memory = lab.put(np.full((3, 2, 71), 165, np.uint8))
    out = memory[..., 1:69], lab.put(np.zeros((3, 2), np.float32))
    given = lab.put(np.full(3, -1)), lab.put(q), lab.put(PLACES), lab.put(np.ones((3, 2), np.float32))
    cumla.fused_indexer_q_rope_quant(*given, q_format="mxfp4_rows", out=out, backend=lab.backend)
    codes, exponents, _ = expected_rows(q)
    want = np.full((3, 2, 71), 165, np.uint8)
    want[..., 1:69] = np.concatenate([codes, exponents + 127], axis=-1)
    np.testing.assert_array_equal(lab.get(memory), want)


def test_logits_are_those_of_the_rounded_values(rng):
    """Over MXFP4 keys, in float64, they are what V4.1's published code computes."""
    q = awkward(rng, 4, 8, span=10)
    weights = rng.standard_normal((4, 8)).astype(np.float32)
    k = rng.integers(0, 256, (50, 64), np.uint8), rng.integers(120, 130, (50, 4)).astype(np.uint8)
    ranges = np.zeros(4, np.int32), np.full(4, 50, np.int32)
    given = np.full(4, -1), q, PLACES, weights
    values, folded = cumla.fused_indexer_q_rope_quant(*given, 1.0, 1.0, q_format="mxfp4", backend="reference")
    got = cumla.fp8_mqa_logits(values, k, folded, *ranges, backend="reference")
    _, exponents, codes = expected_rows(q)
    rounded = (codes * np.ldexp(1.0, exponents)[..., None]).reshape(q.shape).astype(np.float32)
    want = cumla.fp8_mqa_logits(rounded, k, weights, *ranges, backend="reference")
    np.testing.assert_array_equal(got, want)


def test_wrong_formats(rng):
    given = np.zeros(1, np.int64), np.zeros((1, 1, DIM), BF16), PLACES, np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match="q_format: got 'fp4', expected 'fp8', 'mxfp4' or 'mxfp4_rows'"):
        cumla.fused_indexer_q_rope_quant(*given, q_format="fp4", backend="reference")
    with pytest.raises(ValueError, match="q_format: got 'mxfp4' for queries that are not quantised"):
        cumla.fused_indexer_q_rope_quant(*given, quantize=False, q_format="mxfp4", backend="reference")
    out = np.zeros((1, 1, DIM), np.uint8), np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match="got shape"):
        cumla.fused_indexer_q_rope_quant(*given, q_format="mxfp4_rows", out=out, backend="reference")
