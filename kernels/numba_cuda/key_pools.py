"""Pooled index keys: a thread block takes the key that a token completes, then one takes a request's ring."""

import math

import numpy as np

from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import float32_value, from_float32, to_float32
from ..types.compressor import KeyPools
from .compiler import cuda
from .launch import NO_VECTOR, kind_of, launch
from .log_sums import MINUS_INFINITY
from .norm_rope import MAX_TILES, THREADS, WIDTH, hadamard, insert_row, layer_norm
from .rows import find_request

DIM = 128
NO_ROWS = np.empty((0, 0, 0), np.float32)


def indexer_kpool_and_insert(rows: KeyPools) -> None:
    restart = (NO_ROWS, NO_VECTOR) if rows.restart_rows is None else (rows.restart_rows, rows.restart_positions)
    given = (
        rows.k, kind_of(rows.k), rows.gate, kind_of(rows.gate), rows.weight, rows.bias, kind_of(rows.weight),
        np.float32(rows.eps), rows.state_slots, rows.positions, rows.query_start_loc, rows.state, kind_of(rows.state),
        *restart,
    )  # fmt: skip
    pages, tokens = rows.pages, min(len(rows.slots), len(rows.state_slots))
    launch(
        pool_kernel, tokens, THREADS, *given, rows.ape, rows.slots, pages.bytes, geometry_of(pages), rows.hadamard
    )  # fmt: skip
    launch(save_kernel, len(rows.query_start_loc) - 1, THREADS, *given, len(rows.ape))  # after the rings are read


def pool_kernel(
    k, k_kind, gate, gate_kind, weight, bias, weight_kind, eps, state_slots, positions, starts, state, kind,
    restart_rows, restart_positions, ape, slots, pages, g, rotates,
):  # fmt: skip
    row = cuda.shared.array(WIDTH, np.float32)
    sums = cuda.shared.array((3, DIM), np.float32)  # top score, weights, weighted values
    total = cuda.shared.array(1, np.float32)
    largest = cuda.shared.array(MAX_TILES, np.int32)
    token, capacity, pool = np.int64(cuda.blockIdx.x), state.shape[1], len(ape)
    slot, state_slot = np.int64(slots[token]), np.int64(state_slots[token])
    position, request = np.int64(positions[token]), find_request(starts, token)
    if slot < 0 or slot >= pages.shape[0] * g.block_size or state_slot < 0 or state_slot >= len(state) * capacity:
        return
    if request < 0 or position < 0 or (position + 1) % pool != 0:
        return
    start, ring = max(np.int64(starts[request]), np.int64(0)), state_slot // capacity
    saved = len(restart_positions) > 0 and restart_positions[ring] == position - (token - start)
    for channel in range(cuda.threadIdx.x, DIM, cuda.blockDim.x):
        sums[0, channel], sums[1, channel], sums[2, channel] = MINUS_INFINITY, np.float32(0), np.float32(0)
    for i in range(pool):
        back = pool - 1 - i
        from_step = token - back >= start
        if from_step:
            layer_norm(row, k[token - back], k_kind, weight, bias, weight_kind, total, eps)
        for channel in range(cuda.threadIdx.x, DIM, cuda.blockDim.x):
            if from_step:
                value = from_float32(row[channel], kind)
                score = from_float32(to_float32(gate[token - back, channel], gate_kind), kind)
            elif saved:
                value, score = restart_rows[ring, i, channel], restart_rows[ring, i, DIM + channel]
            else:
                place = (position - back) % capacity
                value, score = state[ring, place, channel], state[ring, place, DIM + channel]
            value, score = to_float32(np.int64(value), kind), to_float32(np.int64(score), kind)
            score = score + float32_value(ape[i, channel])
            top = sums[0, channel]
            if score > top:
                keep = np.float32(math.exp(top - score))
                sums[0, channel], top = score, score
                sums[1, channel], sums[2, channel] = sums[1, channel] * keep, sums[2, channel] * keep
            base = np.float32(0) if top == MINUS_INFINITY else top  # the weight of -inf is 0, not NaN
            exp_score = np.float32(math.exp(score - base))
            sums[1, channel], sums[2, channel] = sums[1, channel] + exp_score, sums[2, channel] + exp_score * value
        cuda.syncthreads()  # before the next row
    for channel in range(cuda.threadIdx.x, DIM, cuda.blockDim.x):
        row[channel] = np.float32(0)
        if sums[1, channel] != 0:
            row[channel] = sums[2, channel] / sums[1, channel]
    cuda.syncthreads()
    if rotates:
        hadamard(row, DIM)
    insert_row(row, largest, pages[slot // g.block_size], slot % g.block_size, g, True)


def save_kernel(
    k, k_kind, gate, gate_kind, weight, bias, weight_kind, eps, slots, positions, starts, state, kind,
    restart_rows, restart_positions, pool,
):  # fmt: skip
    row = cuda.shared.array(WIDTH, np.float32)
    total = cuda.shared.array(1, np.float32)
    request, capacity = cuda.blockIdx.x, state.shape[1]
    start = max(np.int64(starts[request]), np.int64(0))
    stop = min(np.int64(starts[request + 1]), np.int64(len(slots)))
    most = len(state) * capacity
    if start >= stop or slots[start] < 0 or slots[start] >= most:
        return
    ring, position = np.int64(slots[start]) // capacity, np.int64(positions[start])
    if len(restart_positions) > 0:
        count = position % pool if position > 0 else np.int64(0)
        again = count > 0 and restart_positions[ring] == position
        keeps = count > 0 and stop - start > capacity - count
        for i in range(cuda.threadIdx.x, count * 2 * DIM, cuda.blockDim.x):
            before, channel = i // (2 * DIM), i % (2 * DIM)
            place = (position - count + before) % capacity
            if again:  # the first run may have been longer
                state[ring, place, channel] = restart_rows[ring, before, channel]
            elif keeps:
                restart_rows[ring, before, channel] = state[ring, place, channel]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0 and not again:
            restart_positions[ring] = position if keeps else np.int64(0)
    for token in range(max(start, stop - capacity), stop):
        slot = np.int64(slots[token])
        if slot < 0 or slot >= most:
            continue
        layer_norm(row, k[token], k_kind, weight, bias, weight_kind, total, eps)
        for i in range(cuda.threadIdx.x, DIM, cuda.blockDim.x):
            state[slot // capacity, slot % capacity, i] = from_float32(row[i], kind)
            score = from_float32(to_float32(gate[token, i], gate_kind), kind)
            state[slot // capacity, slot % capacity, DIM + i] = score
        cuda.syncthreads()  # before the next row
