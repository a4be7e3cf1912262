"""Insert into and gather from the dense MLA caches: every backend against the reference."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from cumla.layout import plain_rows
from support.caches import BLOCK_SIZES, CACHE_GAPS, pair_of_caches
from support.guarded import Guarded
from support.lab import BF16, Lab, to_float
from support.properties import FLOAT_DTYPES, INT32_MAX, INT32_MIN, for_all, fuzzed, numbers, seeds, slots_for

pytestmark = pytest.mark.filterwarnings("error")

REFERENCE = Lab("reference", on_device=False)
E4M3 = ml_dtypes.float8_e4m3fn
FORMATS = {
    "bfloat16": plain_rows(576, "bfloat16"),
    "float16": plain_rows(576, "float16"),
    "fp8": plain_rows(576, "e4m3"),
    "fp8_ds_mla": cumla.V32_FP8,
}
places = {
    "block_size": st.sampled_from(BLOCK_SIZES),
    "num_blocks": st.integers(1, 3),
    "gap": st.sampled_from(CACHE_GAPS),
    "seed": seeds,
}


def typed(cache, format_name):
    """A GuardedCache as a caller's array of values."""
    dtype = {"bfloat16": BF16, "float16": np.float16}.get(format_name)
    if dtype is None:
        return cache.array
    if isinstance(cache.array, np.ndarray):
        return np.ndarray((*cache.array.shape[:2], 576), dtype, cache.memory._raw.data, cache.memory._start,
                          (cache.array.strides[0], 1152, 2))  # fmt: skip
    return type(cache.array)((*cache.array.shape[:2], 576), dtype, cache.array.data, (cache.array.strides[0], 1152, 2))


