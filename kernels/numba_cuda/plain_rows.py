"""Copies rows of 16-bit values from device into shared memory, 16 bytes at a time."""

import functools
from typing import Any

import numpy as np

from .compiler import cuda
from .intrinsics import read1, read2, read16, store4
from .launch import SIMULATED, device_function
from .products import THREADS, stride_of

LANES = 1 if SIMULATED else 8  # threads per row
ROWS_AT_A_TIME = THREADS // LANES


@functools.cache
def plain_rows_of(rows: int, dim: int, groups: int, aligned: bool) -> Any:
    """A thread's function that copies `rows` rows of `dim` values, a multiple of 8, into words of shared memory.

    Its arguments (source, first, count, words): it copies `count` rows of source [n, dim] from `first` on, and sets
    the other rows to zero. In shared memory rows are `stride_of(groups)` words apart.
    """
    chunks, stride = dim // 8, stride_of(groups)
    passes, steps = -(-rows // ROWS_AT_A_TIME), -(-chunks // LANES)
    word_count = 4 * passes * steps
    read = read_of(aligned, 2)

    @device_function
    def copy(source, first, present, words):
        row, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        loaded = cuda.local.array(word_count, np.uint32)  # all loads are in flight before the first store
        for j in range(passes):
            there = row + ROWS_AT_A_TIME * j < min(present, rows)
            values = source[first + row + ROWS_AT_A_TIME * j if there else 0]
            for i in range(steps):
                four = read(values, 8 * (lane + LANES * i), there and lane + LANES * i < chunks)
                at = 4 * (steps * j + i)
                loaded[at], loaded[at + 1], loaded[at + 2], loaded[at + 3] = four
        for j in range(passes):
            for i in range(steps):
                at = 4 * (steps * j + i)
                if row + ROWS_AT_A_TIME * j < rows and lane + LANES * i < chunks:
                    four = (loaded[at], loaded[at + 1], loaded[at + 2], loaded[at + 3])
                    store4(words, (row + ROWS_AT_A_TIME * j) * stride + 4 * (lane + LANES * i), four)

    return copy


@functools.cache
def word_reader(item_bytes: int) -> Any:
    """A function that reads a word at any address of a row of 1-byte or 2-byte elements."""
    read_element, count, bits = (read1, 4, 8) if item_bytes == 1 else (read2, 2, 16)

    @device_function
    def read_word(row, at, present):
        word = np.uint32(0)
        for i in range(count):
            word |= np.uint32(read_element(row, at + i, present)) << np.uint32(bits * i)
        return word

    return read_word


@functools.cache
def read_of(aligned: bool, item_bytes: int) -> Any:
    """A function that reads 16 bytes of a row as four words: at multiples of 16 if aligned, else at any address."""
    if aligned:
        return read16
    read_word, step = word_reader(item_bytes), 4 // item_bytes

    @device_function
    def read(row, at, present):
        return (
            read_word(row, at, present), read_word(row, at + step, present), read_word(row, at + 2 * step, present),
            read_word(row, at + 3 * step, present),
        )  # fmt: skip

    return read
