"""DeepSeek V4.1's cache formats: the published bytes, the rules of rounding, and where formats must be named."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.layout import rearrange
from support.attention import Problem, make_cache, make_indices, make_q
from support.bounds import assert_decode
from support.lab import BF16, to_float

# Programs of the second arrangement are compiled for the emulator, and simulated, in slow tests.
pytestmark = pytest.mark.thorough(when=lambda x: (x.emulated or x.simulated) and "SPLIT" in str(x.get("name")))
ARRANGEMENTS = {"DSV41_FP8": "DSV41_FP8_SPLIT", "DSV41_FP4": "DSV41_FP4_SPLIT"}
# A value of 512, quantised by FlashMLA's and vLLM's rules with ml_dtypes: SHA-256 of data and scales of one token.
PUBLISHED = {
    "DSV41_FP8": "c33d37a60bbab06c", "DSV41_FP8_SPLIT": "c33d37a60bbab06c",
    "DSV41_FP4": "2d25706129fe83c5", "DSV41_FP4_SPLIT": "2d25706129fe83c5", "INDEXER_MXFP4": "7943709b7c5d0597",
}  # fmt: skip


def inserted(lab, k, layout, **options):
    """Data bytes and scale bytes of each token of k in a cache of one page, on the host."""
    cache = lab.put(layout.allocate(1, len(k)))
    cumla.quantize_and_insert_k_cache(
        lab.put(k), cache, lab.put(np.arange(len(k))), len(k), layout=layout, backend=lab.backend, **options
    )
    page = np.ascontiguousarray(lab.get(cache)).reshape(-1)
    rows = page[: len(k) * layout.row_bytes].reshape(len(k), layout.row_bytes)
    at = layout.scale_start(len(k)) + layout.scale_stride * np.arange(len(k))
    return rows[:, : layout.quantized_bytes], page[at[:, None] + np.arange(layout.num_scales)]


def gathered(lab, cache, layout, tokens, dtype=np.float32):
    out = lab.put(np.zeros((1, tokens, layout.head_dim), dtype))
    table, lens = lab.put(np.zeros((1, 1), np.int32)), lab.put(np.array([tokens], np.int32))
    cumla.dequantize_and_gather_k_cache(
        out, lab.put(cache), lens, None, table, tokens, layout=layout, backend=lab.backend
    )
    return lab.get(out)[0]


def expected_fp4(k):
    """NumPy and ml_dtypes: e2m1 data and e4m3 scales of rows without NaN."""
    tiles = k.astype(np.float32).reshape(len(k), -1, 16)
    amax = np.where(np.isfinite(tiles), np.abs(tiles), 0).max(axis=-1)
    scales = np.clip(amax / np.float32(6), np.float32(2.0**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    quotients = tiles / scales.astype(np.float32)[..., None]
    codes = quotients.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(k), -1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales.view(np.uint8)


def expected_fp8(k, least):
    tiles = k.astype(np.float64).reshape(len(k), -1, 32)
    amax = np.abs(tiles).max(axis=-1)
    with np.errstate(divide="ignore"):
        exponents = np.maximum(np.ceil(np.log2(amax / 448)), least).astype(np.int64)
    values = np.clip(tiles / np.ldexp(1.0, exponents)[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return values.view(np.uint8).reshape(len(k), -1), (exponents + 127).astype(np.uint8)


def awkward_rows(rng, tokens, dtype=BF16):
    """Tiles of very different sizes, zeros of both signs, ties, and values next to ties."""
    k = rng.standard_normal((tokens, 512)) * np.exp2(rng.integers(-30, 12, (tokens, 32))).repeat(16, axis=1)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]) * np.exp2(rng.integers(-6, 6, (tokens, 32, 1)))
    places = rng.random((tokens, 32)) < 0.5
    k.reshape(tokens, 32, 16)[places] = np.concatenate([ties, -ties], axis=-1)[places]
    k[rng.random(k.shape) < 0.05] = 0.0
    k[rng.random(k.shape) < 0.05] = -0.0
    k[0, :64] = 0
    return k.astype(dtype)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_bytes(lab, name):
    i, layout = np.arange(512), getattr(cumla, name)
    x = (((37 * i) % 101 - 50) * np.exp2(i // 64 - 3.0)).astype(BF16)[None, : layout.head_dim]
    data, scales = inserted(lab, x, layout)
    assert hashlib.sha256(data.tobytes() + scales.tobytes()).hexdigest()[:16] == PUBLISHED[name]


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("name", ["DSV41_FP4", "DSV41_FP4_SPLIT"])
def test_fp4_is_what_ml_dtypes_makes(lab, rng, name, dtype):
    k = awkward_rows(rng, 2 if lab.tiny else 40, dtype)
    for got, want in zip(inserted(lab, k, getattr(cumla, name)), expected_fp4(k), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("least", [None, -13, -22])
@pytest.mark.parametrize("name", ["DSV41_FP8", "DSV41_FP8_SPLIT"])
def test_fp8_has_either_floor(lab, rng, name, least):
    """vLLM's smallest scale is 2^-22, FlashMLA's and SGLang's 2^-13."""
    layout = getattr(cumla, name)
    k = awkward_rows(rng, 2 if lab.tiny else 20)
    floor = {"DSV41_FP8": -22, "DSV41_FP8_SPLIT": -13}[name] if least is None else least
    for got, want in zip(inserted(lab, k, layout, min_exponent=least), expected_fp8(k, floor), strict=True):
        np.testing.assert_array_equal(got, want)


