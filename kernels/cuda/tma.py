"""Tensor maps: descriptors of arrays from which the tensor memory accelerator copies boxes (csrc/sm90/hopper.cuh)."""

import ctypes
import functools
import math

from .device import is_described

UINT16, SWIZZLE_128B, L2_PROMOTION_256B = 1, 3, 3  # values of cuda.h
MAP_WORDS = 16  # words of 8 bytes
MOST_STRIDE, MOST_SIZE, MOST_BOX_ROWS = 1 << 40, 1 << 32, 256  # limits of the driver
SWIZZLE_ROWS = 8  # the swizzle's period in rows; a box's rows are a multiple of it
Words = tuple[int, ...]
NO_MAP: Words = (0,) * MAP_WORDS


class MapWord(int):
    """A word of a described map: records of launches tell maps from other words."""


def box_rows(block_rows: int, page_rows: int) -> int:
    """Rows of the largest box that divides both blocks of `block_rows` rows and pages; 0 if there is none."""
    rows = math.gcd(block_rows, page_rows)
    return rows if rows % SWIZZLE_ROWS == 0 else 0


def map_of_pages(
    address: int, pages: int, page_bytes: int, page_rows: int, row_bytes: int, rows: int, row_stride: int | None = None
) -> Words:
    """The words of a TensorMap of 16-bit values [pages][page_rows][row_bytes / 2], in boxes of `rows` rows, 64 values.

    row_stride  bytes from row to row; None: row_bytes
    The first word is the address; a caller may replace it. NO_MAP if the driver rejects the map. The device
    is not accessed: this may be called while a CUDA graph is captured.
    """
    stride = row_bytes if row_stride is None else row_stride
    encode = described_map if is_described() else checked_map
    return encode(address, pages, page_bytes, page_rows, row_bytes, rows, stride)


@functools.lru_cache(maxsize=1024)
def checked_map(address: int, *sizes: int) -> Words:
    """The driver's words, arguments as of `encoded`; NO_MAP unless the address is the first word and in no other."""
    here, elsewhere = (encoded(where, *sizes) for where in (address, address ^ 1 << 20))
    if here[:1] != (address,) or here[1:] != elsewhere[1:]:
        return NO_MAP
    return here


def described_map(
    address: int, pages: int, page_bytes: int, page_rows: int, row_bytes: int, rows: int, row_stride: int
) -> Words:
    """What the driver would encode: the address, bytes of an element, sizes, strides and box, then zeros. NO_MAP if the
    driver would reject them."""
    sizes, map_strides = (row_bytes // 2, page_rows, pages), (row_stride, page_bytes)
    misaligned = any(number % 16 for number in (address, *map_strides))
    outside = min(sizes) < 1 or max(sizes) > MOST_SIZE or max(map_strides) >= MOST_STRIDE or rows > MOST_BOX_ROWS
    if misaligned or outside or min(map_strides) < 0:
        return NO_MAP
    words = (address, 2, *sizes, *map_strides, 64, rows, 1)
    return tuple(MapWord(word) for word in (*words, *[0] * (MAP_WORDS - len(words))))


def encoded(
    address: int, pages: int, page_bytes: int, page_rows: int, row_bytes: int, rows: int, row_stride: int
) -> Words:
    encode = getattr(ctypes.CDLL("libcuda.so.1"), "cuTensorMapEncodeTiled", None)
    if encode is None:  # another kernel would take the call in silence
        raise RuntimeError("libcuda.so.1: got a driver without cuTensorMapEncodeTiled, expected CUDA 12 or later")
    memory = (ctypes.c_int64 * (2 * MAP_WORDS))()
    at = -(-ctypes.addressof(memory) // 64) * 64  # alignment required by the driver
    sizes = (ctypes.c_uint64 * 3)(row_bytes // 2, page_rows, pages)
    strides = (ctypes.c_uint64 * 2)(row_stride, page_bytes)
    box, steps = (ctypes.c_uint32 * 3)(64, rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    status = encode(
        ctypes.c_void_p(at), UINT16, 3, ctypes.c_void_p(address), sizes, strides, box, steps,
        0, SWIZZLE_128B, L2_PROMOTION_256B, 0,
    )  # fmt: skip
    return NO_MAP if status else tuple((ctypes.c_int64 * MAP_WORDS).from_address(at))
