"""Copies of whole pages."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from support.guarded import Guarded
from support.lab import BF16, Lab
from support.properties import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, for_all, seeds

pytestmark = pytest.mark.filterwarnings("error")

REFERENCE = Lab("reference", on_device=False)
PAGES = (((4, 584), np.uint8), ((3, 576), BF16), ((7,), np.uint8), ((2, 5), np.float32), ((1,), np.int64))


def pairs_of(rng, count, num_src, num_dst, dtype, same):
    """Pairs that write no page twice and read none that is written, and some that are out of range."""
    sources = rng.integers(0, num_src, count)
    destinations = np.resize(rng.permutation(num_dst), count)
    if same:
        half = num_src // 2
        sources, destinations = rng.integers(0, max(half, 1), count), half + np.arange(count) % max(num_src - half, 1)
    keep = min(count, num_dst - (num_src // 2 if same else 0))
    pairs = np.stack([sources, destinations], axis=1)[:keep]
    info = np.iinfo(dtype)
    wrong = [(-1, info.min, info.max, num, INT32_MAX, INT32_MIN) for num in (num_src, num_dst)]
    for pair in pairs:
        if rng.random() < 0.25:
            side = rng.integers(2)
            pair[side] = rng.choice(wrong[side])
    return pairs.astype(dtype)


@pytest.mark.parametrize("operation", ["swap", "copy"])
def test_pages(lab, operation):
    @for_all(
        lab,
        page=st.sampled_from(PAGES),
        num_src=st.integers(1, 6),
        num_dst=st.integers(1, 6),
        count=st.integers(0, 6),
        gap=st.sampled_from((0, 1, 16, 100)),
        offset=st.sampled_from((0, 0, 1, 8)),
        pair_dtype=st.sampled_from((np.int64, np.int32)),
        seed=seeds,
    )
    def check(page, num_src, num_dst, count, gap, offset, pair_dtype, seed):
        rng = np.random.default_rng(seed)
        if operation == "copy":
            num_dst = num_src
        shape, dtype = page
        itemsize = np.dtype(dtype).itemsize
        gaps = (0,) * len(shape) + (gap * itemsize,)
        row = (*shape[:-1], shape[-1] * itemsize)
        content = [rng.integers(0, 256, (n, *row), np.uint8).view(dtype) for n in (num_src, num_dst)]
        pairs = pairs_of(rng, count, num_src, num_dst, pair_dtype, operation == "copy")
        results = []
        for place in (lab, REFERENCE):
            src, dst = (Guarded(place, array, gaps, offset * itemsize) for array in content)
            if operation == "swap":
                cumla.swap_blocks(src.array, dst.array, place.put(pairs), backend=place.backend)
            else:
                cumla.copy_blocks([src.array, src.array[:, :1]], place.put(pairs), backend=place.backend)
            results.append((src.everything(), dst.everything()))
        for got, want in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)


def test_swap_copies_only_what_is_asked_for(lab, rng):
    src = rng.integers(0, 256, (5, 3, 8), np.uint8)
    dst = rng.integers(0, 256, (4, 3, 8), np.uint8)
    pairs = np.array([[4, 0], [1, 3], [2, -1], [5, 1], [INT64_MAX, INT64_MIN]])
    there = lab.put(dst.copy())
    cumla.swap_blocks(lab.put(src), there, lab.put(pairs), backend=lab.backend)
    want = dst.copy()
    want[0], want[3] = src[4], src[1]
    np.testing.assert_array_equal(lab.get(there), want)


def test_copy_goes_through_every_cache(lab, rng):
    """Layers of different formats, one of them in pages of a packed pool."""
    pool = rng.integers(0, 256, (6, 2000), np.uint8)
    caches = [
        cumla.DSV4_FP8.view(pool[:, :1728], 2),
        rng.standard_normal((6, 4, 576)).astype(BF16),
        rng.standard_normal((6, 3)).astype(np.float32),
    ]
    there = [lab.put(cache) for cache in caches]
    want = [cache.copy() for cache in caches]
    for cache in want:
        cache[5], cache[3] = cache[0], cache[2]
    cumla.copy_blocks(there, lab.put(np.array([[0, 5], [2, 3]])), backend=lab.backend)
    for got, cache in zip(there, want, strict=True):
        np.testing.assert_array_equal(lab.get(got), cache)


def test_pairs_may_stay_on_the_host(lab, rng):
    cache = rng.standard_normal((3, 8)).astype(np.float32)
    there = lab.put(cache.copy())
    cumla.copy_blocks([there], np.array([[0, 2]]), backend=lab.backend)
    cumla.swap_blocks(there, there, np.array([[1, 0]]).T[::-1].T, backend=lab.backend)  # any strides
    np.testing.assert_array_equal(lab.get(there)[2], cache[0])


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_between_host_and_device(rng, pinned):
    import cupy

    device = cumla.DSV4_FP8.allocate(6, 64, cupy, page_stride=65536)
    size = 6 * 64 * 584
    host = cupy.cuda.alloc_pinned_memory(size) if pinned else bytearray(size)
    host = np.frombuffer(host, np.uint8, size).reshape(6, 64, 584)
    host[:] = rng.integers(0, 256, host.shape, np.uint8)
    kept = host.copy()
    cumla.swap_blocks(host, device, np.array([[0, 5], [3, 1], [-1, 2], [2, 6]]))
    back = np.zeros_like(host)
    cumla.swap_blocks(device, back, np.array([[5, 0], [1, 3], [2, 2]]))
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(back[[0, 3]], kept[[0, 3]])
    assert not back[[1, 2, 4, 5]].any()
    assert not device[[0, 2, 3, 4]].any()


def error(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_errors_leave_everything_as_it_was(lab):
    src, dst = (lab.put(np.arange(n * 24, dtype=np.float32).reshape(n, 24)) for n in (4, 3))
    before = lab.get(dst).copy()
    pairs = lab.put(np.array([[0, 1]]))
    on = {"backend": lab.backend}
    error(lambda: cumla.swap_blocks(src, dst[:, :12], pairs, **on), ValueError, "dst: got pages of shape")
    error(lambda: cumla.swap_blocks(src, dst.view(np.int32), pairs, **on), TypeError, "dst: got dtype int32")
    error(lambda: cumla.swap_blocks(src[:, ::2], dst[:, ::2], pairs, **on), ValueError, "src: got strides")
    error(lambda: cumla.swap_blocks(src[:, 0], dst[:, 0], pairs, **on), ValueError, "src: got shape")
    error(lambda: cumla.swap_blocks(src, dst, pairs[0], **on), ValueError, "src_to_dst: got shape")
    error(lambda: cumla.swap_blocks(src, dst, src, **on), TypeError, "src_to_dst: got dtype")
    error(lambda: cumla.swap_blocks([1], dst, pairs, **on), TypeError, "src: got list")
    into_one_another = type(src)(src.shape, src.dtype, src.data, strides=(48, 4))
    error(
        lambda: cumla.swap_blocks(into_one_another, dst, pairs, **on),
        ValueError, "src: got pages 48 bytes apart, expected at least 96",
    )  # fmt: skip
    error(lambda: cumla.copy_blocks([dst, dst[0]], pairs, **on), ValueError, r"kv_caches\[1\]: got shape")
    error(lambda: cumla.copy_blocks([dst], pairs[:, :1], **on), ValueError, "src_to_dsts: got shape")
    if not lab.on_device:
        fixed = lab.get(dst).copy()
        fixed.flags.writeable = False
        error(lambda: cumla.swap_blocks(src, fixed, pairs, **on), ValueError, "dst: got a read-only")
        error(lambda: cumla.copy_blocks([fixed], pairs, **on), ValueError, r"kv_caches\[0\]: got a read-only")
    np.testing.assert_array_equal(lab.get(dst), before)
