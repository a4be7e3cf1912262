"""The compressor, in float64: softmax pooling over a window, RMSNorm, RoPE, insert.

state[p]    = kv[p], score[p] + bias[p mod ratio]                         float32, of every position p
row[n]      = sum_p softmax_p(score[p]) kv[p]                             channel by channel
              over p = n ratio ... n ratio + ratio - 1; where windows overlap, these positions give the second half
              of their channels, and the ratio positions before them give the first half
"""

from collections.abc import Sequence

import numpy as np

from ..types.compressor import Compression, CompressorRows
from .norm_rope import at_positions, normed, rotated, write_rows
from .rows import lookup_slot


def compress_and_insert(compressors: Sequence[CompressorRows], step: Compression) -> None:
    for rows in compressors:
        _compress_rows(rows, step)


def _compress_rows(own: CompressorRows, step: Compression) -> None:
    kv_score, state, pages = own.kv_score, own.state, own.pages
    positions, ratio, state_block = step.positions, step.compress_ratio, state.shape[1]
    states = biased(kv_score, positions, own.position_bias)
    for token, slot in enumerate(step.slots):
        if 0 <= slot < pages.num_slots:
            window = _window(int(token), states, state, step, pages.layout.head_dim)
            row = normed(pooled(window), step.eps) * own.norm_weight.astype(np.float64)
            first = np.array([positions[token] // ratio * ratio])
            rotated_row = rotated(row, at_positions(step.cos_sin, first)[0])
            write_rows(pages, np.array([slot], np.int64), rotated_row[None])
    for token, slot in enumerate(step.state_slots):
        if 0 <= slot < len(state) * state_block:
            state[slot // state_block, slot % state_block] = states[token]


def biased(kv_score: np.ndarray, positions: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The saved state of each token: kv, and score with its bias, float32 [T, 2 * coff * D]."""
    states = kv_score.astype(np.float32)
    states[:, states.shape[1] // 2 :] += bias[positions % len(bias)]
    return states


def _window(token: int, states: np.ndarray, state: np.ndarray, step: Compression, head_dim: int) -> np.ndarray:
    """kv and score of the positions that a token's row pools, float64 [n, 2, D]."""
    ratio, position, request = step.compress_ratio, int(step.positions[token]), int(step.token_to_req[token])
    overlaps = states.shape[1] == 4 * head_dim
    present = 0 <= request < len(step.query_start_loc) - 1
    first_token = max(int(step.query_start_loc[request]), 0) if present else token
    rows = []
    for back in range((2 if overlaps else 1) * ratio):  # backwards from the last position
        at = position - back
        if at < 0:
            break
        if token - back >= first_token:
            state_row = states[token - back]
        else:
            slot = lookup_slot(step.state_block_table, request, at, state.shape[1])
            if not 0 <= slot < len(state) * state.shape[1]:
                continue
            state_row = state[slot // state.shape[1], slot % state.shape[1]]
        halves = state_row.astype(np.float64).reshape(2, -1, head_dim)
        rows.append(halves[:, -1 if back < ratio else 0])
    return np.array(rows[::-1]).reshape(-1, 2, head_dim)


def pooled(window: np.ndarray) -> np.ndarray:
    """The mean of kv weighted by the softmax of score, channel by channel, float64 [D]; 0 without positions.

    A score of -inf leaves its position out of a channel.
    """
    if not len(window):
        return np.zeros(window.shape[2])
    kv, score = window[:, 0], window[:, 1]
    top = score.max(axis=0)
    with np.errstate(invalid="ignore"):  # values that are not finite
        weights = np.exp(score - np.where(np.isneginf(top), 0.0, top))
        total, weighted = weights.sum(axis=0), (weights * kv).sum(axis=0)
    return np.divide(weighted, total, out=np.zeros_like(total), where=total != 0)
