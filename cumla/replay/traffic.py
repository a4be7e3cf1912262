"""Bytes that each op of a layer has to move, from host numbers only.

    insert   bfloat16 rows and slots read, cache rows written; compressed rows too
    map      local entries read, slots or workspace rows written, 4 bytes each
    decode   cache rows and their slots read, Q read, out written
    gather   cache rows read, bfloat16 rows written
    prefill  workspace rows (over pages: cache rows) and their indices read, Q read, out written

A row counts once for each token that attends to it, so attention that keeps rows on chip for several tokens may
show more than the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..layout import DSV4_FP8, CacheLayout
from .step_batch import Groups, StepBatch

BF16_ROW = 2 * DSV4_FP8.head_dim
INDEX, SLOT = 4, 8


def attended(positions: np.ndarray, ratio: int, window: int, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Window rows and compressed rows that tokens at these positions attend to, [n] each."""
    compressed = (positions + 1) // ratio if ratio > 1 else np.zeros_like(positions)
    return np.minimum(positions + 1, window), compressed if ratio == 128 else np.minimum(compressed, topk)


def bytes_moved(
    batch: StepBatch,
    ratio: int,
    heads: int,
    window: int,
    topk: int,
    groups: Groups | None,
    over_pages: Sequence[bool],
    formats: tuple[CacheLayout, CacheLayout],
    with_decodes: int = 0,
) -> dict[str, int]:
    """Bytes by op of one layer in one step.

    Args:
        groups: the compressed rows that the step completes; None for a window-only layer
        over_pages: which prefills attend over pages; empty: none
        formats: of the window's cache and of compressed rows
        with_decodes: first tokens of the prefills that attend in the decodes' call
    """
    in_window, compressed = attended(batch.positions, ratio, window, topk)
    n = batch.num_decodes
    prefills, m = batch.scheduled[n:], n + with_decodes
    window_row, compressed_row = (layout.token_bytes for layout in formats)
    completed = 0 if groups is None else len(groups.slots)
    decode_rows = int(in_window[:m].sum()), int(compressed[:m].sum())
    paged = over_pages or [False] * len(prefills)
    counts = [s.count for s in prefills]
    token_paged = np.repeat(np.array(paged, bool), counts)[with_decodes:]
    prefill_rows = int(in_window[m:].sum() + compressed[m:].sum())
    paged_rows = int(in_window[m:][token_paged].sum()), int(compressed[m:][token_paged].sum())
    over_rows = [s for s, skip in zip(prefills, paged, strict=True) if not skip]
    gathered = (
        sum(s.count + min(s.start, window - 1) for s in over_rows),
        sum(s.end // ratio for s in over_rows) if ratio > 1 else 0,
    )
    mapped = prefill_rows - paged_rows[0] + int(compressed[n:m].sum())
    mapped += int(compressed[:n].sum()) if ratio != 128 else 0
    q_and_out = 2 * heads * BF16_ROW

    def read(rows: tuple[int, int], additional: int = 0) -> int:
        """Bytes of window rows and compressed rows, and `additional` bytes for each row."""
        return rows[0] * (window_row + additional) + rows[1] * (compressed_row + additional)

    moved = {
        "insert": read((batch.num_tokens, completed), BF16_ROW + SLOT),
        "map": mapped * 2 * INDEX,
        "decode": read(decode_rows, INDEX) + m * q_and_out,
        "gather": read(gathered, BF16_ROW),
        "prefill": (prefill_rows - sum(paged_rows)) * BF16_ROW
        + read(paged_rows)
        + prefill_rows * INDEX
        + (batch.num_tokens - m) * q_and_out,
    }
    return {op: count for op, count in moved.items() if count}
