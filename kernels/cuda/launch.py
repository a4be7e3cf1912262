"""Small things that every launcher needs."""

from __future__ import annotations

from typing import Any

from numpy import int32

__all__ = ["C_NAMES", "MAX_BLOCKS", "int32", "is_aligned", "pointer", "strides", "unit"]

MAX_BLOCKS = 4096  # where thread blocks go through the rows in turns: enough to fill any device
C_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "float", "int32": "int", "int64": "int64"}


def strides(array: Any) -> tuple[int, ...]:
    """Strides in elements; Python integers, which a kernel takes as 64-bit."""
    size = array.dtype.itemsize
    return tuple(stride // size for stride in array.strides)


def pointer(array: Any | None) -> int:
    """The address of an array, or a null pointer."""
    return 0 if array is None else array.data.ptr


def is_aligned(*arrays: Any) -> bool:
    """Whether every row of these arrays starts at a multiple of 16 bytes."""
    bits = 0
    for array in arrays:
        bits |= array.data.ptr
        for stride in array.strides[:-1]:
            bits |= stride
    return bits % 16 == 0


def unit(row_bytes: int, *arrays: Any) -> str:
    """The widest type whose size divides `row_bytes` and the addresses of all rows of these arrays."""
    bits = row_bytes
    for array in arrays:
        bits |= array.data.ptr
        for stride in array.strides[:-1]:
            bits |= stride
    for size, name in ((16, "uint4"), (8, "uint2"), (4, "uint32"), (2, "uint16")):
        if bits % size == 0:
            return name
    return "uint8"
