"""Products of 16-bit matrices."""

import functools
from typing import Any

import numpy as np

from ..numba_common.numbers import (
    e4m3_byte,
    e4m3_value,
    float32_bits,
    float32_value,
    flushed,
    from_float32,
    power_of_two,
    scale_exponent,
    to_float32,
)
from ..types.projection import BlockScaledProduct
from .compiler import cuda, float32, uint32
from .launch import SIMULATED, kind_of, launch
from .products import GROUP_WORDS, THREADS, scores_of, stride_of

ROWS, COLUMNS = (8, 16) if SIMULATED else (32, 64)  # of a tile of the product
TOGETHER = 8  # tokens that a thread block multiplies with a row of block-scaled weights
QUANTIZED, MIN_AMAX, INFINITY_BITS = 128, np.float32(1e-10), 0x7F800000
GROUPS = 2  # depth of a tile of the factors, in groups of 64 values


def batched_product(a: Any, b: Any, out: Any) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; strides are arbitrary."""
    batch, m, n = out.shape
    tiles = -(-m // ROWS) * -(-n // COLUMNS)
    shared_bytes = 4 * (ROWS + COLUMNS) * stride_of(GROUPS) + 4 * ROWS * (COLUMNS + 8)
    kernel = product_kernel_of(out.dtype == np.float16)
    launch(kernel, batch * tiles, THREADS, a, b, out, kind_of(out), shared_bytes=shared_bytes)


@functools.cache
def product_kernel_of(float16: bool) -> Any:
    count, product_stride, multiply, store = scores_of(ROWS, COLUMNS, GROUPS, False, float16)
    words, stride = GROUPS * GROUP_WORDS, stride_of(GROUPS)
    b_at, products_at = ROWS * stride, (ROWS + COLUMNS) * stride

    def product_kernel(a, b, out, kind):
        """A thread block takes a tile of a matrix; its threads load the factors' tiles by pairs, strided."""
        shared, floats = cuda.shared.array(0, uint32), cuda.shared.array(0, float32)
        shared_a, shared_b, products = shared, shared[b_at:], floats[products_at:]
        m, n, k = out.shape[1], out.shape[2], a.shape[2]
        across = (n + COLUMNS - 1) // COLUMNS
        tiles = (m + ROWS - 1) // ROWS * across
        matrix, tile = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles
        row, column = tile // across * ROWS, tile % across * COLUMNS
        sums = cuda.local.array(count, np.float32)
        for i in range(count):
            sums[i] = 0
        for start in range(0, k, 2 * words):
            cuda.syncthreads()
            for i in range(cuda.threadIdx.x, ROWS * words, THREADS):
                r, d = row + i // words, start + i % words * 2
                first = a[matrix, r, d] if r < m and d < k else 0
                second = a[matrix, r, d + 1] if r < m and d + 1 < k else 0
                shared_a[i // words * stride + i % words] = np.int64(first) | np.int64(second) << 16
            for i in range(cuda.threadIdx.x, COLUMNS * words, THREADS):
                c, d = column + i % COLUMNS, start + i // COLUMNS * 2
                first = b[matrix, d, c] if c < n and d < k else 0
                second = b[matrix, d + 1, c] if c < n and d + 1 < k else 0
                shared_b[i % COLUMNS * stride + i // COLUMNS] = np.int64(first) | np.int64(second) << 16
            cuda.syncthreads()
            multiply(sums, shared_a, shared_b, floats)
        store(sums, products, np.float32(1))
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, ROWS * COLUMNS, THREADS):
            r, c = i // COLUMNS, i % COLUMNS
            if row + r < m and column + c < n:
                out[matrix, row + r, column + c] = from_float32(products[r * product_stride + c], kind)

    return product_kernel


def block_scaled_product(args: BlockScaledProduct) -> None:
    x, weight, scales, block_rows, block_columns, out, *_ = args
    groups, tokens, rows = out.shape
    launch(
        row_kernel, groups * rows * -(-tokens // TOGETHER), THREADS, x, kind_of(x), weight, scales, block_rows,
        block_columns, out, kind_of(out),
    )  # fmt: skip


def row_kernel(x, x_kind, weight, scales, block_rows, block_columns, out, out_kind):
    """A thread block takes a row of weights and some tokens, a thread every blockDim.x-th column."""
    sums = cuda.local.array(TOGETHER, np.float32)
    shared = cuda.shared.array((TOGETHER, THREADS), float32)
    tokens, rows, columns = out.shape[1], weight.shape[1], weight.shape[2]
    tiles = (tokens + TOGETHER - 1) // TOGETHER
    at, row = cuda.blockIdx.x // rows, cuda.blockIdx.x % rows
    group, first = at // tiles, at % tiles * TOGETHER
    count = min(tokens - first, TOGETHER)
    for i in range(TOGETHER):
        sums[i] = 0
    for k in range(cuda.threadIdx.x, columns, THREADS):
        value = e4m3_value(np.int64(weight[group, row, k]))
        value *= flushed(to_float32(np.int64(scales[group, row // block_rows, k // block_columns]), 0))
        for i in range(count):
            sums[i] += value * to_float32(np.int64(x[group, first + i, k]), x_kind)
    for i in range(count):
        shared[i, cuda.threadIdx.x] = sums[i]
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, count, THREADS):
        total = np.float32(0)
        for thread in range(THREADS):
            total += shared[i, thread]
        out[group, first + i, row] = from_float32(total, out_kind)


def dequantize_blocks(weight: Any, scales: Any, block_rows: int, block_columns: int, out: Any) -> None:
    """out [n, N, K] is each code of [n, N, K] times its block's scale."""
    blocks = out.shape[0] * out.shape[1]
    launch(dequantize_kernel, blocks, THREADS, weight, scales, block_rows, block_columns, out, kind_of(out))


def quantize_groups(x: Any, values: Any, scales: Any) -> None:
    """e4m3 values [n, M, K] of x [n, M, K], and scales [n, M, K / 128], powers of two."""
    groups, tokens, columns = x.shape
    blocks = groups * tokens * (columns // QUANTIZED)
    launch(quantize_kernel, blocks, THREADS, x, kind_of(x), values.view(np.uint8), scales)


def quantize_kernel(x, kind, values, scales):
    """A thread block takes 128 values."""
    largest = cuda.shared.array(1, np.int32)
    parts = x.shape[2] // QUANTIZED
    at, part = cuda.blockIdx.x // parts, cuda.blockIdx.x % parts
    group, token, first = at // x.shape[1], at % x.shape[1], part * QUANTIZED
    if cuda.threadIdx.x == 0:
        largest[0] = np.int32(float32_bits(MIN_AMAX))
    cuda.syncthreads()
    for k in range(first + cuda.threadIdx.x, first + QUANTIZED, cuda.blockDim.x):
        magnitude = float32_bits(to_float32(np.int64(x[group, token, k]), kind)) & 0x7FFFFFFF
        if magnitude < INFINITY_BITS:
            cuda.atomic.max(largest, 0, np.int32(magnitude))
    cuda.syncthreads()
    scale = power_of_two(scale_exponent(float32_value(largest[0]), -126))
    if cuda.threadIdx.x == 0:
        scales[group, token, part] = float32_bits(scale)
    for k in range(first + cuda.threadIdx.x, first + QUANTIZED, cuda.blockDim.x):
        values[group, token, k] = e4m3_byte(to_float32(np.int64(x[group, token, k]), kind) / scale)


def fp8_product(
    values: Any,
    x_scales: Any,
    weight: Any,
    scales: Any,
    block_rows: int,
    block_columns: int,
    out: Any,
    out_scales: Any = None,
) -> bool:
    """Returns False: this backend multiplies dequantised values."""
    return False


def dequantize_kernel(weight, scales, block_rows, block_columns, out, kind):
    group, row = cuda.blockIdx.x // weight.shape[1], cuda.blockIdx.x % weight.shape[1]
    for k in range(cuda.threadIdx.x, weight.shape[2], cuda.blockDim.x):
        scale = to_float32(np.int64(scales[group, row // block_rows, k // block_columns]), 0)
        out[group, row, k] = from_float32(e4m3_value(np.int64(weight[group, row, k])) * scale, kind)
