"""Intrinsics that Numba lacks: 16 bytes at a time, pairs of 16-bit values, and tensor cores.

A *word* is 32 bits: two 16-bit values, the first in the low half, or four bytes. Where rows are read, `at` counts
elements; without `present` nothing is read and the result is zero.

    load4(words, at)               four words of shared memory from `at` on, a multiple of four
    load2(values, at)              two float32 of shared memory from `at` on, which is even
    store4(words, at, four)        four words into shared memory from `at` on, a multiple of four
    read1, read2, read4(row, at, present)   an integer of 1, 2 or 4 bytes of a row in device memory
    read16(row, at, present)       16 bytes as four words
    permute_bytes(x, y, selection) the bytes of x and y selected by the hexadecimal digits (y's are 4 to 7), as a word
    multiply_*(x, y)               a pair, the product of two pairs value by value
    *_pair(first, second)          two float32 rounded to a pair
    mma_*(sums, a, b)              a warp's sums [16, 8] += a [16, 16] b [16, 8], in the registers of the PTX manual
    exponential(x), logarithm(x)   exp and the natural logarithm of a float32
"""

import importlib
from typing import Any

from .launch import SIMULATED

_found: Any = importlib.import_module(".simulated" if SIMULATED else ".ptx", __package__)

load4, load2, store4 = _found.load4, _found.load2, _found.store4
read1, read2, read4, read16 = _found.read1, _found.read2, _found.read4, _found.read16
permute_bytes = _found.permute_bytes
multiply_bfloat16, multiply_float16 = _found.multiply_bfloat16, _found.multiply_float16
bfloat16_pair, float16_pair = _found.bfloat16_pair, _found.float16_pair
mma_bfloat16, mma_float16 = _found.mma_bfloat16, _found.mma_float16
exponential, logarithm = _found.exponential, _found.logarithm
