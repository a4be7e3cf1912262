"""The compressor of V4.1, parallel over the tokens."""

import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import bfloat16_bits, bfloat16_value
from ..types.compressor import LatentRows
from .norm_rope import scale_by_rms
from .rows import copy_row, find_request
from .threads import parallel_for

DIM = 512
TO_POOL, TO_COPY = 8, 1  # approximate nanoseconds per value
NO_STATE = np.empty((0, 1, 0), np.float32)
NO_RESTART = np.empty((0, 0), np.float32), np.empty(0, np.int32)


def compress_latents(rows: LatentRows) -> None:
    with np.errstate(invalid="ignore"):  # signalling NaN
        kv_score, weight = rows.kv_score.astype(np.float32), rows.norm_weight.astype(np.float32)
    slots, latents = np.asarray(rows.slots, np.int64), rows.latents
    at = np.empty(0, np.int64) if rows.positions is None else np.asarray(rows.positions, np.int64)
    starts = np.empty(0, np.int32) if rows.query_start_loc is None else rows.query_start_loc
    state = NO_STATE if rows.state is None else rows.state
    restart = NO_RESTART if rows.restart_rows is None else (rows.restart_rows, rows.restart_positions)
    pooled, written = np.empty((len(slots), DIM), np.float32), np.zeros(len(slots), np.bool_)
    parallel_for(
        len(slots), DIM * TO_POOL, _pool,
        kv_score, weight, slots, at, starts, state, *restart, rows.eps, rows.round_pooled, pooled, written,
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        latents[: len(slots)][written] = pooled[written].astype(latents.dtype)
    if len(state):
        parallel_for(len(slots), 2 * DIM * TO_COPY, _save, kv_score, slots, at, starts, state, restart[1])


@compiled(nogil=True)
def _pool(
    first, end, kv_score, weight, slots, positions, starts, state, restart_rows, restart_positions, eps, round_pooled,
    rows, written,
):  # fmt: skip
    capacity = state.shape[1]
    for token in range(first, end):
        slot, row, own = slots[token], rows[token], kv_score[token]
        if slot < 0:
            continue
        if len(positions) == 0:
            for i in range(DIM):
                row[i] = own[i]
        else:
            request, position = find_request(starts, token), positions[token]
            if request < 0 or slot >= len(state) * capacity or position < 0 or position % 2 == 0:
                continue
            ring, start = slot // capacity, max(starts[request], 0)
            before = state[ring, (position - 1) % capacity]
            if token > start:
                before = kv_score[token - 1]
            elif len(restart_positions) > 0:
                if restart_positions[ring] == position:
                    before = restart_rows[ring]
                elif min(np.int64(starts[request + 1]), len(slots)) - start >= capacity:
                    copy_row(restart_rows[ring], before)
            for i in range(DIM):
                a, b = before[DIM + i], own[DIM + i]
                top = max(a, b)
                if a != a or b != b:
                    top = a + b  # NaN
                base = np.float32(0) if top == -np.inf else top
                first_weight, second_weight = np.exp(a - base), np.exp(b - base)
                total = first_weight + second_weight
                mean = (first_weight * before[i] + second_weight * own[i]) / total if total != 0 else np.float32(0)
                row[i] = mean
        if round_pooled:
            for i in range(DIM):
                row[i] = bfloat16_value(bfloat16_bits(row[i]))
        scale_by_rms(row, eps)
        for i in range(DIM):
            row[i] *= weight[i]
        written[token] = True


@compiled(nogil=True)
def _save(first, end, kv_score, slots, positions, starts, state, restart_positions):
    capacity = state.shape[1]
    most = len(state) * capacity
    for token in range(first, end):
        request = find_request(starts, token)
        if request < 0 or not 0 <= slots[token] < most:
            continue
        start, stop = max(starts[request], 0), min(np.int64(starts[request + 1]), len(slots))
        if token == start and len(restart_positions) > 0:
            ring, position = slots[token] // capacity, positions[token]
            is_odd = position > 0 and position % 2 == 1
            if not is_odd or restart_positions[ring] != position:
                restart_positions[ring] = position if is_odd and stop - start >= capacity else 0
        if token >= stop - capacity and 0 <= slots[start] < most:
            copy_row(state[slots[token] // capacity, slots[token] % capacity], kv_score[token])
