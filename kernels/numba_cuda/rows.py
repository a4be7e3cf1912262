"""One token's bytes, value by value: device functions of the cache kernels."""

import numpy as np

from ..numba_common import slots
from ..numba_common.numbers import (
    INFINITY_BITS,
    bfloat16_value,
    dequantized,
    e2m1_scale,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    float16_value,
    float32_bits,
    float32_value,
    tile_scale,
    ue8m0_value,
)
from .compiler import cuda

# The index arithmetic is the CPU backend's, compiled for the device.
lookup_slot = cuda.jit(device=True)(slots.lookup_slot)
lookup_block = cuda.jit(device=True)(slots.lookup_block)
find_request = cuda.jit(device=True)(slots.find_request)
token_position = cuda.jit(device=True)(slots.token_position)
to_span = cuda.jit(device=True)(slots.to_span)
complete_rows = cuda.jit(device=True)(slots.complete_rows)


@cuda.jit(device=True)
def rows_of(starts, sequence, num_rows):
    """The first row of a packed sequence and the row after its last, clamped to the array."""
    start = min(max(np.int64(starts[sequence]), 0), num_rows)
    return start, max(start, min(max(np.int64(starts[sequence + 1]), 0), num_rows))


# Pages may start at any address, so values longer than a byte are read byte by byte.


@cuda.jit(device=True)
def load(page, offset, count):
    """`count` bytes from `offset` of a page, as one integer."""
    bits = np.int64(0)
    for i in range(count):
        bits |= np.int64(page[offset + i]) << (8 * i)
    return bits


@cuda.jit(device=True)
def store(page, offset, count, bits):
    """Write `count` bytes of an integer to `offset` of a page."""
    for i in range(count):
        page[offset + i] = (bits >> (8 * i)) & 0xFF


@cuda.jit(device=True)
def scale_of_tile(largest, powers_of_two, g):
    """The scale of a tile, given the float32 bits of its largest magnitude."""
    amax = float32_value(largest)
    if g.e2m1_values:
        return e2m1_scale(amax, g.ue8m0, g.min_exponent, g.min_scale)
    return tile_scale(amax, powers_of_two, g.min_exponent, g.min_scale)


@cuda.jit(device=True)
def store_scales(page, row, largest, powers_of_two, g):
    """Write the scales of token `row`. Called by all threads, as `largest` is complete."""
    scales, num_tiles = g.scale_start + row * g.scale_stride, g.quantized_dim // g.scale_tile
    for tile in range(cuda.threadIdx.x, g.scale_bytes if g.ue8m0 or g.e4m3_scales else num_tiles, cuda.blockDim.x):
        bits = np.int64(0)  # unused bytes of a row of scales
        if tile < num_tiles:
            bits = float32_bits(scale_of_tile(largest[tile], powers_of_two, g))
        if g.ue8m0:
            page[scales + tile] = bits >> 23  # the exponent
        elif g.e4m3_scales:
            page[scales + tile] = e4m3_byte(float32_value(bits))
        else:
            store(page, scales + 4 * tile, 4, bits)


@cuda.jit(device=True)
def counts_for_scale(magnitude, g):
    """Whether a magnitude, as float32 bits, affects a tile's scale. NaN does for e2m1: only the scale can be NaN."""
    return magnitude < INFINITY_BITS or (g.e2m1_values and magnitude > INFINITY_BITS)


@cuda.jit(device=True)
def read_value(page, row, i, g):
    """Value `i` of token `row` of a page, as float32."""
    start = row * g.row_bytes
    if i >= g.quantized_dim:
        bits = load(page, start + g.rope_offset + 2 * (i - g.quantized_dim), 2)
        return float16_value(bits) if g.float16_values else bfloat16_value(bits)
    scales = g.scale_start + row * g.scale_stride
    tile = i // g.scale_tile
    if g.ue8m0:
        scale = ue8m0_value(page[scales + tile])
    elif g.e4m3_scales:
        scale = e4m3_value(page[scales + tile])
    else:
        scale = float32_value(load(page, scales + 4 * tile, 4))
    if g.e2m1_values:
        return e2m1_value((np.int64(page[start + i // 2]) >> (4 * (i % 2))) & 0x0F) * scale
    return dequantized(page[start + i], scale)
