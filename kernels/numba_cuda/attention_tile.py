"""Attention of a tile of queries over successive tiles of keys: functions common to the attention kernels.

A thread block holds the queries in shared memory and the sums of their outputs in registers. For each tile of keys it
loads the rows into shared memory, computes the products (products.py), converts them to weights, and adds the values
times the weights to the sums. The largest product so far is subtracted in the exponent; when it grows, the sums are
rescaled.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from .compiler import cuda
from .intrinsics import exponential
from .launch import device_function
from .log_sums import MINUS_INFINITY, larger
from .products import GROUP, THREADS, mix_of, scores_of, stride_of

SHRINKING = 16  # weights are scaled by 2^-16, so that sums of the largest bfloat16 values stay finite
ABSENT = np.int32(2**31 - 1)  # position of a masked key, beyond all queries


class Tile(NamedTuple):
    """Sizes of a tile, and offsets of its parts in shared memory, in words.

    Attributes:
        groups: groups of 64 values in a query or key
        v_groups: groups in a value
        own_v: whether v is an array; otherwise values are the first groups of the keys
        weighted: whether each group of a key has a factor, such as the scale of FP8 values
        scaled: whether each row's products are divided by a power of two, TileMemory.scales
    """

    rows: int
    keys: int
    groups: int
    v_groups: int
    own_v: bool
    weighted: bool
    float16: bool
    scaled: bool = False

    @property
    def parts(self) -> int:
        """Threads that compute a row's softmax."""
        return THREADS // self.rows

    @property
    def k_at(self) -> int:
        return self.rows * stride_of(self.groups)

    @property
    def v_at(self) -> int:
        return self.k_at + (self.keys * stride_of(self.groups) if self.own_v else 0)

    @property
    def products_at(self) -> int:
        """Start of the products, after the rows; the result overwrites the rows at the end."""
        v_words = stride_of(self.v_groups if self.own_v else self.groups)
        return max(self.v_at + self.keys * v_words, self.rows * (GROUP * self.v_groups + 4))

    @property
    def weights_at(self) -> int:
        return self.products_at + self.rows * (self.keys + 8)

    @property
    def rows_at(self) -> int:
        """Start of the rows' float32 values: one for each thread of a row, then one for the row."""
        return self.weights_at + (self.keys * self.groups if self.weighted else 0)

    @property
    def keys_at(self) -> int:
        """Start of the keys' int32 values."""
        return self.rows_at + self.rows * (self.parts + 5)

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.keys_at + 4 * self.keys)


class Attention(NamedTuple):
    """Functions of a thread, for one shape of tile.

    Attributes:
        memory: (words, floats, ints) -> TileMemory, from all shared memory viewed as uint32, float32 and int32
        score: (m, softmax_scale): products of the queries and keys in shared memory
        weigh: (m, top, total) -> top, total: products become weights. top is the row's largest product so far, total
            the sum of the weights of the thread's keys
        mix: (m, sums): add values times weights to the sums, `count` of them in a thread
        finish: (m, sums, top, total): store the result and the sums of the rows' weights in shared memory
        growing: factor that remains to be applied to the result
    """

    growing: Any
    count: int
    result_stride: int
    memory: Any
    score: Any
    weigh: Any
    mix: Any
    finish: Any


