"""Copies of spans of bytes between pages of many arrays."""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from cumla.pages import host_pool
from support.guarded import Guarded
from support.lab import BF16, Lab
from support.properties import INT32_MAX, INT32_MIN, for_all, seeds

pytestmark = pytest.mark.filterwarnings("error")

REFERENCE = Lab("reference", on_device=False)
ARRAYS = (
    (4, (4, 584), np.uint8),
    (3, (3, 576), BF16),
    (5, (7,), np.uint8),
    (3, (2, 5), np.float32),
    (6, (1,), np.int32),
)


def spans_of(rng, count, src, dst, dtype):
    """Spans that write no byte twice and read none that is written, and some that are not within a page."""
    free, spans = [(j, page) for j, (pages, _) in enumerate(dst) for page in range(pages)], []
    rng.shuffle(free)
    for j, page in free[:count]:
        i = int(rng.integers(len(src)))
        size = int(rng.integers(0, min(src[i][1], dst[j][1]) + 1))
        size = size // 16 * 16 if rng.random() < 0.5 and size > 16 else size
        from_byte, to = (int(rng.integers(0, most - size + 1)) for most in (src[i][1], dst[j][1]))
        span = [i, int(rng.integers(src[i][0])), from_byte, j, page, to, size]
        if rng.random() < 0.25:
            column = int(rng.integers(7))
            span[column] = int(rng.choice([-1, 2**20, INT32_MAX, INT32_MIN]))
        spans.append(span)
    return np.array(spans, dtype).reshape(-1, 7)


def test_spans(lab):
    @for_all(lab, count=st.integers(0, 9), gap=st.sampled_from((0, 1, 16)), offset=st.sampled_from((0, 0, 1, 8)),
             dtype=st.sampled_from((np.int64, np.int32)), seed=seeds)  # fmt: skip
    def check(count, gap, offset, dtype, seed):
        rng = np.random.default_rng(seed)
        chosen = [ARRAYS[i] for i in rng.integers(0, len(ARRAYS), 6)]
        sides = [chosen[:3], chosen[3:]]
        content, sizes = [], []
        for side in sides:
            shapes = [(n, *shape[:-1], shape[-1] * np.dtype(kind).itemsize) for n, shape, kind in side]
            content.append([
                rng.integers(0, 256, shape, np.uint8).view(kind)
                for shape, (_, _, kind) in zip(shapes, side, strict=True)
            ])  # fmt: skip
            sizes.append([(shape[0], int(np.prod(shape[1:]))) for shape in shapes])
        spans, results = spans_of(rng, count, *sizes, dtype), []
        for place in (lab, REFERENCE):
            src, dst = (
                [
                    Guarded(place, array, (0,) * (array.ndim - 1) + (gap * array.itemsize,), offset * array.itemsize)
                    for array in arrays
                ]
                for arrays in content
            )
            cumla.copy_spans([x.array for x in src], [x.array for x in dst], place.put(spans), backend=place.backend)
            results.append([x.everything() for x in (*src, *dst)])
        for got, want in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)


