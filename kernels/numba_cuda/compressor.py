"""The compressor: a thread block takes a token, a thread every blockDim.x-th channel of its row."""

import math
from collections.abc import Sequence

import numpy as np

from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import float32_bits, float32_value, to_float32
from ..types.compressor import Compression, CompressorRows
from .compiler import cuda
from .launch import kind_of, launch
from .log_sums import MINUS_INFINITY
from .norm_rope import MAX_TILES, THREADS, WIDTH, insert_row, nearest, normalize, rotate
from .rows import lookup_slot


def compress_and_insert(compressors: Sequence[CompressorRows], step: Compression) -> None:
    for rows in compressors:
        _compress_rows(rows, step)


def _compress_rows(own: CompressorRows, step: Compression) -> None:
    kv_score, state, pages = own.kv_score, own.state, own.pages
    weight = own.norm_weight
    launch(
        compress_kernel, len(kv_score), THREADS,
        kv_score, kind_of(kv_score), own.position_bias, weight, kind_of(weight), step.cos_sin,
        step.compress_ratio, np.float32(step.eps), state, step.state_slots, step.state_block_table, pages.bytes,
        geometry_of(pages), step.slots, step.positions, step.token_to_req, step.query_start_loc,
    )  # fmt: skip


def compress_kernel(
    kv_score, kind, bias, weight, weight_kind, cos_sin, ratio, eps, state, state_slots, block_table, pages, g, slots,
    positions, token_to_req, query_start_loc,
):  # fmt: skip
    """Save the token's state; pool, normalise, rotate and insert the row that it completes. float32 comes as bits."""
    row = cuda.shared.array(WIDTH, np.float32)
    total = cuda.shared.array(1, np.float32)
    largest = cuda.shared.array(MAX_TILES, np.int32)
    token, channels, block, dim = cuda.blockIdx.x, kv_score.shape[1] // 2, state.shape[1], g.head_dim
    position = np.int64(positions[token])
    remainder = position % ratio
    if token < len(state_slots):
        state_slot = np.int64(state_slots[token])
        if state_slot >= 0 and state_slot < state.shape[0] * block:
            for i in range(cuda.threadIdx.x, 2 * channels, cuda.blockDim.x):
                value = to_float32(kv_score[token, i], kind)
                if i >= channels:
                    value = value + float32_value(bias[remainder, i - channels])
                state[state_slot // block, state_slot % block, i] = float32_bits(value)
    if token >= len(slots):
        return
    slot = np.int64(slots[token])
    if slot < 0 or slot >= pages.shape[0] * g.block_size:
        return
    request, first_token = np.int64(token_to_req[token]), np.int64(token)
    if request >= 0 and request < len(query_start_loc) - 1:
        first_token = max(np.int64(query_start_loc[request]), 0)
    overlaps = channels == 2 * dim
    for channel in range(cuda.threadIdx.x, dim, cuda.blockDim.x):
        top, weights, mean = MINUS_INFINITY, np.float32(0), np.float32(0)
        for back in range(2 * ratio if overlaps else ratio):
            if back > position:
                break
            at = channel + dim if overlaps and back < ratio else channel
            if token - back >= first_token:
                kv = to_float32(kv_score[token - back, at], kind)
                score = to_float32(kv_score[token - back, channels + at], kind)
                score = score + float32_value(bias[(position - back) % ratio, at])
            else:
                row_slot = lookup_slot(block_table, request, position - back, block)
                if row_slot < 0 or row_slot >= state.shape[0] * block:
                    continue
                kv = float32_value(state[row_slot // block, row_slot % block, at])
                score = float32_value(state[row_slot // block, row_slot % block, channels + at])
            if score > top:
                keep = np.float32(math.exp(top - score))
                weights, mean, top = weights * keep, mean * keep, score
            base = np.float32(0) if top == MINUS_INFINITY else top  # the weight of -inf is 0, not NaN
            exp_score = np.float32(math.exp(score - base))
            weights, mean = weights + exp_score, mean + exp_score * kv
        row[channel] = np.float32(0)
        if weights != 0:
            row[channel] = mean / weights
    normalize(row, dim, total, eps)
    for channel in range(cuda.threadIdx.x, dim, cuda.blockDim.x):
        row[channel] = row[channel] * to_float32(weight[channel], weight_kind)
    cuda.syncthreads()
    rotate(row, dim, cos_sin, nearest(position - remainder, len(cos_sin)), np.float32(1))
    insert_row(row, largest, pages[slot // g.block_size], slot % g.block_size, g, True)
