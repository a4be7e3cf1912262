"""The bytes that an array's elements occupy, and whether elements of two arrays share any; copies to the host.

Only addresses, shapes and strides are compared; no memory is read, so arrays on a device are compared without waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MOST_WORK = 1_000_000  # limit of the steps of NumPy's exact comparison: some milliseconds


class Extent(NamedTuple):
    """The bytes [address + low, address + high) that contain an array's elements.

    Attributes:
        address: address of the first element, not the lowest one if a stride is negative
        low: 0 or negative; high - low is 0 for an array without elements
    """

    address: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low

    def contains(self, address: int) -> bool:
        """Whether an address is one of these bytes; an array without elements contains only its own address."""
        return self.low <= address - self.address < max(self.high, 1)

    def intersects(self, other: Extent) -> bool:
        start, end = max(self.address + self.low, other.address + other.low), self.address + self.high
        return start < min(end, other.address + other.high)


def reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """`low` and `high` of an Extent; strides in bytes."""
    if 0 in shape:
        return 0, 0
    low, high = 0, itemsize
    for size, stride in zip(shape, strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high


def extent(native: Any) -> Extent:
    """The extent of a NumPy or CuPy array."""
    address = native.ctypes.data if isinstance(native, np.ndarray) else native.data.ptr
    return Extent(address, *reach(native.shape, native.strides, native.itemsize))


def share_elements(a: Any, b: Any) -> bool:
    """Whether an element of one NumPy or CuPy array shares a byte with an element of the other.

    Interleaved arrays do not share elements: columns of one matrix, pages of several caches in one allocation. If
    MOST_WORK steps do not decide, elements count as shared: an error is better than a result that may be wrong.
    """
    on_host = isinstance(a, np.ndarray)
    if on_host != isinstance(b, np.ndarray):
        return False
    if on_host:
        return np.may_share_memory(a, b) and _decided(a, b)
    return extent(a).intersects(extent(b)) and _decided(_stand_in(a), _stand_in(b))


def coincide(a: Any, b: Any) -> bool:
    """Whether every element of one array has the same address as the same element of the other."""
    return a.shape == b.shape and a.strides == b.strides and extent(a).address == extent(b).address


def overlaps_itself(native: Any) -> bool:
    """Whether two elements of a NumPy or CuPy array share a byte, as in a broadcast array."""
    return not native.flags.c_contiguous and _elements_overlap(native.shape, native.strides, native.itemsize)


@functools.lru_cache(maxsize=4096)
def _elements_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return False
    axes = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    occupied = itemsize  # bytes that the axes so far occupy
    for stride, size in axes:
        if stride < occupied:
            break
        occupied += (size - 1) * stride
    else:
        return False
    # Two elements whose indices along an axis differ are in different halves in one of these bisections. The second
    # half need not be divided: all distances between its elements also occur in the first.
    array = _Addresses(1 << 62, shape, strides, itemsize).as_array()
    for axis in range(array.ndim):
        while array.shape[axis] > 1:
            half = (array.shape[axis] + 1) // 2
            first, second = np.split(array, [half], axis)
            if _decided(first, second):
                return True
            array = first
    return False


_shares_memory: Callable[..., bool] = np.shares_memory  # the type stub allows only two values of max_work


def _decided(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return _shares_memory(a, b, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An array of addresses for NumPy to compare, never to access."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, True), "shape": tuple(shape), "strides": tuple(strides),
            "typestr": f"|V{itemsize}",
        }  # fmt: skip

    def as_array(self) -> np.ndarray:
        return np.asarray(self)


def _stand_in(native: Any) -> np.ndarray:
    """A NumPy array at the addresses of a CuPy array."""
    return _Addresses(native.data.ptr, native.shape, native.strides, native.itemsize).as_array()


def to_host(array: Any) -> np.ndarray:
    """A NumPy or CuPy array in host memory."""
    return array if isinstance(array, np.ndarray) else array.get()
