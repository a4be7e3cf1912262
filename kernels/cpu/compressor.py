"""The compressor and its states, parallel over the cores: softmax pooling, RMSNorm, RoPE, insert."""

from collections.abc import Sequence

import numpy as np

from ..numba_common.compiled import compiled
from ..types.compressor import Compression, CompressorRows
from .norm_rope import insert_row, nearest, rotate, row_bits, scale_by_rms
from .rows import GROUPS, copy_row, geometry_of, group_of, lookup_slot
from .threads import parallel_for

# Approximate nanoseconds per value.
TO_COPY, TO_POOL = 1, 8


def compress_and_insert(compressors: Sequence[CompressorRows], step: Compression) -> None:
    for rows in compressors:
        _compress_rows(rows, step)


def _compress_rows(own: CompressorRows, step: Compression) -> None:
    kv_score, state, pages = own.kv_score, own.state, own.pages
    with np.errstate(invalid="ignore"):  # signalling NaN
        states = np.array(kv_score, np.float32)
    width = states.shape[1]
    parallel_for(len(states), width * TO_COPY, _add_bias, states, step.positions, own.position_bias)
    slots, state_slots = (np.asarray(x, np.int64) for x in (step.slots, step.state_slots))
    step = step._replace(slots=slots, state_slots=state_slots)  # the machine code is for slots of one type
    rows = int(np.count_nonzero(slots >= 0))
    parallel_for(
        GROUPS, rows * step.compress_ratio * width * TO_POOL // GROUPS, _compress,
        states, state, pages.bytes, geometry_of(pages), own.norm_weight.astype(np.float32), step,
        np.empty((GROUPS, 3, pages.layout.head_dim), np.float32), row_bits(pages.layout.head_dim),
    )  # fmt: skip
    parallel_for(GROUPS, len(state_slots) * width * TO_COPY // GROUPS, _save, states, state, state_slots)


@compiled(nogil=True)
def _add_bias(first, end, states, positions, bias):
    half = bias.shape[1]
    for token in range(first, end):
        row = bias[np.int64(positions[token]) % len(bias)]
        for i in range(half):
            states[token, half + i] += row[i]


@compiled(nogil=True)
def _save(first_group, end_group, states, state, slots):
    block = state.shape[1]
    for token in range(len(slots)):
        slot = slots[token]
        if 0 <= slot < len(state) * block and first_group <= group_of(slot) < end_group:
            copy_row(state[slot // block, slot % block], states[token])


@compiled(nogil=True)
def _compress(first_group, end_group, states, state, pages, g, weight, step, numbers, bits):
    row, top, total = numbers[first_group, 0], numbers[first_group, 1], numbers[first_group, 2]
    for token in range(len(step.slots)):
        slot = step.slots[token]
        if not (0 <= slot < pages.shape[0] * g.block_size and first_group <= group_of(slot) < end_group):
            continue
        _pool(row, top, total, token, states, state, step)
        scale_by_rms(row, step.eps)
        for i in range(len(row)):
            row[i] *= weight[i]
        position = np.int64(step.positions[token]) // step.compress_ratio * step.compress_ratio
        rotate(row, step.cos_sin[nearest(position, len(step.cos_sin))], np.float32(1))
        insert_row(pages, slot, row, bits[first_group], g, True)


@compiled
def _pool(row, top, total, token, states, state, step):
    """Write the window's mean of kv, weighted by the softmax of its score, into `row`; by position, to save memory.

    Args:
        top, total: [head_dim] float32, scratch memory
    """
    head_dim, channels, block = len(row), states.shape[1] // 2, state.shape[1]
    overlaps, ratio = channels == 2 * head_dim, step.compress_ratio
    position, request = np.int64(step.positions[token]), np.int64(step.token_to_req[token])
    first_token = token
    if 0 <= request < len(step.query_start_loc) - 1:
        first_token = max(np.int64(step.query_start_loc[request]), 0)
    row[:], top[:], total[:] = 0, -np.inf, 0
    for back in range((2 if overlaps else 1) * ratio - 1, -1, -1):
        if back > position:
            continue
        source = states[token]
        if token - back >= first_token:
            source = states[token - back]
        else:
            slot = lookup_slot(step.state_block_table, request, position - back, block)
            if slot < 0 or slot >= len(state) * block:
                continue
            source = state[slot // block, slot % block]
        first = head_dim if overlaps and back < ratio else 0
        for i in range(head_dim):
            score = source[channels + first + i]
            if score > top[i]:
                shrink = np.exp(top[i] - score)
                row[i] *= shrink
                total[i] *= shrink
                top[i] = score
            weight = np.exp(score - (np.float32(0) if top[i] == -np.inf else top[i]))  # 0 for -inf, not NaN
            row[i] += weight * source[first + i]
            total[i] += weight
    for i in range(head_dim):
        row[i] = row[i] / total[i] if total[i] != 0 else np.float32(0)
