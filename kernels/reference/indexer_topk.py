"""The indexer's top-k, row by row."""

import numpy as np

from ..types.indexer import Rows, Slots
from ..types.indices import TopkSlots
from .indexer import row_lens
from .indices import compute_global_topk_indices_and_lens


def top_k_per_row(logits: np.ndarray, rows: Rows, indices: np.ndarray, slots: Slots | None = None) -> None:
    for m, row in enumerate(logits):
        start, end = columns_of(rows, m, len(row))
        candidates = row[start:end]
        numbers = np.flatnonzero(~np.isnan(candidates))
        best = numbers[np.argsort(-candidates[numbers], kind="stable")][: indices.shape[1]]
        indices[m] = -1
        indices[m, : len(best)] = np.sort(best)
    if slots is not None:
        requests = np.arange(len(logits)) // rows.next_n
        is_valid = np.ones(len(logits), bool) if slots.is_valid is None else slots.is_valid
        of_rows = slots.block_table, slots.block_size, is_valid, slots.positions, slots.pool, slots.indices, slots.lens
        compute_global_topk_indices_and_lens(TopkSlots(indices, requests, *of_rows, compact=True, pool=slots.pool))


def columns_of(rows: Rows, m: int, width: int) -> tuple[int, int]:
    """The valid columns of row m."""
    if rows.lens is not None:
        return 0, min(max(int(row_lens(rows.lens, rows.next_n)[m]), 0), width)
    keys = width if rows.num_keys is None else rows.num_keys
    start = 0 if rows.starts is None else min(max(int(rows.starts[m]), 0), keys)
    end = keys if rows.ends is None else min(max(int(rows.ends[m]), start), keys)
    return (start, end) if rows.num_keys is None else (0, min(end - start, width))
