"""Products of matrices in shared memory, divided among the warps of a thread block.

Rows are stored in shared memory as words of two 16-bit values, in groups of 64 values. Rows are `stride_of(groups)`
words apart, four more than a row has: rows that a warp reads at once are then in different banks.

On a device a warp takes tiles of 16 x 8 elements of a product, as tensor cores do, and each of its 32 lanes has four
elements of a tile in registers: columns 2c and 2c + 1 of rows g and g + 8, where g = lane // 4 and c = lane % 4.
The order of the values in a row does not matter as long as both factors have the same order; here lane c always
reads four consecutive words. In the simulator a thread has consecutive elements, and NumPy multiplies.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..numba_common.numbers import bfloat16_value
from . import intrinsics, simulated
from .compiler import cuda
from .intrinsics import load2, load4, permute_bytes
from .launch import SIMULATED, device_function

WARPS = 8
THREADS = 8 if SIMULATED else 32 * WARPS
GROUP = 64  # values
GROUP_WORDS = GROUP // 2


def stride_of(groups: int) -> int:
    return groups * GROUP_WORDS + 4


class Scores(NamedTuple):
    """Functions of a thread for a b^T, where a has `rows` rows and b has `columns` rows of `groups` groups of values.

    Attributes:
        count: elements of a thread
        multiply: (sums, a, b, weights): sums += a b^T; with weights, each group of each row of b has a factor
        store: (sums, products, factor): store into float32 [rows, columns] in shared memory, rows `stride` apart
    """

    count: int
    stride: int
    multiply: Any
    store: Any


class Mix(NamedTuple):
    """Functions of a thread for p v, where p is float32 [rows, keys] and v has `keys` rows of `groups` groups.

    Attributes:
        count: elements of a thread
        multiply: (sums, factors, p, v, weights): sums = sums * factor of the row + p v
        store: (sums, result): store into float32 [rows, 64 * groups] in shared memory, rows `stride` apart
    """

    count: int
    stride: int
    multiply: Any
    store: Any


@functools.cache
def scores_of(rows: int, columns: int, groups: int, weighted: bool, float16: bool) -> Scores:
    return (_simulated_scores if SIMULATED else _scores)(rows, columns, groups, weighted, float16)


@functools.cache
def mix_of(rows: int, keys: int, groups: int, words: int, weighted: bool, float16: bool) -> Mix:
    """`words` is the distance between rows of v."""
    return (_simulated_mix if SIMULATED else _mix)(rows, keys, groups, words, weighted, float16)


def _scores(rows: int, columns: int, groups: int, weighted: bool, float16: bool) -> Scores:
    """A warp takes 16 of the rows, and every n-th block of 8 columns in them."""
    mma = intrinsics.mma_float16 if float16 else intrinsics.mma_bfloat16
    row_tiles = rows // 16
    column_step = 8 * WARPS // row_tiles
    tiles = columns // column_step
    count = 4 * tiles
    words, stride = stride_of(groups), columns + 8

    @device_function
    def first_of():
        """Row and column of a thread's first element, and the row of b that it loads for it."""
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        row, column = warp % row_tiles * 16 + lane // 4, warp // row_tiles * 8
        return row, column + lane % 4 * 2, column + lane // 4

    @device_function
    def multiply(sums, a, b, weights):
        # Each group's sum starts at zero: tensor cores truncate sums, float32 additions round, and a smaller sum
        # loses less.
        row, column, loaded = first_of()
        part = cuda.local.array(count, np.float32)
        for group in range(groups):
            for i in range(count):
                part[i] = 0
            for half in range(2):
                at = GROUP_WORDS * group + cuda.threadIdx.x % 4 * 8 + 4 * half
                upper, lower = load4(a, row * words + at), load4(a, (row + 8) * words + at)
                for i in range(tiles):
                    other = load4(b, (loaded + column_step * i) * words + at)
                    four = (part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3])
                    four = mma(four, (upper[0], lower[0], upper[1], lower[1]), (other[0], other[1]))
                    four = mma(four, (upper[2], lower[2], upper[3], lower[3]), (other[2], other[3]))
                    part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3] = four
            for i in range(count):
                if weighted:
                    sums[i] += part[i] * weights[group * columns + column + column_step * (i // 4) + i % 2]
                else:
                    sums[i] += part[i]

    @device_function
    def store(sums, products, factor):
        row, column, _ = first_of()
        for i in range(count):
            products[(row + i // 2 % 2 * 8) * stride + column + column_step * (i // 4) + i % 2] = sums[i] * factor

    return Scores(count, stride, multiply, store)


def _mix(rows: int, keys: int, groups: int, words: int, weighted: bool, float16: bool) -> Mix:
    """A warp takes a group of columns, in all rows or, with fewer groups than warps, in some tiles of 16 rows."""
    mma = intrinsics.mma_float16 if float16 else intrinsics.mma_bfloat16
    to_pair = intrinsics.float16_pair if float16 else intrinsics.bfloat16_pair
    row_step = WARPS // groups
    tiles = rows // 16 // row_step
    words_of_p = 8 * tiles
    p_stride, stride = keys + 8, GROUP * groups + 4

    @device_function
    def pairs_of(p, row, key, first_weight, second_weight):
        """Two weights as a pair, and for bfloat16, whose eight bits are too few, a pair of their remainders."""
        first, second = load2(p, row * p_stride + key)
        first, second = first * first_weight, second * second_weight
        pair = to_pair(first, second)
        if float16:
            return pair, pair
        return pair, to_pair(first - bfloat16_value(pair & 0xFFFF), second - bfloat16_value(pair >> 16))

    @device_function
    def multiply(sums, factors, p, v, weights):
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        group, row = warp % groups, warp // groups * 16 + lane // 4
        for tile in range(tiles):
            upper = row + 16 * row_step * tile
            factor, lower_factor = factors[upper], factors[upper + 8]
            for column in range(8):
                i = 32 * tile + 4 * column
                sums[i] *= factor
                sums[i + 1] *= factor
                sums[i + 2] *= lower_factor
                sums[i + 3] *= lower_factor
        a = cuda.local.array(words_of_p, np.uint32)
        for step in range(keys // 16):
            # A lane loads eight consecutive columns of its keys, one for each tile of eight columns.
            key = 16 * step + lane % 4 * 2
            at = key * words + group * GROUP_WORDS + lane // 4 * 4
            v0, v1 = load4(v, at), load4(v, at + words)
            v8, v9 = load4(v, at + 8 * words), load4(v, at + 9 * words)
            w0 = w1 = w8 = w9 = np.float32(1)
            if weighted:
                w0, w1 = load2(weights, group * keys + key)
                w8, w9 = load2(weights, group * keys + key + 8)
            for tile in range(tiles):
                upper = row + 16 * row_step * tile
                i = 8 * tile
                a[i], a[i + 4] = pairs_of(p, upper, key, w0, w1)
                a[i + 1], a[i + 5] = pairs_of(p, upper + 8, key, w0, w1)
                a[i + 2], a[i + 6] = pairs_of(p, upper, key + 8, w8, w9)
                a[i + 3], a[i + 7] = pairs_of(p, upper + 8, key + 8, w8, w9)
            for column in range(8):
                chosen = 0x5410 if column % 2 == 0 else 0x7632  # the lower or the upper halves of two words
                word = column // 2
                b = permute_bytes(v0[word], v1[word], chosen), permute_bytes(v8[word], v9[word], chosen)
                for tile in range(tiles):
                    i, j = 32 * tile + 4 * column, 8 * tile
                    four = (sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
                    four = mma(four, (a[j], a[j + 1], a[j + 2], a[j + 3]), b)
                    if not float16:
                        four = mma(four, (a[j + 4], a[j + 5], a[j + 6], a[j + 7]), b)
                    sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = four

    @device_function
    def store(sums, result):
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        row, first = warp // groups * 16 + lane // 4, warp % groups * GROUP + lane % 4 * 16
        for tile in range(tiles):
            upper = (row + 16 * row_step * tile) * stride + first
            lower = upper + 8 * stride
            for column in range(8):
                i = 32 * tile + 4 * column
                result[upper + column] = sums[i]
                result[upper + column + 8] = sums[i + 1]
                result[lower + column] = sums[i + 2]
                result[lower + column + 8] = sums[i + 3]

    return Mix(32 * tiles, stride, multiply, store)


def _simulated_scores(rows: int, columns: int, groups: int, weighted: bool, float16: bool) -> Scores:
    words, stride, own = stride_of(groups), columns + 8, rows // THREADS

    @device_function
    def multiply(sums, a, b, weights):
        row = cuda.threadIdx.x * own
        a = simulated.values(a[: rows * words], float16).reshape(rows, -1)[row : row + own, : groups * GROUP]
        b = simulated.values(b[: columns * words], float16).reshape(columns, -1)[:, : groups * GROUP]
        for group in range(groups):
            part = slice(group * GROUP, (group + 1) * GROUP)
            products = a[:, part] @ b[:, part].T
            if weighted:
                products *= weights[group * columns :][:columns]
            sums += products.ravel()

    @device_function
    def store(sums, products, factor):
        row = cuda.threadIdx.x * own
        for i in range(own):
            products[(row + i) * stride :][:columns] = sums[i * columns :][:columns] * factor

    return Scores(own * columns, stride, multiply, store)


def _simulated_mix(rows: int, keys: int, groups: int, words: int, weighted: bool, float16: bool) -> Mix:
    p_stride, stride, own = keys + 8, GROUP * groups + 4, rows // THREADS

    @device_function
    def multiply(sums, factors, p, v, weights):
        first = cuda.threadIdx.x * own
        v = simulated.values(v[: keys * words], float16).reshape(keys, -1)[:, : groups * GROUP]
        for i in range(own):
            mine = sums.reshape(own, groups, GROUP)[i]
            mine *= factors[first + i]
            for group in range(groups):
                p_row = p[(first + i) * p_stride :][:keys]
                if weighted:
                    p_row = p_row * weights[group * keys :][:keys]
                mine[group] += p_row @ v[:, group * GROUP : (group + 1) * GROUP]

    @device_function
    def store(sums, result):
        for i in range(own):
            row = cuda.threadIdx.x * own + i
            result[row * stride :][: GROUP * groups] = sums.reshape(own, -1)[i]

    return Mix(own * groups * GROUP, stride, multiply, store)
