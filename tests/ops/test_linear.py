"""Products with block-scaled FP8 weights, on every backend: against float64, ragged sizes, special values, clusters."""

import ml_dtypes
import numpy as np
import pytest

from cumla import fp8_block_linear
from cumla.kernels.cpu import projection as cpu
from cumla.kernels.cuda import projection
from cumla.kernels.cuda.projection import Tiles
from support.lab import BF16

E4M3 = ml_dtypes.float8_e4m3fn


def weights(rng, *shape, block=(128, 128), is_ue8m0=False):
    """Codes without NaN, and scales that are powers of two or not."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes % 128 == 127] = 0
    blocks = -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
    exponents = rng.uniform(-9, -6, (*shape[:-2], *blocks))
    return codes, np.exp2(np.floor(exponents) if is_ue8m0 else exponents).astype(np.float32)


def dequantized(codes, scales, block=(128, 128)):
    spread = scales.repeat(block[0], -2)[..., : codes.shape[-2], :].repeat(block[1], -1)[..., : codes.shape[-1]]
    return codes.view(E4M3).astype(np.float64) * spread


def check(got, x, codes, scales, block=(128, 128)):
    """Results are within the rounding of float32 sums and of their dtype."""
    weight, x = dequantized(codes, scales, block), x.astype(np.float64)
    pattern = "tgk,gnk->tgn" if x.ndim == 3 else "tk,nk->tn"
    want, size = np.einsum(pattern, x, weight), np.einsum(pattern, np.abs(x), np.abs(weight))
    rounding = 0 if got.dtype == np.float32 else 2.0**-8
    error = np.abs(got.astype(np.float64) - want) - rounding * np.abs(want)
    assert (error <= 2e-6 * size).all(), error.max()


def call(lab, x, codes, scales, **options):
    return lab.get(fp8_block_linear(*map(lab.put, (x, codes, scales)), **options, backend=lab.backend))


# Sizes: a tile, ragged tokens, rows and columns, one token, columns that are no multiple of 16 (rows are not aligned).
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(8, 128, 256), (3, 200, 416), (1, 16, 32), (17, 130, 300), (33, 48, 129)], ids=str
)
@pytest.mark.parametrize("float32_output", [False, True])
@pytest.mark.thorough(
    when=lambda x: (x.emulated or x.simulated) and x.get("float32_output") == (x.get("tokens") in (3, 17))
)
def test_sizes(lab, rng, tokens, rows, columns, float32_output):
    if lab.tiny:
        tokens, rows, columns = min(tokens, 9), rows // 8, min(columns, 160)
    x, (codes, scales) = rng.standard_normal((tokens, columns)).astype(BF16), weights(rng, rows, columns)
    got = call(lab, x, codes, scales, float32_output=float32_output)
    assert got.dtype == (np.float32 if float32_output else BF16)
    check(got, x, codes, scales)


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (1, 512), (48, 64)], ids=str)
def test_groups_and_blocks(lab, rng, block):
    tokens, groups, rows, columns = (2, 2, 40, 96) if lab.tiny else (9, 3, 150, 288)
    x = rng.standard_normal((tokens, groups, columns)).astype(BF16)
    codes, scales = weights(rng, groups, rows, columns, block=block)
    got = call(lab, x, codes, scales, block_rows=block[0], block_columns=block[1], prefetch_weights=True)
    check(got, x, codes, scales, block)


@pytest.mark.parametrize("which", ["weight", "x", "weight, backwards", "groups"])
def test_rows_that_share_memory_or_run_backwards(lab, rng, which):
    """Such strides have no tensor map."""
    tokens, rows, columns = (2, 20, 96) if lab.tiny else (5, 200, 288)
    x, (codes, scales) = rng.standard_normal((tokens, columns)).astype(BF16), weights(rng, rows, columns)
    if which == "weight":
        codes = np.broadcast_to(codes[:1].copy(), codes.shape)
    elif which == "x":
        x = np.broadcast_to(x[:1].copy(), x.shape)
    elif which == "groups":
        x, codes = np.broadcast_to(x[:, None], (tokens, 2, columns)), np.broadcast_to(codes, (2, rows, columns))
        scales = np.stack([scales, scales])
    else:
        codes = codes[::-1]
    check(call(lab, x, codes, scales, float32_output=True), x, codes, scales)


def test_views_and_outputs(lab, rng):
    """Columns of wider arrays; only the elements of `out` are written."""
    x, (codes, scales) = rng.standard_normal((4, 192)).astype(BF16), weights(rng, 24, 96)
    out = lab.put(np.full((4, 64), 7, BF16))
    given = lab.put(x)[:, 96:]
    got = fp8_block_linear(given, lab.put(codes), lab.put(scales), out=out[:, 8:32], backend=lab.backend)
    check(lab.get(got), x[:, 96:], codes, scales)
    whole = lab.get(out).astype(np.float32)
    assert (np.delete(whole, np.arange(8, 32), 1) == 7).all()
    assert (whole[:, 8:32] == lab.get(got).astype(np.float32)).all()


@pytest.mark.parametrize("block", [(128, 128), (32, 32)], ids=str)
def test_special_values(lab, rng, block):
    """NaN codes make their row NaN, for all tokens; NaN scales their rows; special activations only their tokens."""
    rows, columns = (33, 64) if lab.tiny else (133, 192)
    x, (codes, scales) = rng.standard_normal((5, columns)).astype(BF16), weights(rng, rows, columns, block=block)
    codes[1, 5], codes[9, 60], codes[rows - 1, columns - 1] = 0x7F, 0xFF, 0x7F
    codes[2] = 0
    codes[3, :] = 0x80  # -0
    codes[4, :] = 0x81  # the smallest magnitude, a subnormal
    x[1, 3], x[2, 4], x[3, 5] = np.nan, np.inf, -np.inf
    x[4] = 0
    scales[0, -1] = 0
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float64) @ dequantized(codes, scales, block).T
    got = call(lab, x, codes, scales, float32_output=True, block_rows=block[0], block_columns=block[1])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.sign(got[np.isinf(want)]), np.sign(want[np.isinf(want)]))
    scales[0, 0] = np.nan
    got = call(lab, x, codes, scales, float32_output=True, block_rows=block[0], block_columns=block[1])
    assert np.isnan(got[:, : block[0]]).all()
    assert np.isfinite(got[0, block[0] : rows - 1]).all()


def test_small_and_large_values_are_not_rounded(lab):
    """Activations near bfloat16's ends: a conversion of either factor to float16 would lose them."""
    x = np.array([[2.0**120, 0, 2.0**-120, 0] * 8, [0, 2.0**-100, 0, 3.0] * 8], BF16)
    codes = np.tile(np.array([1, 0x7E, 0x38, 0x08], np.uint8), (4, 8))
    scales = np.array([[2.0**-3]], np.float32)
    got = call(lab, x, codes, scales, float32_output=True)
    np.testing.assert_allclose(got, x.astype(np.float64) @ dequantized(codes, scales).T, rtol=1e-6)


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 64)], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_subnormal_scales_count_as_0(lab, rng, block, sign):
    """As on CUDA (-ftz=true); the smallest normal scale does not."""
    rows, columns = (33, 64) if lab.tiny else (133, 192)
    x, (codes, scales) = rng.standard_normal((3, columns)).astype(BF16), weights(rng, rows, columns, block=block)
    x *= BF16(2.0**100)
    scales *= np.float32(2.0**-100)
    scales[0] = sign * 2.0**-126
    some = np.ones(scales.shape, bool)
    some[0], some[-1, 0] = False, False
    subnormal, zero = (np.where(some, np.float32(value), scales) for value in (sign * 2.0**-127, 0))
    options = {"float32_output": True, "block_rows": block[0], "block_columns": block[1]}
    got = call(lab, x, codes, subnormal, **options)
    np.testing.assert_array_equal(got, call(lab, x, codes, zero, **options))
    check(got, x, codes, zero, block)
    assert got[:, 0].all()
    least = np.full_like(scales, sign * (2.0**-126 - 2.0**-149))  # the largest subnormal number
    np.testing.assert_array_equal(call(lab, x, codes, least, **options), np.zeros((3, rows)))
    x[0, 0] = np.inf
    assert np.isnan(call(lab, x, np.full_like(codes, 0x38), least, **options)[0]).all()  # infinity times 0


