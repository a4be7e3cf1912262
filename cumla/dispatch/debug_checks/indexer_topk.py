"""Checks of `cumla.debug` for kernels of the indexer's top-k."""

from __future__ import annotations

from typing import Any

from .values import check_range


def top_k_per_row(arguments: Any) -> int:
    return check_columns(arguments)


def check_columns(arguments: Any) -> int:
    """The columns of rows of logits; the number of rows. Lengths may be beyond the logits: max_context_len leaves out
    the rest."""
    rows, first = arguments.rows, arguments.first
    width = arguments.logits.shape[1] if rows.num_keys is None else rows.num_keys
    for name, columns in (("row_starts", rows.starts), ("row_ends", rows.ends)):
        if columns is not None:
            check_range(name, columns, 0, width, "row", first)
    if rows.lens is not None:
        check_range("seq_lens", rows.lens, first=first // rows.next_n)
    return len(arguments.logits)
