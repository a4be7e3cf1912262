"""RMSNorm and RoPE before and after sparse attention: a thread block takes a row and holds it in shared memory."""

import math
from typing import Any

import numpy as np

from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import (
    BFLOAT16,
    INFINITY_BITS,
    bfloat16_bits,
    bfloat16_value,
    e2m1_quantized,
    e4m3_byte,
    float32_bits,
    float32_value,
    from_float32,
    power_of_two,
    quantized,
    scale_exponent,
    to_float32,
)
from ..types.segments import HeadFactors, Insertion, RopeKind
from .compiler import cuda
from .launch import NO_PARTS, NO_VECTOR, kind_of, launch
from .rows import counts_for_scale, scale_of_tile, store, store_scales

THREADS = 128
WIDTH = 512  # values of a row in shared memory
MAX_TILES = 32  # tiles of a row that these kernels write
GROUP = 128
MIN_AMAX = np.float32(1e-10)
HADAMARD_SCALE = np.float32(128**-0.5)


def fused_q_kv_rmsnorm(qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, q_out: Any, kv_out: Any) -> None:
    for x, weight, out in ((qr, q_weight, q_out), (kv, kv_weight, kv_out)):
        launch(
            rmsnorm_kernel, len(x), THREADS, x, kind_of(x), weight, kind_of(weight), np.float32(eps), out, kind_of(out)
        )


def rmsnorm_kernel(x, kind, weight, weight_kind, eps, out, out_kind):
    """A thread block takes a row of any length."""
    total = cuda.shared.array(1, np.float32)
    token = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        total[0] = 0
    cuda.syncthreads()
    part = np.float32(0)
    for i in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        value = to_float32(x[token, i], kind)
        part += value * value
    add_in_order(total, part)
    scale = np.float32(1) / math.sqrt(total[0] / np.float32(x.shape[1]) + eps)
    for i in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        value = to_float32(x[token, i], kind) * np.float32(scale) * to_float32(weight[i], weight_kind)
        out[token, i] = from_float32(value, out_kind)


@cuda.jit(device=True)
def add_in_order(total, part):
    """Adds all threads' parts to total[0], in the order of the threads: the sum is deterministic."""
    for thread in range(cuda.blockDim.x):
        if thread == cuda.threadIdx.x:
            total[0] += part
        cuda.syncthreads()


def qnorm_rope_and_insert(q: Any, kv: Any, into: Insertion, q_out: Any) -> None:
    launch(
        qnorm_rope_insert_kernel, len(q) * (q.shape[1] + 1), THREADS, q, kv, kind_of(q), q_out, *arguments(into)
    )  # fmt: skip


def arguments(into: Insertion) -> tuple[Any, ...]:
    pages = into.pages
    return into.slots, into.positions, into.cos_sin, np.float32(into.eps), pages.bytes, geometry_of(pages)


