"""Copies rows of latent caches into shared memory: 16 bytes per load, all loads of a thread in flight at once.

FP8 values become 16-bit values, times a power of two. The remaining factor of their scale, a float32 near 1, multiplies
the products instead: no scale is rounded, however large or small. V4.1's rows, FP8 and FP4, have several scales in a
group of values: they become bfloat16 values times their scale, which is exact.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ...layout import CacheLayout
from ..numba_common.numbers import e4m3_value, float32_bits, float32_value, ue8m0_value
from . import intrinsics
from .attention_tile import ABSENT, Tile
from .compiler import cuda
from .intrinsics import permute_bytes, read1, read4, store4
from .launch import device_function
from .plain_rows import LANES, ROWS_AT_A_TIME, read_of, word_reader
from .products import GROUP, GROUP_WORDS, THREADS, stride_of

LEAST_EXPONENT, LARGEST_EXPONENT = -100, 7  # limits of the power of two
E4M3_NAN, SIGNS, ONES = 0x7F7F7F7F, 0x80808080, 0x01010101
E2M1_MAGNITUDES = 0x07070707


class LatentRows(NamedTuple):
    """Functions of a thread that copy the rows of a tile of keys.

    Attributes:
        word_count, scale_count: sizes of the arrays in registers
        prepare: (m): set values that are constant for all tiles
        load: (m, words, scales, pages, scale_start, extra_pages, extra_scale_start, extra_from): load the rows of
            m.pages and m.tokens into registers; keys from `extra_from` on are in the second cache
        store: (m, words, scales): store registers into m.k, m.weights and m.positions
    """

    word_count: int
    scale_count: int
    prepare: Any
    load: Any
    store: Any


def latent_rows_of(tile: Tile, formats: tuple[CacheLayout, CacheLayout], aligned: bool) -> LatentRows:
    """For the formats of two caches, which are equal unless their scales are fine."""
    return fine_rows_of(tile, formats, aligned) if formats[0].has_fine_scales else rows_of(tile, formats[0], aligned)


@functools.cache
def fine_rows_of(tile: Tile, formats: tuple[CacheLayout, CacheLayout], aligned: bool) -> LatentRows:
    keys, stride, chunks = tile.keys, stride_of(tile.groups), formats[0].quantized_dim // 16
    passes, steps = keys // ROWS_AT_A_TIME, -(-chunks // LANES)
    count = passes * steps
    load_first, load_second = (chunk_loader(layout, aligned) for layout in formats)
    to_words, plain_factor = words_of(False), e4m3_factor(False)
    multiply = intrinsics.multiply_bfloat16

    @device_function
    def prepare(m):
        pass

    @device_function
    def load(m, words, scales, pages, scale_start, extra_pages, extra_scale_start, extra_from):
        lane = cuda.threadIdx.x % LANES
        for j in range(passes):
            key = cuda.threadIdx.x // LANES + ROWS_AT_A_TIME * j
            page, token = m.pages[key], m.tokens[key]
            for i in range(steps):
                chunk, k = lane + LANES * i, steps * j + i
                present = page >= 0 and chunk < chunks
                if key < extra_from:
                    four, scale = load_first(pages[max(page, 0)], token, chunk, scale_start, present)
                else:
                    four, scale = load_second(extra_pages[max(page, 0)], token, chunk, extra_scale_start, present)
                words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = four
                scales[k] = scale

    @device_function
    def store(m, words, scales):
        lane = cuda.threadIdx.x % LANES
        for j in range(passes):
            key = cuda.threadIdx.x // LANES + ROWS_AT_A_TIME * j
            for i in range(steps):
                chunk, k = lane + LANES * i, steps * j + i
                if chunk < chunks:
                    factor = np.uint32((float32_bits(scales[k]) >> 16) * 0x00010001)  # exact: few bits, or NaN
                    for n in range(2):
                        a, b = to_words(words[4 * k + 2 * n], plain_factor)
                        c, d = to_words(words[4 * k + 2 * n + 1], plain_factor)
                        four = (multiply(a, factor), multiply(b, factor), multiply(c, factor), multiply(d, factor))
                        store4(m.k, key * stride + 8 * chunk + 4 * n, four)
            if lane == 0:
                m.positions[key] = 0 if m.pages[key] >= 0 else ABSENT

    return LatentRows(4 * count, count, prepare, load, store)


@functools.cache
def chunk_loader(layout: CacheLayout, aligned: bool) -> Any:
    """A function (row, token, chunk, scale_start, present) -> 16 e4m3 values as four words, and their scale."""
    row_bytes, scale_stride, scale_tile = layout.row_bytes, layout.scale_stride, layout.scale_tile
    e2m1_values, e4m3_scales = layout.value_type == "e2m1", layout.scale_type == "e4m3"
    read, read_word = read_of(aligned, 1), read4 if aligned else word_reader(1)

    @device_function
    def load(row, token, chunk, scale_start, present):
        stored = read1(row, scale_start + token * scale_stride + 16 * chunk // scale_tile, present)
        scale = e4m3_value(stored) if e4m3_scales else ue8m0_value(stored)
        if e2m1_values:
            at = token * row_bytes + 8 * chunk
            first, second = e2m1_to_e4m3(read_word(row, at, present))
            third, fourth = e2m1_to_e4m3(read_word(row, at + 4, present))
            return (first, second, third, fourth), scale * np.float32(64)
        return read(row, token * row_bytes + 16 * chunk, present), scale

    return load


@device_function
def e2m1_to_e4m3(codes):
    """Eight e2m1 codes as two words of e4m3 bytes; their values are multiplied by 2^-6."""
    even = ((codes << 4) & SIGNS) | ((codes & E2M1_MAGNITUDES) << 2)
    odd = (codes & SIGNS) | (((codes >> 4) & E2M1_MAGNITUDES) << 2)
    return permute_bytes(even, odd, 0x5140), permute_bytes(even, odd, 0x7362)


@functools.cache
def rows_of(tile: Tile, layout: CacheLayout, aligned: bool) -> LatentRows:
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
    rows, row_words, padding = tile.rows, layout.head_dim // 2, tile.groups * GROUP_WORDS - layout.head_dim // 2
    read, read_scale = read_of(aligned, 1), read4 if aligned else word_reader(1)
    to_words, plain_factor = words_of(tile.float16), e4m3_factor(tile.float16)

    @device_function
    def prepare(m):
        for i in range(cuda.threadIdx.x, (rows + keys) * padding, THREADS):  # the last group of a row may be partial
            row, at = i // max(padding, 1), row_words + i % max(padding, 1)
            if row < rows:
                m.q[row * stride + at] = 0
            else:
                m.k[(row - rows) * stride + at] = 0
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
    """Splits a float32 into a power of two, a bfloat16 pair with the correction of `words_of`, and a factor near 1."""
    exponent = ((float32_bits(scale) >> 23) & 0xFF) - 127
    exponent = min(max(exponent, LEAST_EXPONENT), LARGEST_EXPONENT)
    return ((exponent + 120 + 127) << 7) * 0x00010001, scale * float32_value((127 - exponent) << 23)


def e4m3_factor(float16: bool) -> Any:
    """A pair of equal factors that correct the values of `words_of`."""
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