def test_more_arrays_than_one_launch_takes(lab, rng):
    """Arrays of many kinds, and more of them than the kernel's arguments hold."""
    count = 230 if not lab.tiny else 20
    src = [rng.integers(0, 256, (2, 8 + i // 12), np.uint8) for i in range(count)]
    dst = [np.zeros_like(x) for x in src]
    spans = np.array([[i, i % 2, 0, i, 1, 0, 8 + i // 12] for i in range(count)], np.int32)
    there = [lab.put(x) for x in dst]
    cumla.copy_spans([lab.put(x) for x in src], there, spans, backend=lab.backend)
    for i in range(count):
        got = lab.get(there[i])
        np.testing.assert_array_equal(got[1], src[i][i % 2])
        assert not got[0].any()


def test_pages_beyond_int32(lab):
    pool = cumla.DSV4_FP8.allocate(2_060, 64, lab.xp, 1 << 20)
    pool[-1, 5, :4] = lab.put(np.arange(4, dtype=np.uint8))
    place = 5 * pool.shape[2]
    cumla.copy_spans([pool], [pool], np.array([[0, 2_059, place, 0, 1, 3, 4]]), backend=lab.backend)
    np.testing.assert_array_equal(lab.get(pool[1, 0])[3:7], np.arange(4))


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_between_host_and_device(lab, rng, pinned):
    """A kernel copies pinned memory, the driver other memory: the same bytes."""
    if not lab.on_device:
        pytest.skip("there is no device memory")
    size = 6 * 100
    memory = host_pool(2 * size + 256, pinned=True) if pinned else None
    host = np.zeros((6, 100), np.uint8) if memory is None else memory.take(size).reshape(6, 100)
    back = np.zeros((6, 100), np.uint8) if memory is None else memory.take(size).reshape(6, 100)
    host[:] = rng.integers(0, 256, host.shape, np.uint8)
    back[:] = 0
    device = lab.put(np.zeros((5, 128), np.uint8))
    out = np.array([[0, 5, 0, 0, 4, 28, 100], [0, 1, 7, 0, 0, 0, 9], [0, 6, 0, 0, 1, 0, 9], [0, 0, 0, 0, 2, 29, 100]])
    cumla.copy_spans([host], [device], out, backend=lab.backend)
    cumla.copy_spans(
        [device], [back], np.array([[0, 4, 28, 0, 3, 0, 100], [0, 0, 0, 0, 0, 91, 9]]), backend=lab.backend
    )
    got = lab.get(device)  # waits
    np.testing.assert_array_equal(got[4, 28:], host[5])
    np.testing.assert_array_equal(back[3], host[5])
    np.testing.assert_array_equal(back[0, 91:], host[1, 7:16])
    assert not got[1:4].any()
    assert not back[[1, 2, 4, 5]].any()


def error(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_errors_leave_everything_as_it_was(lab):
    src, dst = (lab.put(np.arange(n * 24, dtype=np.float32).reshape(n, 24)) for n in (4, 3))
    before, spans = lab.get(dst).copy(), lab.put(np.array([[0, 1, 0, 0, 1, 0, 96]]))
    on = {"backend": lab.backend}
    error(lambda: cumla.copy_spans(3, [dst], spans, **on), TypeError, "src: got int, expected a list of arrays")
    error(lambda: cumla.copy_spans([src], [dst, 3], spans, **on), TypeError, r"dst\[1\]: got int")
    error(lambda: cumla.copy_spans([src[:, ::2]], [dst], spans, **on), ValueError, r"src\[0\]: got strides")
    error(lambda: cumla.copy_spans([src], [dst], spans[:, :6], **on), ValueError, r"spans: got shape \(1, 6\)")
    error(lambda: cumla.copy_spans([src], [dst], src, **on), TypeError, "spans: got dtype float32")
    if lab.on_device:
        mixed = [dst, before]
        error(lambda: cumla.copy_spans([src], mixed, spans, **on), ValueError, r"dst\[1\]: got an array in host memory")
        error(lambda: cumla.copy_spans([src], [before], spans, **on), ValueError, "spans: got an array in CUDA memory")
    else:
        fixed = dst.copy()
        fixed.flags.writeable = False
        error(lambda: cumla.copy_spans([src], [fixed], spans, **on), ValueError, r"dst\[0\]: got a read-only")
    np.testing.assert_array_equal(lab.get(dst), before)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (0, 1, r"span 1 is of src\[1\], expected src\[0\] to src\[0\]"),
        (1, 4, r"span 1 is of page 4 of src\[0\], expected 0 to 3"),
        (4, -1, r"span 1 is of page -1 of dst\[0\], expected 0 to 2"),
        (6, 97, r"span 1 has bytes 0 to 97 of a page of src\[0\], expected them within 96"),
    ],
)
def test_debug_names_the_span(column, value, text):
    src, dst = np.zeros((4, 96), np.uint8), np.zeros((3, 96), np.uint8)
    spans = np.array([[0, 0, 0, 0, 0, 0, 4], [0, 1, 0, 0, 1, 0, 96]])
    spans[1, column] = value
    with cumla.debug(), pytest.raises(ValueError, match=text):
        cumla.copy_spans([src], [dst], spans)
