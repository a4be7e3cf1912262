"""Copies rows of latent caches into shared memory: 16 bytes per load, all loads of a thread in flight at once.

FP8 values become 16-bit ones, times a power of two. The rest of their scale, a float32 near 1, multiplies the products
instead: so no scale is rounded, however large or small.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...layout import CacheLayout
from . import intrinsics
from .attention_tile import ABSENT, Tile
from .compiler import cuda
from .intrinsics import permute_bytes, read1, read4, store4
from .launch import device_function
from .numbers import float32_bits, float32_value, ue8m0_value
from .plain_rows import LANES, ROWS_AT_A_TIME, read_of, word_reader
from .products import GROUP, THREADS, stride_of

LEAST_EXPONENT, LARGEST_EXPONENT = -100, 7  # limits of that power of two
E4M3_NAN, SIGNS, ONES = 0x7F7F7F7F, 0x80808080, 0x01010101


class LatentRows(NamedTuple):
    """Functions of a thread that copy the rows of a tile of keys.

    word_count, scale_count  sizes of the arrays in registers
    prepare  (m): set what is constant for all tiles
    load     (m, words, scales, pages, scale_start, extra_pages, extra_scale_start, extra_from): the rows of m.pages
             and m.tokens from device memory into registers; from key `extra_from` on they are in the second cache
    store    (m, words, scales): from registers into m.k, m.weights and m.positions
    """

    word_count: int
    scale_count: int
    prepare: Any
    load: Any
    store: Any


@functools.cache
def latent_rows_of(tile: Tile, layout: CacheLayout, aligned: bool) -> LatentRows:
    keys, weighted = tile.keys, tile.weighted
    row_bytes, rope_offset, scale_tile = layout.row_bytes, layout.rope_offset, layout.scale_tile
    scale_stride, ue8m0 = layout.scale_stride, layout.scale_type == "ue8m0"
    quantized_dim, stride = layout.quantized_dim, stride_of(tile.groups)
    quantized_chunks = quantized_dim // 16
    chunks = quantized_chunks + (layout.head_dim - quantized_dim) // 8
    rope_start = rope_offset if quantized_dim else 0
    passes, steps = keys // ROWS_AT_A_TIME, -(-chunks // LANES)
    count = passes * steps
    plain_offset = rope_start - 16 * quantized_chunks
    tile_chunks, group_chunks = max(scale_tile // 16, 1), GROUP // 16
    first_plain, plain_groups = quantized_dim // GROUP, tile.groups - quantized_dim // GROUP
    read, read_scale = read_of(aligned, 1), read4 if aligned else word_reader(1)
    to_words, plain_factor = words_of(tile.float16), e4m3_factor(tile.float16)

    @device_function
    def prepare(m):
        if weighted:
            for i in range(cuda.threadIdx.x, keys * plain_groups, THREADS):
                m.weights[first_plain * keys + i] = 1

    @device_function
    def load(m, words, scales, pages, scale_start, extra_pages, extra_scale_start, extra_from):
        lane = cuda.threadIdx.x % LANES
        for j in range(passes):
            key = cuda.threadIdx.x // LANES + ROWS_AT_A_TIME * j
            page, token = m.pages[key], m.tokens[key]
            present = page >= 0
            if key < extra_from:
                row, scale_at = pages[max(page, 0)], scale_start
            else:
                row, scale_at = extra_pages[max(page, 0)], extra_scale_start
            scale_at += token * scale_stride
            for i in range(steps):
                chunk, k = lane + LANES * i, steps * j + i
                at = token * row_bytes + 16 * chunk + (0 if chunk < quantized_chunks else plain_offset)
                four = read(row, at, present and chunk < chunks)
                words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = four
                if weighted:
                    scaled, tile = present and chunk < quantized_chunks, chunk // tile_chunks
                    if ue8m0:
                        scales[k] = ue8m0_value(read1(row, scale_at + tile, scaled))
                    else:
                        scales[k] = float32_value(read_scale(row, scale_at + 4 * tile, scaled))

    @device_function
    def store(m, words, scales):
        lane = cuda.threadIdx.x % LANES
        for j in range(passes):
            key = cuda.threadIdx.x // LANES + ROWS_AT_A_TIME * j
            present = m.pages[key] >= 0
            for i in range(steps):
                chunk, k = lane + LANES * i, steps * j + i
                four = (words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
                if chunk < quantized_chunks:
                    factor = plain_factor
                    if weighted:
                        factor, weight = split_scale(scales[k])
                        if chunk % group_chunks == 0:
                            m.weights[chunk // group_chunks * keys + key] = weight if present else 1
                    at = key * stride + 8 * chunk
                    store4(m.k, at, to_words(four[0], factor) + to_words(four[1], factor))
                    store4(m.k, at + 4, to_words(four[2], factor) + to_words(four[3], factor))
                elif chunk < chunks:
                    store4(m.k, key * stride + 4 * quantized_chunks + 4 * chunk, four)
            if lane == 0:
                m.positions[key] = 0 if present else ABSENT

    return LatentRows(4 * count, count if weighted else 1, prepare, load, store)


@device_function
def split_scale(scale):
    """Splits a float32 into a power of two, as a bfloat16 pair corrected for `words_of`, and the remaining factor."""
    exponent = ((float32_bits(scale) >> 23) & 0xFF) - 127
    exponent = min(max(exponent, LEAST_EXPONENT), LARGEST_EXPONENT)
    return ((exponent + 120 + 127) << 7) * 0x00010001, scale * float32_value((127 - exponent) << 23)


def e4m3_factor(float16: bool) -> Any:
    """Factor, as a pair, that corrects the values of `words_of`."""
    return np.uint32(((8 + 15) << 10 if float16 else (120 + 127) << 7) * 0x00010001)


@functools.cache
def words_of(float16: bool) -> Any:
    """A function that converts a word of four e4m3 bytes to two words of pairs, times a pair of factors.

    It moves the bytes' bits to the sign, exponent and fraction of the 16-bit format, which gives the values times
    2^-120 (2^-8 in float16), subnormal ones included; the factor corrects this.
    """
    shift = 1 if float16 else 4
    low_bits = 0x01010101 if float16 else 0x0F0F0F0F
    high_bits = E4M3_NAN ^ low_bits
    multiply = intrinsics.multiply_float16 if float16 else intrinsics.multiply_bfloat16

    @device_function
    def to_words(word, factor):
        nan = ((word & E4M3_NAN) + ONES) & SIGNS  # the highest bit of a NaN's byte
        high = (word & SIGNS) | ((word & high_bits) >> shift) | (nan - (nan >> 4))
        low = (word & low_bits) << (8 - shift)
        return multiply(permute_bytes(low, high, 0x5140), factor), multiply(permute_bytes(low, high, 0x7362), factor)

    return to_words
