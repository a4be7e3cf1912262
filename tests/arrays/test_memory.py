"""Extents of arrays, and whether elements share bytes, compared with sets of all their bytes."""

import numpy as np
import pytest

from cumla.arrays import dlpack, memory
from cumla.arrays.memory import coincide, extent, overlaps_itself, share_elements

MEMORY = np.zeros(4000, np.uint8)


def any_array(rng):
    """A view of few elements around the middle of MEMORY, with any strides, sometimes without elements."""
    shape = rng.integers(rng.random() > 0.1, 5, rng.integers(4))
    strides = rng.integers(-24, 25, len(shape))
    item = f"V{rng.choice([1, 2, 4, 8])}"
    return np.ndarray(shape.tolist(), item, MEMORY, 2000 + int(rng.integers(-60, 61)), strides.tolist())


def bytes_of(array):
    """The addresses of all bytes of all elements, in order."""
    starts = [array.ctypes.data + int(np.dot(at, array.strides)) for at in np.ndindex(array.shape)]
    return [start + i for start in starts for i in range(array.itemsize)]


@pytest.fixture(params=["host", "device"])
def given(request):
    """Wraps a host array, at the same addresses, in the class that kernels take."""
    if request.param == "host":
        return lambda x: x
    request.getfixturevalue("emulated")
    import cupy

    def on_paper(x):
        array = cupy.ndarray.__new__(cupy.ndarray)
        unowned = cupy.cuda.UnownedMemory(x.ctypes.data, 0, x, 0)
        array.data, array._view = cupy.cuda.MemoryPointer(unowned, 0), x
        return array

    return on_paper


def test_elements_share_bytes(given, rng):
    seen = set()
    for _ in range(2000):
        a, b = any_array(rng), any_array(rng)
        of_a, of_b = bytes_of(a), bytes_of(b)
        shared, repeated = bool({*of_a} & {*of_b}), len({*of_a}) < len(of_a)
        assert share_elements(given(a), given(b)) == shared
        assert overlaps_itself(given(a)) == repeated
        first, low, high = extent(given(a))
        assert (low, high) == ((min(of_a) - first, max(of_a) + 1 - first) if of_a else (0, 0))
        seen.add((shared, repeated))
    assert len(seen) == 4


def test_arrays_of_the_host_and_of_a_device_do_not(emulated):
    import cupy

    assert not share_elements(np.zeros(3), cupy.zeros(3))


@pytest.mark.usefixtures("emulated")
def test_a_device_array_that_runs_backwards():
    """An array of another library, by the CUDA array interface; its address is the highest row's."""
    import cupy

    rows = cupy.asarray(np.arange(12, dtype=np.int32).reshape(4, 3))

    class Reversed:
        @property
        def __cuda_array_interface__(self):
            data = rows.data.ptr + 36, False
            return {"version": 3, "typestr": "<i4", "shape": (4, 3), "strides": (-12, 4), "data": data}

    native = dlpack.borrow(Reversed())
    np.testing.assert_array_equal(native.get(), rows.get()[::-1])
    assert (native.data.mem.ptr, native.data.mem.size) == (rows.data.ptr, rows.nbytes)


def test_the_same_elements():
    a = np.zeros((4, 6))
    assert coincide(a, a[:])
    assert not coincide(a, a[:, ::-1])
    assert not coincide(a[:2], a[2:])


def test_what_cannot_be_decided_counts_as_shared(monkeypatch):
    strided = np.lib.stride_tricks.as_strided
    whole = strided(np.zeros(1, np.int8), (192163377,), (1,))
    a = strided(whole, (1049, 1049, 1049), (36674, 61119, 85569))
    b = strided(whole[64023025:], (1049, 1049, 1), (12223, 12224, 1))
    monkeypatch.setattr(memory, "MOST_WORK", 1)
    assert share_elements(a, b)