@pytest.mark.parametrize("rows_at_a_time", [1, 70, 200])
@pytest.mark.parametrize("groups", [(), (2,)], ids=["matrix", "groups"])
def test_the_cpu_dequantises_some_rows_at_a_time(rng, monkeypatch, rows_at_a_time, groups):
    """A slice is one or more blocks of rows, with their scales."""
    rows, columns, block = 150, 96, (32, 32)
    monkeypatch.setattr(cpu, "VALUES_AT_A_TIME", rows_at_a_time * columns)
    x = rng.standard_normal((5, *groups, columns)).astype(BF16)
    codes, scales = weights(rng, *groups, rows, columns, block=block)
    got = fp8_block_linear(
        x, codes, scales, block_rows=block[0], block_columns=block[1], float32_output=True, backend="cpu"
    )
    check(got, x, codes, scales, block)


def test_nothing_to_do(lab):
    codes, scales = lab.put(np.zeros((8, 32), np.uint8)), lab.put(np.zeros((1, 1), np.float32))
    assert fp8_block_linear(lab.put(np.zeros((0, 32), BF16)), codes, scales, backend=lab.backend).shape == (0, 8)


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(8, 128, 4), Tiles(8, 16, 1), Tiles(16, 32, 2), Tiles(32, 128, 8), Tiles(64, 64, 2), Tiles(128, 128, 2),
        Tiles(16, 256, 2), Tiles(8, 64, 2, True), Tiles(8, 128, 3, True), Tiles(16, 128, 4, True),
        Tiles(32, 128, 1, True), Tiles(64, 128, 1, True), Tiles(64, 64, 1, True), Tiles(128, 128, 8, True),
        Tiles(32, 64, 5, True), Tiles(16, 256, 2, True), Tiles(128, 256, 1, True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("fine", [False, True], ids=["128", "32"])
@pytest.mark.parametrize("is_ue8m0", [False, True], ids=["any scale", "ue8m0"])
@pytest.mark.nowhere(  # the launcher uses the portable kernel, or another division
    when=lambda x: (
        x.get("tiles").hopper
        and (
            (x.get("fine") and not x.get("is_ue8m0"))
            or (x.get("tiles").rows > 128 and (x.get("fine") or not x.get("is_ue8m0")))
        )
    )
)
@pytest.mark.thorough(
    when=lambda x: not x.device and (x.get("tiles").tokens > 16 or x.get("fine") or x.get("is_ue8m0"))
)
def test_divisions(device, rng, monkeypatch, tiles, fine, is_ue8m0):
    """Every division of the work gives the same values: rows and tokens of a tile, and clusters that divide columns."""
    monkeypatch.setattr(projection, "division", lambda *_: tiles)
    block = (32, 32) if fine else (128, 128)
    tokens, columns = tiles.tokens + 1 if tiles.tokens < 32 else tiles.tokens - 1, 1184
    x = rng.standard_normal((tokens, columns)).astype(BF16)
    codes, scales = weights(rng, tiles.rows + 8, columns, block=block, is_ue8m0=is_ue8m0)
    options = {
        "float32_output": True, "block_rows": block[0], "block_columns": block[1], "is_ue8m0": is_ue8m0,
        "prefetch_weights": fine,
    }  # fmt: skip
    check(call(device, x, codes, scales, **options, finite_weights=True), x, codes, scales, block)
    codes[3, 1000] = 0x7F
    got = call(device, x, codes, scales, **options)
    assert np.isnan(got[:, 3]).all()
    assert np.isfinite(np.delete(got, 3, 1)).all()


def test_many_tokens_take_several_tiles(device, rng):
    x, (codes, scales) = rng.standard_normal((260, 64)).astype(BF16), weights(rng, 24, 64)
    check(call(device, x, codes, scales), x, codes, scales)


@pytest.mark.parametrize("sms", [108, 132])
@pytest.mark.parametrize("clusters", [False, True])
def test_small_weights_occupy_the_device(monkeypatch, sms, clusters):
    """CTAs divide the columns, or tiles have fewer rows if there are no clusters."""
    monkeypatch.setattr(projection, "device_sms", lambda _: sms)
    monkeypatch.setattr(projection, "has_clusters", lambda _: clusters)
    for rows, columns, groups in ((1536, 4096, 1), (32768, 1024, 1), (8192, 1024, 1), (4096, 8192, 1), (1024, 4096, 8)):
        for tokens in (1, 32) if clusters else (1,):
            tile, tile_rows, splits, _ = projection.division.__wrapped__(
                rows, columns, groups, tokens, False, clusters, 0
            )
            assert tile >= tokens
            assert groups * -(-rows // tile_rows) * splits >= 0.7 * sms
            assert splits == 1 or clusters
