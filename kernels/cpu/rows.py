"""One token's bytes on the CPU: Numba functions that convert values to row and scales, and back."""

import ml_dtypes
import numpy as np

from ..numba_common import slots
from ..numba_common.compiled import compiled
from ..numba_common.geometry import Geometry, geometry_of
from ..numba_common.numbers import (
    e2m1_quantized,
    e2m1_scale,
    e4m3_byte,
    float16_value,
    float32_bits,
    float32_value,
    quantized,
    tile_scale,
)
from ..types.segments import Pages

__all__ = [
    "GROUPS",
    "Geometry",
    "copy_row",
    "dequantize",
    "find_request",
    "flat",
    "float32_of_bfloat16",
    "geometry_of",
    "group_of",
    "lookup_slot",
    "read_row",
    "round_to_bfloat16",
    "write_row",
]

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code
UE8M0_VALUES = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # 2^-127 is a subnormal of float32

# Tokens are divided by the groups of their slots, and a group runs in order: a slot's last token is the one stored.
GROUPS = 64

lookup_slot = compiled(slots.lookup_slot)
find_request = compiled(slots.find_request)


def flat(pages: Pages) -> tuple[np.ndarray, int, int]:
    """The memory from the first page to the last page's end, the page stride in bytes, and the number of slots.

    The memory is one contiguous array for any page stride: compiled code then knows that bytes are neighbours.
    """
    count, page_bytes = pages.bytes.shape
    stride = pages.bytes.strides[0]
    size = (count - 1) * stride + page_bytes if count else 0
    return np.lib.stride_tricks.as_strided(pages.bytes, (size,), (1,)), stride, pages.num_slots


@compiled
def copy_row(target, source):
    """Copy between arrays that do not overlap; a slice assignment would copy to a buffer first, in case they do."""
    for i in range(len(target)):
        target[i] = source[i]


@compiled
def group_of(slot):
    """Group of a slot, one of GROUPS; neighbours, whose bytes share cache lines, are mostly in the same group."""
    return slot // 16 % GROUPS


@compiled
def write_row(page, row, values, rope, g, power_of_two):
    """Quantise `values`, float32 [>= quantized_dim], into token `row` of `page`; `rope`, bfloat16 bits, is copied.

    Each byte is written once, with its final value: a concurrent reader of a row that is rewritten with the same
    content sees only that content.
    """
    start = row * g.row_bytes
    scales = g.scale_start + row * g.scale_stride
    if g.ue8m0 or g.e4m3_scales:
        for i in range(g.quantized_dim // g.scale_tile, g.scale_bytes):
            page[scales + i] = 0
    for tile in range(g.quantized_dim // g.scale_tile):
        first = tile * g.scale_tile
        amax = largest_finite(values[first : first + g.scale_tile], g.e2m1_values)
        if g.e2m1_values:
            scale = e2m1_scale(amax, g.ue8m0, g.min_exponent, g.min_scale)
        else:
            scale = tile_scale(amax, power_of_two, g.min_exponent, g.min_scale)
        if g.ue8m0:
            page[scales + tile] = float32_bits(scale) >> 23
        elif g.e4m3_scales:
            page[scales + tile] = e4m3_byte(scale)
        else:
            bits = float32_bits(scale)
            for i in range(4):
                page[scales + 4 * tile + i] = (bits >> (8 * i)) & 0xFF
        if g.e2m1_values:
            for i in range(first, first + g.scale_tile, 2):
                low, high = e2m1_quantized(values[i], scale), e2m1_quantized(values[i + 1], scale)
                page[start + i // 2] = low | (high << 4)
        else:
            for i in range(first, first + g.scale_tile):
                page[start + i] = quantized(values[i], scale)
    for i in range(g.head_dim - g.quantized_dim):
        page[start + g.rope_offset + 2 * i] = rope[i] & 0xFF
        page[start + g.rope_offset + 2 * i + 1] = rope[i] >> 8


@compiled
def largest_finite(values, keeps_nan):
    """The largest finite magnitude of a tile; NaN if the tile has a NaN and `keeps_nan` is set."""
    amax = np.float32(0)
    for x in values:
        magnitude = np.abs(x)
        if magnitude > amax and magnitude < np.inf:
            amax = magnitude
    if keeps_nan:
        for x in values:
            if x != x:
                amax = np.float32(np.nan)
    return amax


@compiled
def scale_at(page, scales, tile, g):
    """Scale `tile` of a row, float64; the row's scales begin at byte `scales` of its page."""
    if g.ue8m0:
        return UE8M0_VALUES[page[scales + tile]]
    if g.e4m3_scales:
        return np.float64(E4M3_VALUES[page[scales + tile]])
    bits = np.int64(0)
    for i in range(4):
        bits |= np.int64(page[scales + 4 * tile + i]) << (8 * i)
    return np.float64(float32_value(bits))


@compiled
def read_row(page, row, values, g):
    """Dequantise token `row` of `page` into `values`, float32 or float64 [head_dim]."""
    start = row * g.row_bytes
    scales = g.scale_start + row * g.scale_stride
    for tile in range(g.quantized_dim // g.scale_tile):
        scale = values.dtype.type(scale_at(page, scales, tile, g))
        first, end = tile * g.scale_tile, (tile + 1) * g.scale_tile
        if g.e2m1_values:
            for i in range(first, end):
                values[i] = E2M1_VALUES[(page[start + i // 2] >> (4 * (i % 2))) & 0x0F] * scale
        else:
            dequantize(values[first:end], page[start + first : start + end], scale)
    tail = page[start + g.rope_offset : start + g.row_bytes]
    if g.float32_values:
        for i in range(g.head_dim):
            word = np.uint32(tail[4 * i]) | (np.uint32(tail[4 * i + 1]) << np.uint32(8))
            word |= (np.uint32(tail[4 * i + 2]) << np.uint32(16)) | (np.uint32(tail[4 * i + 3]) << np.uint32(24))
            values[i] = np.uint32(word).view(np.float32)
        return
    for i in range(g.head_dim - g.quantized_dim):
        stored = np.uint32(tail[2 * i]) | (np.uint32(tail[2 * i + 1]) << np.uint32(8))
        value = float16_value(np.int64(stored)) if g.float16_values else float32_of_bfloat16(stored)
        values[g.quantized_dim + i] = value


@compiled
def dequantize(values, quantized, scale):
    """e4m3 bytes times scale. Without branches or a table, so that it is vectorised."""
    for i in range(len(values)):
        code = np.uint32(quantized[i])
        magnitude = code & np.uint32(0x7F)
        normal = np.uint32((magnitude << np.uint32(20)) + np.uint32(120 << 23)).view(np.float32)
        subnormal = np.float32(np.int32(magnitude)) * np.float32(2.0**-9)
        value = subnormal if magnitude < np.uint32(8) else normal
        value = np.float32(np.nan if magnitude == np.uint32(0x7F) else value)
        sign = (code & np.uint32(0x80)) << np.uint32(24)
        values[i] = np.uint32(value.view(np.uint32) | sign).view(np.float32) * scale


@compiled
def float32_of_bfloat16(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def round_to_bfloat16(x):
    """The bits of float32 `x` rounded to nearest even, in 32-bit arithmetic so that it is vectorised."""
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    quiet = np.uint32(bits | np.uint32(0x400000))
    return np.uint16((rounded if x == x else quiet) >> np.uint32(16))
