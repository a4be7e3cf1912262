"""The compressor of V4.1, token by token in float64."""

import ml_dtypes
import numpy as np

from ..types.compressor import LatentRows
from .compressor import pooled
from .norm_rope import normed

DIM = 512


def compress_latents(rows: LatentRows) -> None:
    slots, state, query_start_loc = rows.slots, rows.state, rows.query_start_loc

    def write(token: int, row: np.ndarray) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            if rows.round_pooled:
                row = row.astype(ml_dtypes.bfloat16).astype(np.float64)
            rows.latents[token] = normed(row, rows.eps) * rows.norm_weight.astype(np.float64)

    kv_score = rows.kv_score.astype(np.float32)
    if state is None:
        for token in np.flatnonzero(slots >= 0).tolist():
            write(token, kv_score[token].astype(np.float64))
        return
    capacity, most = state.shape[1], len(state) * state.shape[1]
    for start, end in zip(query_start_loc[:-1].tolist(), query_start_loc[1:].tolist(), strict=True):
        start, end = max(start, 0), min(end, len(slots))
        here = [token for token in range(start, end) if 0 <= slots[token] < most]
        for token in here:
            position = int(rows.positions[token])
            if position < 0 or position % 2 == 0:
                continue
            before = kv_score[token - 1] if token > start else _row_before(rows, token)
            window = np.stack([before, kv_score[token]]).astype(np.float64).reshape(2, 2, DIM)
            write(token, pooled(window))
        if start in here:
            if rows.restart_positions is not None:
                _keep_for_restart(rows, start, end - start)
            for token in here:
                if token >= end - capacity:
                    state[slots[token] // capacity, slots[token] % capacity] = kv_score[token]


def _row_before(rows: LatentRows, token: int) -> np.ndarray:
    """The row before a request's first token, at an odd position: from the ring, or saved for a repeated step."""
    ring, position = int(rows.slots[token]) // rows.state.shape[1], int(rows.positions[token])
    if rows.restart_positions is not None and rows.restart_positions[ring] == position:
        return rows.restart_rows[ring]
    return rows.state[ring, (position - 1) % rows.state.shape[1]]


def _keep_for_restart(rows: LatentRows, token: int, tokens: int) -> None:
    """Save the row before a request's first token if the request's tokens are about to overwrite it in the ring."""
    ring, position = int(rows.slots[token]) // rows.state.shape[1], int(rows.positions[token])
    is_odd = position > 0 and position % 2 == 1
    if is_odd and rows.restart_positions[ring] == position:
        return
    keeps = is_odd and tokens >= rows.state.shape[1]
    if keeps:
        rows.restart_rows[ring] = _row_before(rows, token)
    rows.restart_positions[ring] = np.int64(position if keeps else 0).astype(np.int32)
