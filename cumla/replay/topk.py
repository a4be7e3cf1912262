"""The compressed rows that a token selects at ratio 4: exact scores, exact top-k."""

from __future__ import annotations

from typing import Any

import numpy as np

SCORES_AT_ONCE = 1 << 24  # scores, or key values, in flight


def select(scores: Any, visible: Any, topk: int, xp: Any) -> Any:
    """The rows of the `topk` largest scores among those visible, in ascending order, padded with -1.

    scores   [n, rows] float32
    visible  [n] integers: query i may see rows 0 to visible[i] - 1

    Returns [n, topk] int32.
    """
    count, rows = scores.shape
    index, visible = xp.arange(rows), visible[:, None]
    if rows > topk:
        masked = xp.where(index < visible, -scores, np.float32(np.inf))
        chosen = xp.argpartition(masked, topk - 1, axis=1)[:, :topk]
    else:
        chosen = xp.broadcast_to(index, (count, rows))
    chosen = xp.where(chosen < visible, chosen, rows)
    chosen.sort(axis=1)
    selected = xp.full((count, topk), -1, np.int32)
    selected[:, : chosen.shape[1]] = xp.where(chosen < rows, chosen, -1)
    return selected


def select_for_decodes(queries: Any, index_keys: Any, block_table: Any, visible: np.ndarray, topk: int, xp: Any) -> Any:
    """Selections of tokens of different requests.

    queries      [n, d] float32
    index_keys   [num_blocks, rows_per_block, d] float32
    block_table  [n, B] int32, one row a query
    visible      host [n] integers
    """
    _, rows_per_block, dim = index_keys.shape
    blocks = max(-(-int(visible.max(initial=0)) // rows_per_block), 1)
    step = max(1, SCORES_AT_ONCE // (blocks * rows_per_block * dim))
    selected = []
    for first in range(0, len(queries), step):
        some = slice(first, first + step)
        keys = index_keys[block_table[some, :blocks]].reshape(-1, blocks * rows_per_block, dim)
        scores = xp.matmul(keys, queries[some, :, None])[:, :, 0]
        selected.append(select(scores, xp.asarray(visible[some]), topk, xp))
    return xp.concatenate(selected)


def select_for_prefill(queries: Any, index_keys: Any, blocks: Any, visible: np.ndarray, topk: int, xp: Any) -> Any:
    """Selections of neighbouring tokens of one request, whose blocks are `blocks` [B]; as select_for_decodes."""
    _, rows_per_block, dim = index_keys.shape
    rows = int(visible.max(initial=0))
    if not rows:
        return xp.full((len(queries), topk), -1, np.int32)
    keys = index_keys[blocks[: -(-rows // rows_per_block)]].reshape(-1, dim)[:rows]
    step = max(1, SCORES_AT_ONCE // rows)
    selected = []
    for first in range(0, len(queries), step):
        some = slice(first, first + step)
        scores = xp.matmul(queries[some], keys.T)
        selected.append(select(scores, xp.asarray(visible[some]), topk, xp))
    return xp.concatenate(selected)
