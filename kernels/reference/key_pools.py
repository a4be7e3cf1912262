"""Pooled index keys, token by token in float64."""

import numpy as np

from ..types.compressor import KeyPools
from .compressor import pooled
from .norm_rope import hadamard_rotated, layer_normed, rounded_to, write_rows

DIM = 128


def indexer_kpool_and_insert(rows: KeyPools) -> None:
    state, pool = rows.state, len(rows.ape)
    capacity, most = state.shape[1], len(state) * state.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        keys = layer_normed(rows.k, rows.weight, rows.bias, rows.eps)
        raw = np.concatenate([keys.astype(np.float32), rows.gate.astype(np.float32)], axis=1).astype(state.dtype)
    slots, starts = rows.state_slots, rows.query_start_loc
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        start, end = max(start, 0), min(end, len(slots))
        here = [token for token in range(start, end) if 0 <= slots[token] < most]
        for token in here:
            position = int(rows.positions[token])
            slot = rows.slots[token] if token < len(rows.slots) else -1
            if position < 0 or (position + 1) % pool or not 0 <= slot < rows.pages.num_slots:
                continue
            own = raw[max(token - pool + 1, start) : token + 1]
            window = np.concatenate([_rows_before(rows, token, position - len(own), pool - len(own)), own])
            window = window.astype(np.float64).reshape(pool, 2, DIM)
            window[:, 1] += rows.ape
            key = pooled(window)[None]
            with np.errstate(invalid="ignore", over="ignore"):
                if rows.hadamard:
                    key = hadamard_rotated(rounded_to(rows.pages, key))
                write_rows(rows.pages, np.array([slot], np.int64), key)
        if start in here:
            if rows.restart_positions is not None:
                _keep_for_restart(rows, start, end - start)
            for token in here:
                if token >= end - capacity:
                    state[slots[token] // capacity, slots[token] % capacity] = raw[token]


def _rows_before(rows: KeyPools, token: int, last: int, count: int) -> np.ndarray:
    """`count` rows of a token's request up to the position `last`: of its ring, or saved for a repeated step."""
    ring, positions = int(rows.state_slots[token]) // rows.state.shape[1], np.arange(last + 1 - count, last + 1)
    if count and rows.restart_positions is not None and rows.restart_positions[ring] == last + 1:
        saved: np.ndarray = rows.restart_rows[ring, positions % len(rows.ape)]
        return saved
    found: np.ndarray = rows.state[ring, positions % rows.state.shape[1]]
    return found


def _keep_for_restart(rows: KeyPools, token: int, tokens: int) -> None:
    """Save the open pool before a request's first token if the request's tokens overwrite a row of it in the ring.

    In a step that is run again, its rows return to the ring: the first run may have had more tokens.
    """
    ring, position = int(rows.state_slots[token]) // rows.state.shape[1], int(rows.positions[token])
    count = position % len(rows.ape) if position > 0 else 0
    if count and rows.restart_positions[ring] == position:
        before = np.arange(position - count, position)
        rows.state[ring, before % rows.state.shape[1]] = rows.restart_rows[ring, :count]
        return
    keeps = count > 0 and tokens > rows.state.shape[1] - count
    if keeps:
        rows.restart_rows[ring, :count] = _rows_before(rows, token, position - 1, count)
    rows.restart_positions[ring] = np.int64(position if keeps else 0).astype(np.int32)