def qnorm_rope_insert_kernel(q, kv, kind, q_out, slots, positions, cos_sin, eps, pages, g):
    """A thread block takes a head of a token; the token's last block takes its row of the cache."""
    row = cuda.shared.array(WIDTH, np.float32)
    total = cuda.shared.array(1, np.float32)
    largest = cuda.shared.array(MAX_TILES, np.int32)
    heads = q.shape[1]
    token, head = cuda.blockIdx.x // (heads + 1), cuda.blockIdx.x % (heads + 1)
    at = nearest(positions[token], len(cos_sin))
    if head == heads:
        if token >= len(slots):
            return
        slot = np.int64(slots[token])
        if slot < 0 or slot >= pages.shape[0] * g.block_size:
            return
        for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
            row[i] = to_float32(kv[token, i], kind)
        cuda.syncthreads()
        rotate(row, WIDTH, cos_sin, at, np.float32(1))
        insert_row(row, largest, pages[slot // g.block_size], slot % g.block_size, g, True)
        return
    for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
        row[i] = to_float32(q[token, head, i], kind)
    normalize(row, WIDTH, total, eps)
    rotate(row, WIDTH, cos_sin, at, np.float32(1))
    for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
        q_out[token, head, i] = from_float32(row[i], kind)


def norm_rope_and_insert(kv: Any, weight: Any | None, into: Insertion) -> None:
    weights, weight_kind = (NO_VECTOR, kind_of(kv)) if weight is None else (weight, kind_of(weight))
    rows = (kv, kind_of(kv), weights, weight_kind)
    launch(norm_rope_insert_kernel, len(into.slots), THREADS, *rows, into.round_rows, *arguments(into))


def norm_rope_insert_kernel(kv, kind, weight, weight_kind, round_rows, slots, positions, cos_sin, eps, pages, g):
    """A thread block takes a row."""
    row = cuda.shared.array(WIDTH, np.float32)
    total = cuda.shared.array(1, np.float32)
    largest = cuda.shared.array(MAX_TILES, np.int32)
    token = cuda.blockIdx.x
    slot = np.int64(slots[token])
    if slot < 0 or slot >= pages.shape[0] * g.block_size:
        return
    for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
        row[i] = to_float32(kv[token, i], kind)
    cuda.syncthreads()
    if len(weight):
        normalize(row, WIDTH, total, eps)
        for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
            row[i] = row[i] * to_float32(weight[i], weight_kind)
        cuda.syncthreads()
    rotate(row, WIDTH, cos_sin, nearest(positions[token], len(cos_sin)), np.float32(1))
    insert_row(row, largest, pages[slot // g.block_size], slot % g.block_size, g, round_rows)


def indexer_knorm_rope_and_insert(
    k: Any, weight: Any, bias: Any, into: Insertion, kind: RopeKind, hadamard: bool
) -> None:
    rows = (k, kind_of(k), weight, bias, kind_of(weight), *kind, hadamard)
    if into.cos_sin is None:
        into = into._replace(cos_sin=NO_PARTS)
    launch(knorm_rope_insert_kernel, len(into.slots), THREADS, *rows, *arguments(into))


def knorm_rope_insert_kernel(
    k, kind, weight, bias, weight_kind, rope_first, halves, rotates, slots, positions, cos_sin, eps, pages, g
):
    """A thread block takes a row."""
    row = cuda.shared.array(WIDTH, np.float32)
    total = cuda.shared.array(1, np.float32)
    largest = cuda.shared.array(MAX_TILES, np.int32)
    token, half = cuda.blockIdx.x, cos_sin.shape[1] // 2 if len(cos_sin) else 0
    slot = np.int64(slots[token])
    if slot < 0 or slot >= pages.shape[0] * g.block_size:
        return
    layer_norm(row, k[token], kind, weight, bias, weight_kind, total, eps)
    at, begin = nearest(positions[token], len(cos_sin)), 0 if rope_first else k.shape[1] - 2 * half
    for i in range(cuda.threadIdx.x, half, cuda.blockDim.x):
        low = begin + (i if halves else 2 * i)
        high = low + (half if halves else 1)
        cos, sin = float32_value(cos_sin[at, i]), float32_value(cos_sin[at, half + i])
        a, b = row[low], row[high]
        row[low] = a * cos - b * sin
        row[high] = b * cos + a * sin
    cuda.syncthreads()
    if rotates:
        hadamard(row, k.shape[1])
    insert_row(row, largest, pages[slot // g.block_size], slot % g.block_size, g, True)


def apply_rope(
    x: Any, positions: Any, cos_sin: Any | None, inverse: bool, kind: RopeKind, ssmax: HeadFactors | None, out: Any
) -> None:
    scales, biases = (NO_VECTOR, NO_VECTOR) if ssmax is None else ssmax
    launch(
        rope_kernel, x.shape[0] * x.shape[1], THREADS,
        x, kind_of(x), positions, NO_PARTS if cos_sin is None else cos_sin, np.float32(-1 if inverse else 1), *kind,
        scales, biases, out,
    )  # fmt: skip


def rope_kernel(x, kind, positions, cos_sin, direction, rope_first, halves, scales, biases, out):
    """A thread block takes a head, a thread every blockDim.x-th pair of it."""
    token, head = cuda.blockIdx.x // x.shape[1], cuda.blockIdx.x % x.shape[1]
    half = cos_sin.shape[1] // 2 if len(cos_sin) else 0
    at, begin = nearest(positions[token], len(cos_sin)), 0 if rope_first else x.shape[2] - 2 * half
    factor = np.float32(1)
    if len(scales):
        factor = head_factor(scales[head], biases[head], positions[token])
    for i in range(cuda.threadIdx.x, half, cuda.blockDim.x):
        low = begin + (i if halves else 2 * i)
        high = low + (half if halves else 1)
        cos, sin = float32_value(cos_sin[at, i]), float32_value(cos_sin[at, half + i]) * direction
        a, b = to_float32(x[token, head, low], kind) * factor, to_float32(x[token, head, high], kind) * factor
        out[token, head, low] = from_float32(a * cos - b * sin, kind)
        out[token, head, high] = from_float32(b * cos + a * sin, kind)
    for i in range(cuda.threadIdx.x, x.shape[2] - 2 * half, cuda.blockDim.x):
        j = i + 2 * half if rope_first else i
        if len(scales):
            out[token, head, j] = from_float32(to_float32(x[token, head, j], kind) * factor, kind)
        else:
            out[token, head, j] = x[token, head, j]


@cuda.jit(device=True)
def head_factor(scale, bias, position):
    """SSMax's factor of a head at a position; float32 values as bits."""
    logarithm = np.float32(math.log(np.float32(max(np.int64(position), np.int64(0)) + 1)))
    return np.float32(float32_value(scale) * logarithm + float32_value(bias))


def inverse_rope_and_quantize(
    o: Any, positions: Any, cos_sin: Any, powers_of_two: bool, values: Any, scales: Any
) -> None:
    launch(
        inverse_rope_quantize_kernel, o.shape[0] * o.shape[1], THREADS,
        o, kind_of(o), positions, cos_sin, powers_of_two, values.view(np.uint8), scales,
    )  # fmt: skip


def inverse_rope_quantize_kernel(o, kind, positions, cos_sin, powers_of_two, values, scales):
    """A thread block takes a head."""
    row = cuda.shared.array(WIDTH, np.float32)
    largest = cuda.shared.array(MAX_TILES, np.int32)
    token, head = cuda.blockIdx.x // o.shape[1], cuda.blockIdx.x % o.shape[1]
    per_group = o.shape[1] // values.shape[0]
    group, first = head // per_group, head % per_group * WIDTH
    for tile in range(cuda.threadIdx.x, MAX_TILES, cuda.blockDim.x):
        largest[tile] = np.int32(float32_bits(MIN_AMAX))
    for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
        row[i] = to_float32(o[token, head, i], kind)
    cuda.syncthreads()
    rotate(row, WIDTH, cos_sin, nearest(positions[token], len(cos_sin)), np.float32(-1))
    for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
        if kind == BFLOAT16:
            row[i] = bfloat16_value(bfloat16_bits(row[i]))
        magnitude = float32_bits(row[i]) & 0x7FFFFFFF
        if magnitude < INFINITY_BITS:
            cuda.atomic.max(largest, i // GROUP, np.int32(magnitude))
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, WIDTH, cuda.blockDim.x):
        amax = float32_value(largest[i // GROUP])
        scale = power_of_two(scale_exponent(amax, -126)) if powers_of_two else amax / np.float32(448)
        if i % GROUP == 0:
            scales[group, token, (first + i) // GROUP] = float32_bits(scale)
        values[group, token, first + i] = e4m3_byte(row[i] / scale)


@cuda.jit(device=True)
def nearest(position, count):
    return min(max(np.int64(position), 0), count - 1)


@cuda.jit(device=True)
def normalize(row, width, total, eps):
    """row /= sqrt(mean(row^2) + eps); each thread has written its values before."""
    if cuda.threadIdx.x == 0:
        total[0] = 0
    cuda.syncthreads()
    part = np.float32(0)
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        part += row[i] * row[i]
    add_in_order(total, part)
    scale = np.float32(1) / math.sqrt(total[0] / np.float32(width) + eps)
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[i] = row[i] * np.float32(scale)
    cuda.syncthreads()


@cuda.jit(device=True)
def layer_norm(row, values, kind, weight, bias, weight_kind, total, eps):
    """The LayerNorm of a row of any float type, in shared memory. Called by all threads."""
    width = len(values)
    if cuda.threadIdx.x == 0:
        total[0] = 0
    cuda.syncthreads()
    part = np.float32(0)
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[i] = to_float32(values[i], kind)
        part += row[i]
    add_in_order(total, part)
    mean = np.float32(total[0] / np.float32(width))
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[i] = row[i] - mean
    cuda.syncthreads()
    normalize(row, width, total, eps)
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[i] = row[i] * to_float32(weight[i], weight_kind) + to_float32(bias[i], weight_kind)
    cuda.syncthreads()


@cuda.jit(device=True)
def hadamard(row, width):
    """The orthonormal Hadamard transform of a row, rounded to bfloat16 before. Called by all threads."""
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[i] = bfloat16_value(bfloat16_bits(row[i]))
    cuda.syncthreads()
    step = 1
    while step < width:
        for pair in range(cuda.threadIdx.x, width // 2, cuda.blockDim.x):
            i = pair // step * 2 * step + pair % step
            a, b = row[i], row[i + step]
            row[i], row[i + step] = a + b, a - b
        cuda.syncthreads()
        step *= 2
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        row[i] = row[i] * HADAMARD_SCALE
    cuda.syncthreads()


@cuda.jit(device=True)
def rotate(row, width, cos_sin, at, direction):
    """Rotate the last values of `row` in pairs of neighbours by row `at` of the table, as float32 bits."""
    half = cos_sin.shape[1] // 2
    first = width - 2 * half
    for pair in range(cuda.threadIdx.x, half, cuda.blockDim.x):
        cos, sin = float32_value(cos_sin[at, pair]), float32_value(cos_sin[at, half + pair]) * direction
        a, b = row[first + 2 * pair], row[first + 2 * pair + 1]
        row[first + 2 * pair] = a * cos - b * sin
        row[first + 2 * pair + 1] = b * cos + a * sin
    cuda.syncthreads()


@cuda.jit(device=True)
def insert_row(values, largest, page, row, g, rounded):
    """Write a row into token `row` of a page, through bfloat16. Called by all threads.

    Args:
        rounded: whether the values that the cache quantises are rounded to bfloat16, too
    """
    for tile in range(cuda.threadIdx.x, MAX_TILES, cuda.blockDim.x):
        largest[tile] = 0
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, g.head_dim, cuda.blockDim.x):
        if rounded:
            values[i] = bfloat16_value(bfloat16_bits(values[i]))
        magnitude = float32_bits(values[i]) & 0x7FFFFFFF
        if i < g.quantized_dim and counts_for_scale(magnitude, g):
            cuda.atomic.max(largest, i // g.scale_tile, np.int32(magnitude))
    cuda.syncthreads()
    start = row * g.row_bytes
    store_scales(page, row, largest, True, g)
    if g.e2m1_values:
        for i in range(cuda.threadIdx.x, g.quantized_bytes, cuda.blockDim.x):
            scale = scale_of_tile(largest[2 * i // g.scale_tile], True, g)
            low, high = e2m1_quantized(values[2 * i], scale), e2m1_quantized(values[2 * i + 1], scale)
            page[start + i] = low | (high << 4)
        return
    for i in range(cuda.threadIdx.x, g.head_dim, cuda.blockDim.x):
        if i < g.quantized_dim:
            scale = scale_of_tile(largest[i // g.scale_tile], True, g)
            page[start + i] = quantized(values[i], scale)
        else:
            store(page, start + g.rope_offset + 2 * (i - g.quantized_dim), 2, bfloat16_bits(values[i]))
