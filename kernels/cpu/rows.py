"""One token's bytes on the CPU: values to row and scales, and back, as Numba functions.

A layout reaches compiled code as a tuple of its numbers (`Geometry`), made by `geometry_of`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numba import njit

from ..segments import Pages

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
UE8M0_VALUES = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # 2^-127 is not a normal float32


class Geometry(NamedTuple):
    """A `CacheLayout` and a block size as plain numbers."""

    block_size: int
    head_dim: int
    quantized_dim: int
    row_bytes: int
    rope_offset: int
    scale_tile: int
    scale_bytes: int
    scale_start: int
    scale_stride: int
    ue8m0: bool
    float16_values: bool
    min_exponent: int
    min_scale: float


def geometry_of(pages: Pages) -> Geometry:
    layout = pages.layout
    return Geometry(
        pages.block_size,
        layout.head_dim,
        layout.quantized_dim,
        layout.row_bytes,
        layout.rope_offset if layout.quantized_dim else 0,
        layout.scale_tile or 1,
        layout.scale_bytes,
        layout.scale_start(pages.block_size),
        layout.scale_stride,
        layout.scale_type == "ue8m0",
        layout.value_type == "float16",
        layout.min_exponent,
        layout.min_scale,
    )


@njit(cache=True)
def float32_bits(x):
    return np.float32(x).view(np.uint32)


@njit(cache=True)
def bfloat16_bits(x):
    """float32 -> bfloat16, to nearest even; NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(cache=True)
def bfloat16_value(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(cache=True)
def float16_value(bits):
    """float16 -> float32 by hand: Numba has no float16 on the CPU."""
    magnitude = np.uint32(bits & np.uint16(0x7FFF))
    sign = np.uint32(bits & np.uint16(0x8000)) << np.uint32(16)
    if magnitude >= np.uint32(0x7C00):
        payload = (magnitude & np.uint32(0x3FF)) << np.uint32(13)
        return np.uint32(sign | np.uint32(0x7F800000) | payload).view(np.float32)
    if magnitude < np.uint32(0x400):
        value = np.float32(magnitude) * np.float32(2.0**-24)
        return -value if sign else value
    return np.uint32(sign | ((magnitude << np.uint32(13)) + np.uint32(112 << 23))).view(np.float32)


@njit(cache=True)
def e4m3_byte(x):
    """float32 -> e4m3, to nearest even; beyond 448 saturates, NaN becomes 0x7F."""
    if x != x:
        return np.uint8(0x7F)
    bits = np.float32(x).view(np.uint32)
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude >= np.uint32(0x43E00000):  # 448
        return np.uint8(sign | np.uint32(0x7E))
    if magnitude < np.uint32(0x3C800000):  # 2^-6, the smallest normal: steps of 2^-9
        return np.uint8(sign | np.uint32(np.rint(np.abs(x) * np.float32(512.0))))
    rounded = magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))
    return np.uint8(sign | ((rounded >> np.uint32(20)) - np.uint32(120 << 3)))


@njit(cache=True)
def scale_exponent(amax, min_exponent):
    """Smallest e with amax <= 448 * 2^e, at least `min_exponent`."""
    if amax == np.float32(0):
        return min_exponent
    fraction, exponent = math.frexp(amax)
    return max(exponent - 9 + (1 if fraction > 0.875 else 0), min_exponent)


@njit(cache=True)
def write_row(page, row, values, g, power_of_two):
    """Quantise `values`, float32 [head_dim], into token `row` of `page`."""
    start = row * g.row_bytes
    scales = g.scale_start + row * g.scale_stride
    if g.ue8m0:
        for i in range(g.scale_bytes):
            page[scales + i] = 0
    for tile in range(g.quantized_dim // g.scale_tile):
        first = tile * g.scale_tile
        amax = np.float32(0)
        for i in range(first, first + g.scale_tile):
            magnitude = np.abs(values[i])
            if magnitude > amax and magnitude < np.inf:
                amax = magnitude
        if power_of_two:
            exponent = scale_exponent(amax, g.min_exponent)
            scale = np.float32(2.0**exponent)
        else:
            exponent = 0
            scale = max(amax / np.float32(448), np.float32(g.min_scale))
        if g.ue8m0:
            page[scales + tile] = exponent + 127
        else:
            bits = float32_bits(scale)
            for i in range(4):
                page[scales + 4 * tile + i] = (bits >> np.uint32(8 * i)) & np.uint32(0xFF)
        for i in range(first, first + g.scale_tile):
            page[start + i] = e4m3_byte(values[i] / scale)
    for i in range(g.head_dim - g.quantized_dim):
        bits = bfloat16_bits(values[g.quantized_dim + i])
        page[start + g.rope_offset + 2 * i] = bits & np.uint16(0xFF)
        page[start + g.rope_offset + 2 * i + 1] = bits >> np.uint16(8)


@njit(cache=True)
def read_row(page, row, values, g):
    """Dequantise token `row` of `page` into `values`, float32 or float64 [head_dim]."""
    start = row * g.row_bytes
    scales = g.scale_start + row * g.scale_stride
    for tile in range(g.quantized_dim // g.scale_tile):
        if g.ue8m0:
            scale = UE8M0_VALUES[page[scales + tile]]
        else:
            bits = np.uint32(0)
            for i in range(4):
                bits |= np.uint32(page[scales + 4 * tile + i]) << np.uint32(8 * i)
            scale = np.float64(np.uint32(bits).view(np.float32))
        for i in range(tile * g.scale_tile, (tile + 1) * g.scale_tile):
            values[i] = E4M3_VALUES[page[start + i]] * scale
    for i in range(g.head_dim - g.quantized_dim):
        at = start + g.rope_offset + 2 * i
        bits = np.uint16(page[at]) | (np.uint16(page[at + 1]) << np.uint16(8))
        values[g.quantized_dim + i] = float16_value(bits) if g.float16_values else bfloat16_value(bits)


@njit(cache=True)
def lookup_slot(block_table, row, position, block_size):
    """The slot of a position of request `row`, or -1 where the table has no such entry or no such block."""
    if row < 0 or row >= block_table.shape[0] or position < 0 or position >= block_table.shape[1] * block_size:
        return -1
    block = np.int64(block_table[row, position // block_size])
    slot = block * block_size + position % block_size
    return slot if block >= 0 and slot < 2**31 else -1
