"""Insert into and gather from the FP8 caches: every backend against the reference, byte for byte."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.caches import BLOCK_SIZES, CACHE_GAPS, FP8_LAYOUTS, QUANTIZED_LAYOUTS, pair_of_caches
from support.guarded import Guarded
from support.lab import BF16, Lab, to_float
from support.properties import FLOAT_DTYPES, for_all, fuzzed, numbers, seeds, slots_for

pytestmark = pytest.mark.filterwarnings("error")  # none may reach a user

REFERENCE = Lab("reference", on_device=False)

places = {
    "block_size": st.sampled_from(BLOCK_SIZES),
    "num_blocks": st.integers(1, 3),
    "gap": st.sampled_from(CACHE_GAPS),
    "offset": st.sampled_from((0, 0, 1, 8)),
    "seed": seeds,
}


def is_rare(x):
    """Layouts that only slow tests emulate and simulate."""
    return (x.emulated or x.simulated) and x.get("layout").name in ("DSV41_FP8_SPLIT", "DSV41_FP4", "V32_NOPE_FP8")


def layouts(*choices):
    return pytest.mark.parametrize("layout", choices, ids=lambda layout: layout.name)


# Insert


@layouts(*QUANTIZED_LAYOUTS)
@pytest.mark.thorough(when=is_rare)
def test_insert(lab, layout):
    @for_all(
        lab,
        dtype=st.sampled_from(FLOAT_DTYPES),
        slot_dtype=st.sampled_from((np.int64, np.int32)),
        tokens=st.integers(0, 4 if lab.tiny else 40),
        spare=st.integers(0, 3),
        k_gap=st.sampled_from((0, 1, 8, 64)),
        nonfinite=st.booleans(),
        powers_of_two=st.just(True) if layout.scale_type == "ue8m0" else st.booleans(),
        **places,
    )
    def check(
        dtype, slot_dtype, tokens, spare, k_gap, nonfinite, powers_of_two, block_size, num_blocks, gap, offset, seed
    ):
        rng = np.random.default_rng(seed)
        k = numbers(rng, (tokens + spare, layout.head_dim), dtype, nonfinite)
        slots = slots_for(rng, tokens, num_blocks * block_size, slot_dtype)
        caches = pair_of_caches(lab, REFERENCE, rng, layout, num_blocks, block_size, gap, offset)
        for place, cache in zip((lab, REFERENCE), caches, strict=True):
            rows = Guarded(place, k, (0, k_gap * k.itemsize))
            before = rows.everything()
            cumla.quantize_and_insert_k_cache(
                rows.array, cache.array, place.put(slots), block_size, powers_of_two, layout=layout,
                backend=place.backend,
            )  # fmt: skip
            np.testing.assert_array_equal(rows.everything(), before)
        np.testing.assert_array_equal(caches[0].everything(), caches[1].everything())


@layouts(*QUANTIZED_LAYOUTS)
@pytest.mark.thorough(when=is_rare)
def test_pages_of_one_token_may_be_parts_of_larger_ones(lab, rng, layout):
    """The distance to the next row does not matter if a page has one row."""
    k, slots = rng.standard_normal((3, layout.head_dim)).astype(BF16), np.array([4, 0, 2])
    content = np.zeros((5, 3 * layout.token_bytes), np.uint8)
    caches = []
    for place in (lab, REFERENCE):
        pages = place.put(content.copy())
        shape, strides = (5, 1, layout.token_bytes), (3 * layout.token_bytes, 2 * layout.token_bytes, 1)
        if isinstance(pages, np.ndarray):
            cache = np.lib.stride_tricks.as_strided(pages, shape, strides)
        else:
            cache = type(pages)(shape, pages.dtype, pages.data, strides)
        cumla.quantize_and_insert_k_cache(
            place.put(k), cache, place.put(slots), 1, layout=layout, backend=place.backend
        )  # fmt: skip
        caches.append(place.get(pages))
    np.testing.assert_array_equal(*caches)
    assert caches[0][slots, : layout.row_bytes].any(axis=1).all()
    assert not caches[0][:, layout.token_bytes :].any()


@layouts(*QUANTIZED_LAYOUTS)
@pytest.mark.thorough(when=is_rare)
def test_insert_writes_the_bytes_of_its_slots_and_no_other(lab, rng, layout):
    block_size, slots = 3, np.array([4, -1, 6, 99])
    used = layout.allocate(3, block_size).reshape(3, -1)
    for slot in (4, 6):
        page, row = divmod(slot, block_size)
        used[page, row * layout.row_bytes : (row + 1) * layout.row_bytes] = 1
        scales = layout.scale_start(block_size) + row * layout.scale_stride
        used[page, scales : scales + layout.scale_bytes] = 1
    k = numbers(rng, (4, layout.head_dim), BF16)
    written = np.zeros_like(used)
    for filler in (0x00, 0xFF):
        memory = Guarded(lab, np.full(used.shape, filler, np.uint8), (0, 7))
        cumla.quantize_and_insert_k_cache(
            lab.put(k), memory.array, lab.put(slots), block_size, layout=layout, backend=lab.backend
        )
        memory.assert_margins()
        written |= memory.get() != filler
    np.testing.assert_array_equal(written, used)


def inserted(lab, k, layout, powers_of_two=True):
    """A cache of one page with the rows of k, on the host: its rows, scales as float32, and 16-bit values."""
    cache = lab.put(layout.allocate(1, len(k)))
    cumla.quantize_and_insert_k_cache(
        lab.put(k), cache, lab.put(np.arange(len(k))), len(k), powers_of_two, layout=layout, backend=lab.backend
    )
    page = np.ascontiguousarray(lab.get(cache)).reshape(-1)
    rows = page[: len(k) * layout.row_bytes].reshape(len(k), layout.row_bytes)
    at = layout.scale_start(len(k)) + layout.scale_stride * np.arange(len(k))
    scales = page[at[:, None] + np.arange(layout.scale_bytes)]
    if layout.scale_type == "ue8m0":
        scales = np.ldexp(np.float32(1), scales[:, : layout.num_scales].astype(np.int32) - 127)
    elif layout.scale_type == "e4m3":
        scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        scales = scales.view(np.float32)
    rope = np.ascontiguousarray(rows[:, layout.rope_offset :]).view(BF16)
    return rows[:, : layout.quantized_bytes], scales, to_float(rope)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(
    ("layout", "powers_of_two"),
    [(layout, True) for layout in FP8_LAYOUTS] + [(cumla.V32_FP8, False), (cumla.INDEXER_FP8, False)],
    ids=lambda x: x.name if isinstance(x, cumla.CacheLayout) else "pow2" if x else "any",
)
def test_nonfinite_values_change_nothing_but_their_own_bytes(lab, rng, layout, powers_of_two, dtype):
    k = rng.standard_normal((1, layout.head_dim)).astype(dtype)
    places = rng.permutation(layout.head_dim)[: 3 * layout.head_dim // 16].reshape(3, -1)
    poked = k.copy()
    for where, value in zip(places, (np.nan, np.inf, -np.inf), strict=True):
        k[0, where] = 0  # not produced by any scale
        poked[0, where] = value
    rows, scales, rope = inserted(lab, k, layout, powers_of_two)
    got_rows, got_scales, got_rope = inserted(lab, poked, layout, powers_of_two)
    np.testing.assert_array_equal(got_scales, scales)
    for where, byte, value in zip(places, (0x7F, 0x7E, 0xFE), (np.nan, np.inf, -np.inf), strict=True):
        rows[0, where[where < layout.quantized_dim]] = byte
        rope[0, where[where >= layout.quantized_dim] - layout.quantized_dim] = value
    np.testing.assert_array_equal(got_rows, rows)
    np.testing.assert_array_equal(got_rope, rope)


@layouts(*FP8_LAYOUTS)
def test_tiles_without_finite_values(lab, layout):
    """A tile of only NaN, infinities or zeros has the smallest scale."""
    k = np.zeros((3, layout.head_dim), np.float32)
    k[1], k[2] = np.nan, np.inf
    rows, scales, rope = inserted(lab, k, layout)
    assert (scales == np.float32(2.0**layout.min_exponent)).all()
    assert (rows == np.array([[0], [0x7F], [0x7E]])).all()
    np.testing.assert_array_equal(rope, np.broadcast_to(np.array([[0], [np.nan], [np.inf]]), rope.shape))


@pytest.mark.parametrize("powers_of_two", [True, False], ids=["pow2", "any"])
def test_every_bfloat16_value_by_itself(lab, powers_of_two):
    """A tile whose other value is 448 has scale 1 (if 448 is the larger), and rounds like ml_dtypes."""
    layout = cumla.INDEXER_FP8
    values = np.arange(65536, dtype=np.uint16).view(BF16)
    values = values[~(np.abs(to_float(values)) > 448) | np.isinf(to_float(values))]  # NaN and infinities too
    if lab.tiny:
        values = values[::251]
    k = np.zeros((-(-len(values) // 127), 128), BF16)
    k[:, 0] = 448
    k[:, 1:].flat[: len(values)] = values
    rows, scales, _ = inserted(lab, k, layout, powers_of_two)
    assert (scales == 1).all()
    with np.errstate(invalid="ignore"):
        want = np.clip(to_float(k), -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(rows, np.where(np.isnan(to_float(k)), 0x7F, want))


@pytest.mark.parametrize("floor", [False, True], ids=["all", "floor"])
@layouts(*FP8_LAYOUTS)
def test_scales(lab, layout, floor):
    """The rule for scales, for amax around every power of two and every boundary of 448."""
    exponents = np.arange(-40, -8) if floor else np.arange(-12, 120, 8 if lab.tiny else 1)
    bases = np.ldexp(np.array([1.0, 1.75]), exponents[:, None]).astype(np.float32).ravel()
    amax = np.concatenate([bases, np.nextafter(bases, np.float32(0)), np.nextafter(bases, np.float32(np.inf))])
    amax = amax[:: 8 if lab.tiny else 1]
    tiles = layout.num_scales
    k = np.zeros((-(-len(amax) // tiles), layout.head_dim), np.float32)
    firsts = k[:, : layout.quantized_dim].reshape(len(k), tiles, layout.scale_tile)[:, :, 3]
    padded = np.resize(amax, firsts.shape)
    for token in range(len(k)):
        k[token, 3 : layout.quantized_dim : layout.scale_tile] = padded[token]
    _, scales, _ = inserted(lab, k, layout)
    want = np.maximum(2.0 ** np.ceil(np.log2(padded.astype(np.float64) / 448)), 2.0**layout.min_exponent)
    np.testing.assert_array_equal(scales, want)
    if layout.scale_type == "float32":
        _, scales, _ = inserted(lab, k, layout, powers_of_two=False)
        np.testing.assert_array_equal(scales, np.maximum(padded / np.float32(448), np.float32(layout.min_scale)))


# Gather


def gather_lengths(rng, requests, longest):
    return fuzzed(rng, requests, longest + 3)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@layouts(*QUANTIZED_LAYOUTS, cumla.MLA_BF16)
@pytest.mark.thorough(when=is_rare)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("dtype") is np.float16)  # a program each
def test_gather(lab, layout, dtype):
    @for_all(
        lab,
        examples=12,
        tiny_examples=2,
        requests=st.integers(1, 2 if lab.tiny else 4),
        rows=st.integers(0, 3 if lab.tiny else 20),
        first_row=st.integers(0, 4),
        gathers=st.booleans(),
        out_gaps=st.sampled_from(((0, 0, 0), (0, 1, 3), (0, 16, 0), (0, 0, 8))),
        narrowed=st.booleans(),
        ratio=st.sampled_from((1, 4, 128)),
        **places,
    )
    def check(requests, rows, first_row, gathers, out_gaps, narrowed, ratio, block_size, num_blocks, gap, offset, seed):
        rng = np.random.default_rng(seed)
        columns = -(-max(rows, 1) // block_size) + 1
        table = fuzzed(rng, (requests, columns + 2), num_blocks)
        seq_lens = gather_lengths(rng, requests, rows)
        if ratio > 1:  # rows that are complete, and some positions more
            seq_lens = (np.clip(seq_lens, 0, (2**31 - 1) // ratio - 1) * ratio + rng.integers(ratio)).astype(np.int32)
        gather_lens = gather_lengths(rng, requests, rows) if gathers else None
        before = rng.standard_normal((requests, first_row + rows, layout.head_dim)).astype(dtype)
        caches = pair_of_caches(lab, REFERENCE, rng, layout, num_blocks, block_size, gap, offset)
        results = []
        for place, cache in zip((lab, REFERENCE), caches, strict=True):
            out = Guarded(place, before, tuple(x * before.itemsize for x in out_gaps))
            block_table = place.put(table)[:, :columns] if narrowed else place.put(table[:, :columns].copy())
            cumla.dequantize_and_gather_k_cache(
                out.array, cache.array, place.put(seq_lens), place.put(gather_lens), block_table, block_size,
                first_row, compress_ratio=ratio, layout=layout, backend=place.backend,
            )  # fmt: skip
            out.assert_margins()
            results.append(out.get())
        np.testing.assert_array_equal(to_float(results[0]), to_float(results[1]))
        np.testing.assert_array_equal(results[0][:, :first_row], before[:, :first_row])


def test_gather_rounds_once(lab, rng):
    """The value that the docstring defines, from the bytes."""
    layout = cumla.V32_FP8
    cache = rng.integers(0, 256, layout.allocate(1, 2).shape, np.uint8)
    scales = rng.standard_normal(4).astype(np.float32)
    cache[0, :, 512:528] = scales.view(np.uint8)
    codes = cache[0, :, :512].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    product = codes * np.repeat(scales, 128)
    for dtype in FLOAT_DTYPES:
        out = lab.put(np.zeros((1, 2, 576), dtype))
        table, lens = lab.put(np.zeros((1, 1), np.int32)), lab.put(np.array([2], np.int32))
        cumla.dequantize_and_gather_k_cache(
            out, lab.put(cache), lens, None, table, 2, 0, layout=layout, backend=lab.backend
        )
        np.testing.assert_array_equal(to_float(lab.get(out)[0, :, :512]), to_float(product.astype(dtype)))


FLOAT32_VALUES = np.array([1.5, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40], np.float32)  # 3.4e38 becomes infinite


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@layouts(cumla.DSV4_F32, cumla.MLA_F32, cumla.INDEXER_F32)
def test_gather_of_float32_rows_rounds_to_nearest_even(lab, rng, layout, dtype):
    """Includes numbers above, below and at the middle of two bfloat16 neighbours; devices refuse such rows."""
    bits = rng.integers(0, 0x7F00, (2, 3, layout.head_dim), np.uint32) << 16
    cache = (bits | rng.choice(np.array([0x7FFF, 0x8000, 0x8001, 0], np.uint32), bits.shape)).view(np.float32)
    cache[1, 0, : len(FLOAT32_VALUES)] = FLOAT32_VALUES
    out = lab.put(np.zeros((1, 5, layout.head_dim), dtype))
    given = lab.put(np.array([5], np.int32)), None, lab.put(np.array([[1, 0]], np.int32))
    options = {"layout": layout, "backend": lab.backend}
    if lab.backend in ("numba_cuda", "cuda"):
        with pytest.raises(ValueError, match="layout: got float32 for a device's kernels"):
            cumla.dequantize_and_gather_k_cache(out, lab.put(cache), *given, **options)
        return
    cumla.dequantize_and_gather_k_cache(out, cache, *given, **options)
    with np.errstate(over="ignore"):
        want = cache[[1, 0]].reshape(1, 6, -1)[:, :5].astype(dtype)
    np.testing.assert_array_equal(to_float(out), to_float(want))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_gather_reads_every_code_at_every_scale(lab, dtype):
    layout = cumla.DSV4_FP8
    exponents = np.arange(0, 256, 37 if lab.tiny else 1)  # four tiles of 64 codes have one of them each
    page = np.zeros((1, len(exponents), 584), np.uint8).reshape(1, -1)
    rows = page[0, : 576 * len(exponents)].reshape(-1, 576)
    rows[:, :256] = np.arange(256)
    page[0, 576 * len(exponents) :].reshape(-1, 8)[:, :7] = exponents[:, None]
    out = lab.put(np.zeros((1, len(exponents), 512), dtype))
    table, lens = lab.put(np.zeros((1, 1), np.int32)), lab.put(np.array([len(exponents)], np.int32))
    cumla.dequantize_and_gather_k_cache(
        out, lab.put(page), lens, None, table, len(exponents), 0, layout=layout, backend=lab.backend
    )
    scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
    codes = to_float(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))
    with np.errstate(all="ignore"):
        want = (codes * scales[:, None]).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(to_float(lab.get(out)[0, :, :256]), to_float(want))


# The indexer's keys


def test_indexer_insert_is_quantize_and_insert(lab, rng):
    k = numbers(rng, (5, 128), BF16)
    slots = np.array([3, -1, 0, 7, 2])
    for scale_fmt in ("ue8m0", None):
        caches = [lab.put(cumla.INDEXER_FP8.allocate(2, 4)) for _ in range(2)]
        cumla.indexer_k_quant_and_cache(
            lab.put(k), caches[0][:, :, None], lab.put(slots), 128, scale_fmt, backend=lab.backend
        )
        cumla.quantize_and_insert_k_cache(
            lab.put(k), caches[1], lab.put(slots), 4, scale_fmt == "ue8m0", layout=cumla.INDEXER_FP8,
            backend=lab.backend,
        )  # fmt: skip
        np.testing.assert_array_equal(*(lab.get(cache) for cache in caches))


def cumulative(rng, requests, longest):
    return np.concatenate([[0], np.cumsum(rng.integers(0, longest + 1, requests))]).astype(np.int32)


@pytest.mark.parametrize("scales_as", ["bytes", "vector", "column"])
def test_indexer_gather(lab, scales_as):
    @for_all(
        lab,
        requests=st.integers(0, 2 if lab.tiny else 5),
        longest=st.integers(0, 3 if lab.tiny else 9),
        spare=st.integers(-2, 3),
        k_gap=st.sampled_from((0, 1, 16)),
        **places,
    )
    def check(requests, longest, spare, k_gap, block_size, num_blocks, gap, offset, seed):
        rng = np.random.default_rng(seed)
        layout = cumla.INDEXER_FP8
        starts = cumulative(rng, requests, longest)
        rows = max(int(starts[-1]) + spare, 0)
        table = fuzzed(rng, (requests + 1, -(-longest // block_size) + 1), num_blocks)
        caches = pair_of_caches(lab, REFERENCE, rng, layout, num_blocks, block_size, gap, offset)
        results = []
        for place, cache in zip((lab, REFERENCE), caches, strict=True):
            dst_k = Guarded(place, np.full((rows, 128), 7, np.uint8), (0, k_gap))
            shape = {"bytes": (rows, 4), "vector": (rows,), "column": (rows, 1)}[scales_as]
            dtype = np.uint8 if scales_as == "bytes" else np.float32
            scale_gaps = {"bytes": (0, k_gap), "vector": (0,), "column": (0, 4 * k_gap)}[scales_as]
            dst_scale = Guarded(place, np.full(shape, 7, dtype), scale_gaps)
            cumla.cp_gather_indexer_k_quant_cache(
                cache.array, dst_k.array, dst_scale.array, place.put(table), place.put(starts),
                backend=place.backend,
            )  # fmt: skip
            dst_k.assert_margins()
            dst_scale.assert_margins()
            results.append((dst_k.get().copy(), dst_scale.get().copy().view(np.uint8)))
        for got, want in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)


def test_indexer_gather_gives_back_what_was_inserted(lab, rng):
    layout, block_size = cumla.INDEXER_FP8, 4
    k = rng.standard_normal((7, 128)).astype(np.float32)
    cache = lab.put(layout.allocate(4, block_size))
    table = np.array([[2, -1], [3, 0]], np.int32)
    slots = np.array([8, 9, 12, 13, 14, 15, 0])  # two tokens of request 0, five of request 1
    cumla.indexer_k_quant_and_cache(lab.put(k), cache, lab.put(slots), backend=lab.backend)
    dst_k, dst_scale = lab.put(np.zeros((9, 128), np.uint8)), lab.put(np.zeros(9, np.float32))
    cumla.cp_gather_indexer_k_quant_cache(
        cache, dst_k, dst_scale, lab.put(table), lab.put(np.array([0, 2, 7], np.int32)), backend=lab.backend
    )
    values = to_float(lab.get(dst_k).view(ml_dtypes.float8_e4m3fn)) * lab.get(dst_scale)[:, None]
    np.testing.assert_allclose(values[:7], k, rtol=2**-3, atol=2**-6)
    assert not values[7:].any()
