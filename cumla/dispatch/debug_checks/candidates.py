"""Checks of `cumla.debug` for kernels of candidate blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from .indexer import check_lengths, longest
from .indexer_topk import check_columns
from .values import check_cached, host


def paged_logits_and_blocks(arguments: Any) -> int:
    return check_lengths(arguments)


def select_candidate_blocks(arguments: Any) -> int:
    return check_columns(arguments)


def apply_candidate_mask(arguments: Any) -> int:
    return check_columns(arguments)


def candidate_logits(arguments: Any) -> int:
    ends = longest(arguments)
    check_cached(arguments, 0, ends)
    next_n, chosen = arguments.q.shape[1], host(arguments.candidates)
    most = np.repeat(-(-np.maximum(ends, 0) // arguments.block), next_n)[:, None]
    wrong = (chosen < -1) | (chosen >= most)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"candidate_blocks: row {arguments.first * next_n + row} has block {chosen[row, column]}, expected -1"
            + (f" or 0 to {most[row, 0] - 1}" if most[row, 0] else "")
        )
    return len(ends)