def test_where_the_floors_differ(lab):
    """Up to amax 448 * 2^-14 the bytes differ, from the next bfloat16 on they are equal."""
    k = np.zeros((1, 512), BF16)
    for amax, equal in ((0.02734375, False), (0.02746582, True)):
        k[0, 5] = amax
        (_, low), (_, high) = (inserted(lab, k, cumla.DSV41_FP8, min_exponent=least) for least in (-22, -13))
        assert (low[0, 0] == high[0, 0]) == equal
        assert (low[0, 1], high[0, 1]) == (105, 114)  # a tile of zeros


def test_values_are_divided_by_the_scale(lab):
    """A product with the reciprocal would give code 3."""
    k = np.zeros((1, 512), BF16)
    k[0, 0], k[0, 1] = 6 * 0.029296875, 0.03662109375
    data, scales = inserted(lab, k, cumla.DSV41_FP4)
    assert scales[0, 0] == np.array(0.029296875, ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert data[0, 0] == 7 | 2 << 4


@pytest.mark.parametrize("name", ["DSV41_FP4", "DSV41_FP4_SPLIT", "INDEXER_MXFP4"])
def test_nan_and_infinity_in_fp4(lab, rng, name):
    """NaN makes its tile's scale NaN and its codes 0; an infinity saturates. Other tiles do not change."""
    layout = getattr(cumla, name)
    k = rng.standard_normal((1, layout.head_dim)).astype(BF16)
    k[0, 3] = 0
    data, scales = (x.copy() for x in inserted(lab, k, layout))
    k[0, 3], k[0, layout.scale_tile + 1] = np.nan, -np.inf
    k_zero = k.copy()
    k_zero[0, 3], k_zero[0, layout.scale_tile + 1] = 0, 0
    want, want_scales = (x.copy() for x in inserted(lab, k_zero, layout))
    got, got_scales = inserted(lab, k, layout)
    want[0, : layout.scale_tile // 2] = 0
    want[0, layout.scale_tile // 2] |= 0xF0
    want_scales[0, 0] = 255 if layout.scale_type == "ue8m0" else 0x7F
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_scales, want_scales)
    assert (got_scales[0, 2:] == scales[0, 2:]).all()
    assert (got[0, layout.scale_tile :] == data[0, layout.scale_tile :]).all()


@pytest.mark.parametrize("name", ["DSV41_FP4", "DSV41_FP4_SPLIT", "DSV41_FP8", "DSV41_FP8_SPLIT"])
def test_bfloat16_holds_every_value(lab, rng, name):
    """Random bytes without NaN and extreme scales: values gathered as bfloat16 equal float32 values."""
    layout = getattr(cumla, name)
    tokens = 2 if lab.tiny else 16
    page = rng.integers(0, 256, layout.page_bytes(tokens), np.uint8)
    for token in range(tokens):
        at = layout.scale_start(tokens) + token * layout.scale_stride
        page[at : at + layout.scale_bytes] = rng.integers(90, 126, layout.scale_bytes)
    exact = gathered(lab, page[None], layout, tokens)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(to_float(gathered(lab, page[None], layout, tokens, BF16)), to_float(exact))


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("block_size", [1, 53, 61])
def test_arrangements_hold_the_same_bytes(lab, rng, name, block_size):
    k = rng.standard_normal((2 if lab.tiny else 70, 512)).astype(BF16)
    slots, found = np.arange(len(k)), []
    for layout in (getattr(cumla, name), getattr(cumla, ARRANGEMENTS[name])):
        cache = lab.put(layout.allocate(-(-len(k) // block_size), block_size))
        cumla.quantize_and_insert_k_cache(
            lab.put(k), cache, lab.put(slots), layout=layout, backend=lab.backend,
            **({"min_exponent": -22} if layout.scale_type == "ue8m0" else {}),
        )  # fmt: skip
        table = lab.put(np.arange(len(cache), dtype=np.int32)[None])
        out = lab.put(np.zeros((1, len(k), 512), BF16))
        lens = lab.put(np.array([len(k)], np.int32))
        cumla.dequantize_and_gather_k_cache(out, cache, lens, None, table, layout=layout, backend=lab.backend)
        found.append(to_float(lab.get(out)))
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0][0] - to_float(k)).max() < 1.0


def test_rows_of_both_formats_share_packed_pages(lab, rng):
    """vLLM packs rows of 528 and 288 bytes in blocks whose stride is a multiple of 9,504 bytes."""
    block_size, stride, blocks = 32, 9504 * 3, 3
    pool = lab.put(np.zeros((blocks, stride), np.uint8))
    k = rng.standard_normal((3, 512)).astype(BF16)
    slots, at = lab.put(np.array([0, 40, 95])), block_size * cumla.DSV41_FP8.token_bytes
    window, compressed = pool[:, :at], pool[:, at : at + block_size * cumla.DSV41_FP4.token_bytes]
    for pages, layout in ((window, cumla.DSV41_FP8), (compressed, cumla.DSV41_FP4)):
        cumla.quantize_and_insert_k_cache(lab.put(k), pages, slots, block_size, layout=layout, backend=lab.backend)
    for pages, layout, bound in ((window, cumla.DSV41_FP8, 0.126), (compressed, cumla.DSV41_FP4, 0.7)):
        out = lab.put(np.zeros((1, 96, 512), np.float32))
        table, lens = lab.put(np.arange(3, dtype=np.int32)[None]), lab.put(np.array([96], np.int32))
        cumla.dequantize_and_gather_k_cache(
            out, pages, lens, None, table, block_size, layout=layout, backend=lab.backend
        )
        rows = lab.get(out)[0]
        assert np.abs(rows[[0, 40, 95]] - to_float(k)).max() < bound
        assert not rows[1:40].any()


def poison(window, compressed, name):
    """Write bytes that few caches have. Returns the factor by which results may be larger than usual."""
    token, places = (
        (1, 2),
        {"NaN": (7, 0x7F), "scale NaN": (515, 255), "scale 2^23": (515, 150), "scale 2^-37": (515, 90)},
    )
    if name in places:
        at, byte = places[name]
        window[(*token, at)] = byte
    elif name == "all scales 2^-37":
        window[..., 512:] = 90
    else:
        compressed[0, 1, 260] = {"FP4 scale NaN": 0x7F, "FP4 scale 448": 0x7E}[name]
    return 64.0 if name in ("scale 2^23", "FP4 scale 448") else 1.0


@pytest.mark.attention
@pytest.mark.nowhere(when=lambda x: x.backend == "reference")
@pytest.mark.parametrize(
    "name",
    ["NaN", "scale NaN", "scale 2^23", "scale 2^-37", "all scales 2^-37", "FP4 scale NaN", "FP4 scale 448"],
)
def test_decode_of_values_outside_the_fast_kernel_s_range(lab, rng, name):
    first, second = cumla.DSV41_FP8, cumla.DSV41_FP4
    window, compressed = make_cache(rng, first, 4, 8), make_cache(rng, second, 4, 8)
    size = poison(window, compressed, name)
    listed = np.broadcast_to(np.arange(32, dtype=np.int32), (2, 1, 32)).copy()
    Problem(
        make_q(rng, 2, 1, 5, first), window, listed, layout=first, extra_k_cache=compressed, extra_indices=listed,
    ).check(lab, size=size)  # fmt: skip


@pytest.mark.attention
@pytest.mark.nowhere(when=lambda x: x.backend == "reference")
def test_decode_of_caches_at_any_address(lab, rng):
    """Rows that are no multiple of 16 bytes from an aligned address go to the exact kernel."""
    first, second = cumla.DSV41_FP8, cumla.DSV41_FP4
    q, lists = make_q(rng, 2, 1, 3, first), make_indices(rng, 2, 2, 20, 28)
    caches = [make_cache(rng, layout, 4, 7) for layout in (first, second)]
    given = {"layout": first, "extra_indices": lists[:, 1:], "backend": "reference"}
    want, want_lse = cumla.sparse_mla_decode(q, caches[0], lists[:, :1], extra_k_cache=caches[1], **given)
    moved = []
    for cache in caches:
        memory = lab.put(np.zeros(cache.nbytes + 16, np.uint8))
        moved.append(memory[3 : 3 + cache.nbytes].reshape(cache.shape))
        moved[-1][...] = lab.put(cache)
    given |= {"extra_indices": lab.put(np.ascontiguousarray(lists[:, 1:])), "backend": lab.backend}
    out, lse = cumla.sparse_mla_decode(
        lab.put(q), moved[0], lab.put(np.ascontiguousarray(lists[:, :1])), extra_k_cache=moved[1], **given
    )
    assert_decode(to_float(lab.get(out)), lab.get(lse), to_float(want), want_lse)


@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_caches_are_rearranged(rng, name, block_size):
    """The same rows in both arrangements, there and back, in pages with padding."""
    in_row, split = getattr(cumla, name), getattr(cumla, ARRANGEMENTS[name])
    cache = in_row.allocate(3, block_size, page_stride=9504 * block_size)
    cache[...] = rng.integers(0, 256, cache.shape)
    moved = rearrange(cache, in_row, split)
    assert moved.strides[0] == split.page_bytes(block_size)
    rows = []
    for pages, layout in ((cache, in_row), (moved, split)):
        rows.append(np.zeros((1, 3 * block_size, 512), np.float32))
        table, lens = np.arange(3, dtype=np.int32)[None], np.array([3 * block_size], np.int32)
        cumla.dequantize_and_gather_k_cache(rows[-1], pages, lens, None, table, layout=layout, backend="reference")
    np.testing.assert_array_equal(*rows)
    np.testing.assert_array_equal(rearrange(moved, split, in_row, out=np.zeros_like(cache)), cache)


def test_what_is_no_other_arrangement():
    cache = cumla.DSV41_FP8.allocate(2, 4)
    for target in (cumla.DSV41_FP4, cumla.V32_NOPE_FP8, cumla.DSV4_FP8, cumla.DSV4_BF16):
        with pytest.raises(ValueError, match=f"target: got {target.name}, expected another arrangement of DSV41_FP8"):
            rearrange(cache, cumla.DSV41_FP8, target)
    with pytest.raises(ValueError, match=r"out: got shape \(2, 5, 528\), expected \[2, 4, 528\]"):
        rearrange(cache, cumla.DSV41_FP8, cumla.DSV41_FP8_SPLIT, out=cumla.DSV41_FP8_SPLIT.allocate(2, 5))
    apart = np.zeros((2, 4, 600), np.uint8)[:, :, :528]
    with pytest.raises(ValueError, match="cache: got tokens 600 bytes apart, expected 528"):
        rearrange(cache, cumla.DSV41_FP8, cumla.DSV41_FP8_SPLIT, out=apart)
    with pytest.raises(ValueError, match=r"cache: got uint8 of shape \(2, 4, 584\), expected uint8 \[num_blocks"):
        rearrange(cumla.DSV4_FP8.allocate(2, 4), cumla.DSV41_FP8, cumla.DSV41_FP8_SPLIT)


def test_index_keys(lab, rng):
    """The indexer's operations insert and gather them, and infer the format from 68 bytes per token."""
    layout, k = cumla.INDEXER_MXFP4, rng.standard_normal((5, 128)).astype(BF16)
    slots, table = lab.put(np.array([8, 9, 12, -1, 14])), lab.put(np.array([[2, 3]], np.int32))
    cache = lab.put(layout.allocate(4, 4))
    cumla.indexer_k_quant_and_cache(lab.put(k), cache[:, :, None], slots, 32, backend=lab.backend)
    values, scales = lab.put(np.ones((9, 64), np.uint8)), lab.put(np.ones((9, 4), np.uint8))
    cumla.cp_gather_indexer_k_quant_cache(
        cache, values, scales, table, lab.put(np.array([0, 8], np.int32)), backend=lab.backend
    )
    want, want_scales = inserted(lab, k, layout)
    for row, token in ((0, 0), (1, 1), (4, 2), (6, 4)):
        np.testing.assert_array_equal(lab.get(values)[row], want[token])
        np.testing.assert_array_equal(lab.get(scales)[row], want_scales[token])
    assert not lab.get(values)[[2, 3, 5, 7]].any()  # slots without an insert
    assert (lab.get(values)[8] == 1).all()


def test_index_keys_as_fp8(lab, rng):
    """Any bytes: the values that MXFP4 stores, as e4m3 with one scale; tiles 2^14 below the largest are rounded."""
    layout = cumla.INDEXER_MXFP4
    cache = layout.allocate(1, 40)
    page = cache.reshape(-1)
    page[: 40 * layout.row_bytes] = rng.integers(0, 256, 40 * layout.row_bytes)
    at = layout.scale_start(40)
    scales = page[at : at + 160].reshape(40, 4)
    scales[:] = rng.integers(100, 115, (40, 4))
    scales[30:36] = rng.integers(0, 256, (6, 4))
    scales[36:] = [[255, 3, 9, 0], [0, 0, 1, 0], [255, 255, 255, 255], [254, 240, 239, 0]]
    keys, factors = lab.put(np.ones((41, 128), np.uint8)), lab.put(np.ones(41, np.float32))
    table, starts = lab.put(np.zeros((1, 1), np.int32)), lab.put(np.array([0, 40], np.int32))
    cumla.cp_gather_indexer_k_quant_cache(lab.put(cache), keys, factors, table, starts, backend=lab.backend)
    codes, sizes = page[: 40 * layout.row_bytes].reshape(40, 64), scales.astype(np.float64)
    values = np.stack([codes & 15, codes >> 4], -1).reshape(40, 4, 32).astype(np.uint8)
    values = values.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values = np.where(scales[..., None] == 255, np.nan, values * 2.0 ** (sizes[..., None] - 127)).reshape(40, 128)
    largest = np.where(scales == 255, 0, scales).max(axis=1).astype(int)
    unit = 2.0 ** (np.maximum(largest - 6, 1) - 127)
    np.testing.assert_array_equal(lab.get(factors)[:40], unit.astype(np.float32))
    got = lab.get(keys)[:40]
    want = (values / unit[:, None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(got, np.where(np.isnan(values), 0x7F, want))
    exact = got[:30].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit[:30, None]
    np.testing.assert_array_equal(exact, values[:30])
    assert (lab.get(keys)[40] == 1).all()


def test_index_keys_have_tiles_of_32():
    k, slots = np.zeros((1, 128), BF16), np.zeros(1, np.int64)
    cache = cumla.INDEXER_MXFP4.allocate(1, 2)
    with pytest.raises(ValueError, match="quant_block_size: got 128, expected 32 for a INDEXER_MXFP4 cache"):
        cumla.indexer_k_quant_and_cache(k, cache, slots)
    with pytest.raises(ValueError, match="scale_fmt: got None, but INDEXER_MXFP4 stores scales as powers of two"):
        cumla.indexer_k_quant_and_cache(k, cache, slots, 32, None)
    with pytest.raises(TypeError, match="dst_scale: got dtype float32, expected uint8"):
        cumla.cp_gather_indexer_k_quant_cache(
            cache, np.zeros((1, 64), np.uint8), np.zeros(1, np.float32), np.zeros((1, 1), np.int32),
            np.array([0, 1], np.int32),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "names"),
    [(528, "DSV41_FP8, DSV41_FP8_SPLIT, V32_NOPE_FP8"), (288, "DSV41_FP4, DSV41_FP4_SPLIT")],
)
def test_formats_of_one_size_are_named(width, names):
    k, cache, slots = np.zeros((1, 512), BF16), np.zeros((1, 2, width), np.uint8), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match=f"k_cache: got tokens of {width} bytes, which {names} have; expected layout"):
        cumla.quantize_and_insert_k_cache(k, cache, slots)
    with pytest.raises(ValueError, match=f"k_cache: got tokens of {width} bytes, which {names} have; expected layout"):
        cumla.sparse_mla_decode(np.zeros((1, 1, 8, 512), BF16), cache, np.zeros((1, 1, 4), np.int32))


def test_caches_are_bytes():
    """The message names no dtype that arrays cannot have."""
    q, indices = np.zeros((1, 1, 8, 512), BF16), np.zeros((1, 1, 4), np.int32)
    with pytest.raises(TypeError, match="k_cache: got dtype float32, expected uint8 for a DSV41_FP4 cache"):
        cumla.sparse_mla_decode(q, np.zeros((1, 2, 512), np.float32), indices, layout="DSV41_FP4")


def test_page_strides_of_packed_pools():
    for layout, multiple in ((cumla.DSV41_FP8, 528), (cumla.DSV41_FP4, 288)):
        assert layout.allocate(2, 4, page_stride=9504).strides[0] == 9504
        with pytest.raises(ValueError, match=f"page_stride: got 9505 bytes, expected a multiple of {multiple} for"):
            layout.allocate(2, 4, page_stride=9505)
    assert cumla.DSV41_FP8_SPLIT.page_bytes(5) == 3072
    assert cumla.DSV41_FP4_SPLIT.page_bytes(5) == 1536
    assert cumla.DSV41_FP4.page_bytes(5) == 1440


@pytest.mark.parametrize("wrong", [-127, 1])
def test_floors_out_of_range(wrong):
    cache = cumla.DSV41_FP8.allocate(1, 2)
    with pytest.raises(ValueError, match=f"min_exponent: got {wrong}, expected at"):
        cumla.quantize_and_insert_k_cache(
            np.zeros((1, 512), BF16), cache, np.zeros(1, np.int64), layout="DSV41_FP8", min_exponent=wrong
        )


def test_floors_are_for_powers_of_two():
    k, slots = np.zeros((1, 512), BF16), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="min_exponent: got -13, but scales of DSV41_FP4 are not powers of two"):
        cumla.quantize_and_insert_k_cache(
            k, cumla.DSV41_FP4.allocate(1, 2), slots, layout="DSV41_FP4", min_exponent=-13
        )