@pytest.mark.parametrize("format_name", FORMATS)
def test_concat(lab, format_name):
    layout = FORMATS[format_name]
    sixteen_bit = format_name in ("bfloat16", "float16")

    @for_all(
        lab,
        dtype=st.sampled_from(FLOAT_DTYPES),
        slot_dtype=st.sampled_from((np.int64, np.int32)),
        tokens=st.integers(0, 3 if lab.tiny else 30),
        spare=st.integers(0, 2),
        kv_gap=st.sampled_from((0, 64, 1)),
        pe_gap=st.sampled_from((0, 512, 1)),
        nonfinite=st.booleans(),
        scale=st.sampled_from((None, 1, 0.37, np.float32(1e-3), "array", "scalar array")),
        offset=st.sampled_from((0, 0, 2, 8) if sixteen_bit else (0, 1, 8)),
        **places,
    )
    def check(
        dtype, slot_dtype, tokens, spare, kv_gap, pe_gap, nonfinite, scale, offset, block_size, num_blocks, gap, seed
    ):
        rng = np.random.default_rng(seed)
        if sixteen_bit:
            gap *= 2
        kv_c = numbers(rng, (tokens + spare, 512), dtype, nonfinite)
        k_pe = numbers(rng, (tokens + spare, 64), dtype, nonfinite)
        slots = slots_for(rng, tokens, num_blocks * block_size, slot_dtype)
        caches = pair_of_caches(lab, REFERENCE, rng, layout, num_blocks, block_size, gap, offset)
        for place, cache in zip((lab, REFERENCE), caches, strict=True):
            given = scale
            if isinstance(scale, str):
                given = place.put(np.full((1,) if scale == "array" else (), 0.7, np.float32))
            cumla.concat_and_cache_mla(
                Guarded(place, kv_c, (0, kv_gap * kv_c.itemsize)).array,
                Guarded(place, k_pe, (0, pe_gap * k_pe.itemsize)).array[:, None],
                typed(cache, format_name), place.put(slots), "auto" if sixteen_bit else format_name, given,
                backend=place.backend,
            )  # fmt: skip
        np.testing.assert_array_equal(caches[0].everything(), caches[1].everything())


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=lambda dtype: np.dtype(dtype).name)
def test_values_of_the_caches_type_keep_their_bits(lab, dtype):
    bits = np.arange(65536, dtype=np.uint16)[:: 501 if lab.tiny else 1]
    rows = np.resize(bits, (-(-len(bits) // 576), 576)).view(dtype)
    cache = lab.put(np.zeros((1, len(rows), 576), dtype))
    cumla.concat_and_cache_mla(
        lab.put(rows)[:, :512], lab.put(rows)[:, 512:], cache, lab.put(np.arange(len(rows))), backend=lab.backend
    )
    np.testing.assert_array_equal(lab.get(cache)[0].view(np.uint16), rows.view(np.uint16))


def test_bytes_of_a_bfloat16_cache(lab, rng):
    rows = rng.standard_normal((3, 576)).astype(BF16)
    cache = lab.put(cumla.MLA_BF16.allocate(2, 2))
    cumla.concat_and_cache_mla(
        lab.put(rows)[:, :512], lab.put(rows)[:, 512:], cache, lab.put(np.arange(3)), backend=lab.backend
    )
    np.testing.assert_array_equal(lab.get(cache).reshape(4, 1152)[:3].view(BF16), rows)


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=lambda dtype: np.dtype(dtype).name)
def test_every_16_bit_value_in_fp8(lab, dtype, scale):
    """All patterns, subnormals, infinities and NaN of both signs, against ml_dtypes."""
    bits = np.arange(65536, dtype=np.uint16)[:: 501 if lab.tiny else 1]
    rows = np.resize(bits, (-(-len(bits) // 576), 576)).view(dtype)
    cache = lab.put(np.zeros((1, len(rows), 576), np.uint8))
    cumla.concat_and_cache_mla(
        lab.put(rows)[:, :512], lab.put(rows)[:, 512:], cache, lab.put(np.arange(len(rows))), "fp8", scale,
        backend=lab.backend,
    )  # fmt: skip
    with np.errstate(invalid="ignore", over="ignore"):
        quotients = to_float(rows).astype(np.float32) / np.float32(scale)
        want = np.clip(quotients, -448, 448).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(lab.get(cache)[0], np.where(np.isnan(quotients), 0x7F, want))


def test_nonfinite_values_change_nothing_but_their_own_bytes(lab, rng):
    rows = rng.standard_normal((1, 576)).astype(np.float32)
    poked = rows.copy()
    where = rng.permutation(576)[:30].reshape(3, 10)
    for places_of, value in zip(where, (np.nan, np.inf, -np.inf), strict=True):
        poked[0, places_of] = value
    for kv_cache_dtype, itemsize in (("auto", 2), ("fp8", 1)):
        caches = []
        for values in (rows, poked):
            cache = lab.put(np.zeros((1, 1, 576), BF16 if itemsize == 2 else np.uint8))
            cumla.concat_and_cache_mla(
                lab.put(values)[:, :512], lab.put(values)[:, 512:], cache, lab.put(np.zeros(1, np.int64)),
                kv_cache_dtype, backend=lab.backend,
            )  # fmt: skip
            caches.append(lab.get(cache)[0, 0].copy())
        clean, got = (to_float(cache if itemsize == 2 else cache.view(E4M3)) for cache in caches)
        for places_of, value in zip(where, (np.nan, np.inf, -np.inf), strict=True):
            clean[places_of] = value if itemsize == 2 else np.clip(value, -448, 448)
        np.testing.assert_array_equal(got, clean)


def gather_arguments(rng, requests, longest, block_size, num_blocks, with_starts):
    lengths = rng.integers(0, longest + 1, requests)
    cu_seq_lens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = fuzzed(rng, (requests + 1, -(-2 * longest // block_size) + 1), num_blocks)
    starts = None
    if with_starts:
        starts = rng.integers(0, longest + 1, requests + 1).astype(np.int32)
        wrong = rng.random(requests + 1) < 0.1
        starts[wrong] = rng.choice([-1, INT32_MIN, INT32_MAX], wrong.sum())
    return cu_seq_lens, table, starts


@pytest.mark.parametrize("dtype", [np.uint8, BF16, np.float16], ids=lambda dtype: np.dtype(dtype).name)
def test_gather_copies_bits(lab, dtype):
    @for_all(
        lab,
        width=st.sampled_from((576, 512, 7, 1)),
        requests=st.integers(0, 2 if lab.tiny else 5),
        longest=st.integers(0, 3 if lab.tiny else 9),
        spare=st.integers(-2, 3),
        dst_gap=st.sampled_from((0, 1, 16)),
        with_starts=st.booleans(),
        **places,
    )
    def check(width, requests, longest, spare, dst_gap, with_starts, block_size, num_blocks, gap, seed):
        rng = np.random.default_rng(seed)
        itemsize = np.dtype(dtype).itemsize
        cu_seq_lens, table, starts = gather_arguments(rng, requests, longest, block_size, num_blocks, with_starts)
        content = rng.integers(0, 256, (num_blocks, block_size, width * itemsize), np.uint8).view(dtype)
        before = np.full((max(int(cu_seq_lens[-1]) + spare, 0), width), 3, np.uint8).astype(dtype)
        results = []
        for place in (lab, REFERENCE):
            cache = Guarded(place, content, (0, 0, gap * itemsize), itemsize * (seed % 3))
            dst = Guarded(place, before, (0, dst_gap * itemsize))
            cumla.gather_cache(
                cache.array, dst.array, place.put(table), place.put(cu_seq_lens), requests, place.put(starts),
                backend=place.backend,
            )  # fmt: skip
            results.append(dst.everything())
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_gather_dequantizes(lab, dtype):
    @for_all(
        lab,
        tiny_examples=2,
        width=st.sampled_from((576, 576, 7)),
        requests=st.integers(0, 2 if lab.tiny else 5),
        longest=st.integers(0, 3 if lab.tiny else 9),
        spare=st.integers(-2, 3),
        dst_gap=st.sampled_from((0, 1, 8)),
        with_starts=st.booleans(),
        scale=st.sampled_from((None, 2.5, 1e-30, 1e30, "array")),
        **places,
    )
    def check(width, requests, longest, spare, dst_gap, with_starts, scale, block_size, num_blocks, gap, seed):
        rng = np.random.default_rng(seed)
        cu_seq_lens, table, starts = gather_arguments(rng, requests, longest, block_size, num_blocks, with_starts)
        content = rng.integers(0, 256, (num_blocks, block_size, width), np.uint8)
        before = rng.standard_normal((max(int(cu_seq_lens[-1]) + spare, 0), width)).astype(dtype)
        results = []
        for place in (lab, REFERENCE):
            cache = Guarded(place, content, (0, 0, gap), seed % 3)
            dst = Guarded(place, before, (0, dst_gap * before.itemsize))
            cumla.gather_cache(
                cache.array, dst.array, place.put(table), place.put(cu_seq_lens), requests, place.put(starts),
                scale=place.put(np.array([0.3], np.float32)) if scale == "array" else scale, backend=place.backend,
            )  # fmt: skip
            dst.assert_margins()
            results.append(to_float(dst.get()))
        np.testing.assert_array_equal(*results)


def test_gather_dequantizes_every_code(lab):
    codes = np.arange(256, dtype=np.uint8)
    for dtype in FLOAT_DTYPES:
        for scale in (1.0, np.float32(1 / 3)):
            dst = lab.put(np.zeros((1, 256), dtype))
            cumla.gather_cache(
                lab.put(codes.reshape(1, 1, 256)), dst, lab.put(np.zeros((1, 1), np.int32)),
                lab.put(np.array([0, 1], np.int32)), 1, scale=scale, backend=lab.backend,
            )  # fmt: skip
            with np.errstate(over="ignore"):
                want = (codes.view(E4M3).astype(np.float32) * np.float32(scale)).astype(dtype)
            np.testing.assert_array_equal(to_float(lab.get(dst)[0]), to_float(want))


def test_gather_in_chunks(lab, rng):
    """A chunked prefill's reads of its context: ragged chunks, some requests without tokens in a chunk."""
    block_size, width, chunk = 4, 8, 3  # chunks that pages do not divide
    lengths, requests = np.array([7, 0, 4], np.int32), 3
    content = rng.standard_normal((6, block_size, width)).astype(BF16)
    table = np.array([[5, 1], [-1, -1], [2, 0]], np.int32)
    rows = [content[table[r]].reshape(-1, width)[:n] for r, n in enumerate(lengths)]
    workspace = lab.put(np.zeros((12, width), BF16))
    for start in range(0, 9, chunk):
        shares = np.clip(lengths - start, 0, chunk)
        cu_seq_lens = np.concatenate([[0], np.cumsum(shares)]).astype(np.int32)
        starts = lab.xp.broadcast_to(lab.put(np.array([start], np.int32)), (requests,))  # a stride of 0
        cumla.gather_cache(
            lab.put(content), workspace, lab.put(table), lab.put(cu_seq_lens), requests, starts, backend=lab.backend
        )
        want = np.concatenate([rows[r][start : start + chunk] for r in range(requests)])
        np.testing.assert_array_equal(to_float(lab.get(workspace)[: len(want)]), to_float(want))


def test_gather_gives_back_what_was_inserted(lab, rng):
    block_size = 4
    rows = rng.standard_normal((6, 576)).astype(np.float16)
    cache = lab.put(np.zeros((3, block_size, 576), np.float16))
    table, slots = np.array([[2, 0]], np.int32), np.array([8, 9, 10, 11, 0, 1])
    cumla.concat_and_cache_mla(
        lab.put(rows)[:, :512], lab.put(rows)[:, 512:], cache, lab.put(slots), backend=lab.backend
    )
    dst = lab.put(np.zeros((6, 576), np.float16))
    cumla.gather_cache(cache, dst, lab.put(table), lab.put(np.array([0, 6], np.int32)), 1, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(dst), rows)
