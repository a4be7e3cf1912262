"""One token's bytes on the CPU: values to row and scales, and back, as Numba functions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numba import njit

from .. import slots
from ..geometry import Geometry, geometry_of
from ..numbers import bfloat16_bits, bfloat16_value, float16_value, float32_bits, float32_value, quantized, tile_scale

__all__ = ["Geometry", "find_request", "geometry_of", "lookup_slot", "read_row", "write_row"]

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
UE8M0_VALUES = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # 2^-127 is not a normal float32

lookup_slot = njit(cache=True)(slots.lookup_slot)
find_request = njit(cache=True)(slots.find_request)


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
        scale = tile_scale(amax, power_of_two, g.min_exponent, g.min_scale)
        if g.ue8m0:
            page[scales + tile] = float32_bits(scale) >> 23
        else:
            bits = float32_bits(scale)
            for i in range(4):
                page[scales + 4 * tile + i] = (bits >> (8 * i)) & 0xFF
        for i in range(first, first + g.scale_tile):
            page[start + i] = quantized(values[i], scale)
    for i in range(g.head_dim - g.quantized_dim):
        bits = bfloat16_bits(values[g.quantized_dim + i])
        page[start + g.rope_offset + 2 * i] = bits & 0xFF
        page[start + g.rope_offset + 2 * i + 1] = bits >> 8


@njit(cache=True)
def read_row(page, row, values, g):
    """Dequantise token `row` of `page` into `values`, float32 or float64 [head_dim]."""
    start = row * g.row_bytes
    scales = g.scale_start + row * g.scale_stride
    for tile in range(g.quantized_dim // g.scale_tile):
        if g.ue8m0:
            scale = UE8M0_VALUES[page[scales + tile]]
        else:
            bits = np.int64(0)
            for i in range(4):
                bits |= np.int64(page[scales + 4 * tile + i]) << (8 * i)
            scale = np.float64(float32_value(bits))
        for i in range(tile * g.scale_tile, (tile + 1) * g.scale_tile):
            values[i] = E4M3_VALUES[page[start + i]] * scale
    for i in range(g.head_dim - g.quantized_dim):
        at = start + g.rope_offset + 2 * i
        bits = np.int64(page[at]) | (np.int64(page[at + 1]) << 8)
        values[g.quantized_dim + i] = float16_value(bits) if g.float16_values else bfloat16_value(bits)
