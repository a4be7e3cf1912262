"""Pooled index keys, parallel over tokens, groups of slots and requests."""

import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import bfloat16_bits, bfloat16_value, float32_bits, float32_value
from ..types.compressor import KeyPools
from .norm_rope import float32, hadamard, insert_row, layer_norm, row_bits
from .rows import GROUPS, copy_row, find_request, geometry_of, group_of
from .threads import parallel_for

DIM = 128
TO_NORM, TO_POOL, TO_COPY = 2, 8, 1  # approximate nanoseconds per value


def indexer_kpool_and_insert(rows: KeyPools) -> None:
    tokens, pages, shift = len(rows.state_slots), rows.pages, 16 if rows.state.dtype.itemsize == 2 else 0
    raw = float32(np.concatenate([float32(rows.k[:tokens]), float32(rows.gate[:tokens])], axis=1))
    weight, bias = rows.weight.astype(np.float32), rows.bias.astype(np.float32)
    state_slots, slots = (np.asarray(x, np.int64) for x in (rows.state_slots, rows.slots[:tokens]))
    positions, starts = np.asarray(rows.positions, np.int64), rows.query_start_loc
    bits = np.uint16 if shift else np.uint32
    state, restart_rows, restart_positions = rows.state.view(bits), np.empty((0, 0, 0), bits), np.empty(0, np.int32)
    if rows.restart_rows is not None:
        restart_rows, restart_positions = rows.restart_rows.view(bits), rows.restart_positions
    rings = state, restart_rows, restart_positions, shift
    parallel_for(tokens, 2 * DIM * TO_NORM, _prepare, raw, weight, bias, rows.eps, shift)
    parallel_for(
        GROUPS, 2 * DIM * tokens * TO_POOL // GROUPS, _pool,
        raw, rows.ape, state_slots, slots, positions, starts, *rings, pages.bytes, geometry_of(pages),
        np.empty((GROUPS, 3, DIM), np.float32), row_bits(DIM), rows.hadamard,
    )  # fmt: skip
    parallel_for(len(starts) - 1, 2 * DIM * TO_COPY, _save, raw, len(rows.ape), state_slots, positions, starts, *rings)


@compiled(nogil=True)
def _prepare(first, end, raw, weight, bias, eps, shift):
    """Normalise keys, and round keys and gates to the type of the rings."""
    for token in range(first, end):
        layer_norm(raw[token, :DIM], weight, bias, eps)
        if shift > 0:
            for i in range(2 * DIM):
                raw[token, i] = bfloat16_value(bfloat16_bits(raw[token, i]))


@compiled(nogil=True)
def _pool(
    first_group, end_group, raw, ape, state_slots, slots, positions, starts, state, restart_rows, restart_positions,
    shift, pages, g, numbers, bits, rotates,
):  # fmt: skip
    pool, capacity = len(ape), state.shape[1]
    row, top, total = numbers[first_group, 0], numbers[first_group, 1], numbers[first_group, 2]
    for token in range(len(slots)):
        slot, state_slot, position = slots[token], state_slots[token], positions[token]
        if not (0 <= slot < pages.shape[0] * g.block_size and first_group <= group_of(slot) < end_group):
            continue
        if not 0 <= state_slot < len(state) * capacity or position < 0 or (position + 1) % pool != 0:
            continue
        request = find_request(starts, token)
        if request < 0:
            continue
        start, ring = max(np.int64(starts[request]), np.int64(0)), state_slot // capacity
        saved = len(restart_positions) > 0 and restart_positions[ring] == position - (token - start)
        row[:], top[:], total[:] = 0, -np.inf, 0
        for i in range(pool):
            from_step = token - (pool - 1 - i) >= start
            source = state[ring, (position - (pool - 1 - i)) % capacity]
            if saved and not from_step:
                source = restart_rows[ring, i]
            own = raw[max(token - (pool - 1 - i), 0)]
            for j in range(DIM):
                if from_step:
                    value, score = own[j], own[DIM + j]
                else:
                    value = float32_value(np.int64(source[j]) << shift)
                    score = float32_value(np.int64(source[DIM + j]) << shift)
                score += ape[i, j]
                if score > top[j]:
                    shrink = np.exp(top[j] - score)
                    row[j] *= shrink
                    total[j] *= shrink
                    top[j] = score
                weight = np.exp(score - (np.float32(0) if top[j] == -np.inf else top[j]))  # 0 for -inf, not NaN
                row[j] += weight * value
                total[j] += weight
        for j in range(DIM):
            row[j] = row[j] / total[j] if total[j] != 0 else np.float32(0)
        if rotates:
            hadamard(row, not g.float32_values)
        insert_row(pages, slot, row, bits[first_group], g, True)


@compiled(nogil=True)
def _save(first, end, raw, pool, slots, positions, starts, state, restart_rows, restart_positions, shift):
    """Write each request's last tokens into its ring, after the open pool that they overwrite is saved."""
    capacity = state.shape[1]
    most = len(state) * capacity
    for request in range(first, end):
        start, stop = (
            max(np.int64(starts[request]), np.int64(0)),
            min(np.int64(starts[request + 1]), np.int64(len(slots))),
        )
        if start >= stop or not 0 <= slots[start] < most:
            continue
        ring, position = slots[start] // capacity, positions[start]
        if len(restart_positions) > 0:
            count = position % pool if position > 0 else 0
            if count > 0 and restart_positions[ring] == position:  # run again; the first run may have been longer
                for i in range(count):
                    copy_row(state[ring, (position - count + i) % capacity], restart_rows[ring, i])
            else:
                keeps = count > 0 and stop - start > capacity - count
                if keeps:
                    for i in range(count):
                        copy_row(restart_rows[ring, i], state[ring, (position - count + i) % capacity])
                restart_positions[ring] = position if keeps else 0
        for token in range(max(start, stop - capacity), stop):
            if 0 <= slots[token] < most:
                target = state[slots[token] // capacity, slots[token] % capacity]
                for i in range(2 * DIM):
                    target[i] = float32_bits(raw[token, i]) >> shift
