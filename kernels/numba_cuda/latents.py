"""The compressor of V4.1: a thread block takes a token, a thread every blockDim.x-th channel of its row."""

import math

import numpy as np

from ..numba_common.numbers import bfloat16_bits, bfloat16_value, float32_bits, float32_value, from_float32, to_float32
from ..types.compressor import LatentRows
from .compiler import cuda
from .launch import NO_PARTS, NO_VECTOR, kind_of, launch
from .norm_rope import THREADS, WIDTH, normalize
from .rows import find_request

DIM = 512
NO_STATE = np.empty((0, 1, 0), np.float32)


def compress_latents(rows: LatentRows) -> None:
    kv_score, kind = rows.kv_score, kind_of(rows.kv_score)
    restart = (NO_PARTS, NO_VECTOR) if rows.restart_rows is None else (rows.restart_rows, rows.restart_positions)
    launch(
        pool_kernel, len(rows.slots), THREADS,
        kv_score, kind, rows.norm_weight, kind_of(rows.norm_weight), rows.slots, rows.latents, kind_of(rows.latents),
        NO_VECTOR if rows.positions is None else rows.positions,
        NO_VECTOR if rows.query_start_loc is None else rows.query_start_loc,
        NO_STATE if rows.state is None else rows.state, *restart, np.float32(rows.eps), rows.round_pooled,
    )  # fmt: skip
    if rows.state is not None:  # after all rows of the rings are read
        launch(
            save_kernel, len(rows.slots), THREADS,
            kv_score, kind, rows.slots, rows.positions, rows.query_start_loc, rows.state, restart[1],
        )  # fmt: skip


def pool_kernel(
    kv_score, kind, weight, weight_kind, slots, latents, out_kind, positions, starts, state, restart_rows,
    restart_positions, eps, round_pooled,
):  # fmt: skip
    row = cuda.shared.array(WIDTH, np.float32)
    total = cuda.shared.array(1, np.float32)
    token, capacity = cuda.blockIdx.x, state.shape[1]
    slot = np.int64(slots[token])
    if slot < 0:
        return
    pairs = len(positions) > 0
    position, first, ring, again, keeps = np.int64(0), np.int64(token), np.int64(0), False, False
    if pairs:
        request, position = find_request(starts, token), np.int64(positions[token])
        if request < 0 or slot >= state.shape[0] * capacity or position < 0 or position % 2 == 0:
            return
        first, ring = max(np.int64(starts[request]), np.int64(0)), slot // capacity
        if len(restart_positions) > 0 and token == first:
            again = restart_positions[ring] == position
            keeps = not again and min(np.int64(starts[request + 1]), np.int64(len(slots))) - first >= capacity
    for i in range(cuda.threadIdx.x, DIM, cuda.blockDim.x):
        mean = to_float32(np.int64(kv_score[token, i]), kind)
        if pairs:
            b = to_float32(np.int64(kv_score[token, DIM + i]), kind)
            if token > first:
                other = to_float32(np.int64(kv_score[token - 1, i]), kind)
                a = to_float32(np.int64(kv_score[token - 1, DIM + i]), kind)
            elif again:
                other = float32_value(np.int64(restart_rows[ring, i]))
                a = float32_value(np.int64(restart_rows[ring, DIM + i]))
            else:
                other = float32_value(np.int64(state[ring, (position - 1) % capacity, i]))
                a = float32_value(np.int64(state[ring, (position - 1) % capacity, DIM + i]))
                if keeps:
                    restart_rows[ring, i] = state[ring, (position - 1) % capacity, i]
                    restart_rows[ring, DIM + i] = state[ring, (position - 1) % capacity, DIM + i]
            top = max(a, b)
            if a != a or b != b:
                top = a + b  # NaN
            base = np.float32(0) if top == -np.inf else top
            first_weight, second_weight = np.float32(math.exp(a - base)), np.float32(math.exp(b - base))
            weights = first_weight + second_weight
            mean = first_weight * other + second_weight * mean
            mean = mean / weights if weights != 0 else np.float32(0)
        if round_pooled:
            mean = bfloat16_value(bfloat16_bits(np.float32(mean)))
        row[i] = mean
    normalize(row, DIM, total, eps)
    for i in range(cuda.threadIdx.x, DIM, cuda.blockDim.x):
        latents[token, i] = from_float32(np.float32(row[i] * to_float32(np.int64(weight[i]), weight_kind)), out_kind)


def save_kernel(kv_score, kind, slots, positions, starts, state, restart_positions):
    token, capacity = cuda.blockIdx.x, state.shape[1]
    most, request, slot = state.shape[0] * capacity, find_request(starts, token), np.int64(slots[token])
    if request < 0 or slot < 0 or slot >= most:
        return
    start = max(np.int64(starts[request]), np.int64(0))
    stop = min(np.int64(starts[request + 1]), np.int64(len(slots)))
    first_slot = np.int64(slots[start])
    if token == start and len(restart_positions) > 0 and cuda.threadIdx.x == 0:
        position = np.int64(positions[token])
        is_odd = position > 0 and position % 2 == 1
        if not is_odd or restart_positions[slot // capacity] != position:
            keeps = is_odd and stop - start >= capacity
            restart_positions[slot // capacity] = position if keeps else np.int64(0)
    if token < stop - capacity or first_slot < 0 or first_slot >= most:
        return
    for i in range(cuda.threadIdx.x, 2 * DIM, cuda.blockDim.x):
        value = to_float32(np.int64(kv_score[token, i]), kind)
        state[slot // capacity, slot % capacity, i] = float32_bits(value)