class TileMemory(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
        q, k, v: rows of words, `stride_of` their groups apart
        products: float32 of each query and key, then weights
        weights: float32 [groups, keys], factors of the groups of keys
        parts: float32 [rows, parts], exchange between the threads of a row
        factors: float32 [rows], factors that rescale the sums
        tops: float32 [rows], largest products, at the end
        totals: float32 [rows], sums of weights, at the end
        scales: float32 [rows], powers of two that divided the products, if the tile is `scaled`
        limits: int32 [rows]: a query sees keys at lower positions
        positions: int32 [keys]
        pages: int32 [keys], page of each of the next keys in the cache, or -1, and its token within the page
        tokens: int32 [keys]
        result: float32 [rows, v], overlaps q, k and v
    """

    q: Any
    k: Any
    v: Any
    products: Any
    weights: Any
    parts: Any
    factors: Any
    tops: Any
    totals: Any
    scales: Any
    limits: Any
    positions: Any
    pages: Any
    tokens: Any
    result: Any


@functools.cache
def attention_of(tile: Tile) -> Attention:
    rows, keys, parts = tile.rows, tile.keys, tile.parts
    scores = scores_of(rows, keys, tile.groups, tile.weighted, tile.float16)
    v_words = stride_of(tile.v_groups if tile.own_v else tile.groups)
    mix_part = mix_of(rows, keys, tile.v_groups, v_words, tile.weighted, tile.float16)
    k_at, v_at, products_at, weights_at = tile.k_at, tile.v_at, tile.products_at, tile.weights_at
    rows_at, keys_at = tile.rows_at, tile.keys_at
    own_at = rows_at + rows * parts
    multiply, store, stride = scores.multiply, scores.store, scores.stride
    mix_multiply, mix_store = mix_part.multiply, mix_part.store
    products_count, own_keys, scaled = scores.count, keys // parts, tile.scaled
    growing = np.float32(1 if tile.float16 else 2.0**SHRINKING)
    shrinking = np.float32(1) / growing

    @device_function
    def memory(words, floats, ints):
        return TileMemory(
            words, words[k_at:], words[v_at:], floats[products_at:], floats[weights_at:], floats[rows_at:],
            floats[own_at:], floats[own_at + rows :], floats[own_at + 2 * rows :], floats[own_at + 3 * rows :],
            ints[own_at + 4 * rows :], ints[keys_at:], ints[keys_at + keys :], ints[keys_at + 2 * keys :], floats,
        )  # fmt: skip

    @device_function
    def score(m, softmax_scale):
        sums = cuda.local.array(products_count, np.float32)
        for i in range(products_count):
            sums[i] = 0
        multiply(sums, m.q, m.k, m.weights)
        store(sums, m.products, softmax_scale)

    @device_function
    def weigh(m, top, total):
        row, part = cuda.threadIdx.x // parts, cuda.threadIdx.x % parts
        own = cuda.local.array(own_keys, np.float32)
        limit, largest = m.limits[row], MINUS_INFINITY
        for i in range(own_keys):
            key = part + parts * i
            own[i] = m.products[row * stride + key] if m.positions[key] < limit else MINUS_INFINITY
            largest = larger(largest, own[i])
        m.parts[row * parts + part] = largest
        cuda.syncthreads()
        largest = top
        for i in range(parts):
            largest = larger(largest, m.parts[row * parts + i])
        shift = np.float32(0) if largest == MINUS_INFINITY else largest
        scale = m.scales[row] if scaled else np.float32(1)
        factor = exponential((top - shift) * scale)
        total *= factor
        if part == 0:
            m.factors[row] = factor
        for i in range(own_keys):
            weight = exponential((own[i] - shift) * scale) * shrinking
            m.products[row * stride + part + parts * i] = weight
            total += weight
        return largest, total

    @device_function
    def mix(m, sums):
        mix_multiply(sums, m.factors, m.products, m.v, m.weights)

    @device_function
    def finish(m, sums, top, total):
        row, part = cuda.threadIdx.x // parts, cuda.threadIdx.x % parts
        cuda.syncthreads()  # all threads have read the keys
        mix_store(sums, m.result)
        m.parts[row * parts + part] = total
        cuda.syncthreads()
        if part == 0:
            row_total = np.float32(0)
            for i in range(parts):
                row_total += m.parts[row * parts + i]
            m.tops[row], m.totals[row] = top, row_total * growing
        cuda.syncthreads()

    return Attention(growing, mix_part.count, mix_part.stride, memory, score, weigh, mix, finish)
