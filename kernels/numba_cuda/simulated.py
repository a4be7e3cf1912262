"""The intrinsics in Numba's simulator, in plain Python; there are no tensor cores, and products.py needs none."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def load4(words: Any, at: int) -> Any:
    """Four words of shared memory from `at` on, a multiple of four."""
    return tuple(words[at : at + 4])


def load2(values: Any, at: int) -> Any:
    """Two float32 of shared memory from `at` on, which is even."""
    return values[at], values[at + 1]


def store4(words: Any, at: int, four: Any) -> None:
    """Write four words into shared memory from `at` on, a multiple of four."""
    words[at : at + 4] = four


def _read(dtype: Any) -> Any:
    def read(row: Any, at: int, present: bool) -> Any:
        """The bytes from element `at` of a row in device memory if `present`, else zeros."""
        size = np.dtype(dtype).itemsize
        if not present:
            return np.zeros(1, dtype)[0]
        item = row.dtype.itemsize
        return np.array([row[at + i] for i in range(-(-size // item))], row.dtype).view(dtype)[0]

    return read


read1, read2, read4 = _read(np.uint8), _read(np.uint16), _read(np.uint32)


def read16(row: Any, at: int, present: bool) -> Any:
    """Like _read, 16 bytes as four words."""
    if not present:
        return (np.uint32(0),) * 4
    count = 16 // row.dtype.itemsize
    return tuple(row._item._ary[at : at + count].view(np.uint32))


def permute_bytes(x: Any, y: Any, selection: int) -> Any:
    """The bytes of x and then y that the hexadecimal digits of `selection` name."""
    return np.array([x, y], np.uint32).view(np.uint8)[[selection >> 4 * i & 7 for i in range(4)]].view(np.uint32)[0]


def _multiply(dtype: Any) -> Any:
    def multiply(x: Any, y: Any) -> Any:
        """The product of pairs x and y, value by value."""
        pairs = [np.array([word], np.uint32).view(dtype).astype(np.float32) for word in (x, y)]
        return (pairs[0] * pairs[1]).astype(dtype).view(np.uint32)[0]

    return multiply


def _round(dtype: Any) -> Any:
    def to_pair(first: Any, second: Any) -> Any:
        """Two float32 rounded to a pair."""
        return np.array([first, second], np.float32).astype(dtype).view(np.uint32)[0]

    return to_pair


def values(words: Any, float16: bool) -> Any:
    """Words of shared memory as float32 values."""
    return words.view(np.float16 if float16 else ml_dtypes.bfloat16).astype(np.float32)


multiply_bfloat16, multiply_float16 = _multiply(ml_dtypes.bfloat16), _multiply(np.float16)
bfloat16_pair, float16_pair = _round(ml_dtypes.bfloat16), _round(np.float16)
mma_bfloat16 = mma_float16 = None


def exponential(x: Any) -> Any:
    return np.exp(np.float32(x))


def logarithm(x: Any) -> Any:
    return np.log(np.float32(x))
