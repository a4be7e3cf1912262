"""Checks of `cumla.debug` for kernels of the indexer's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import check_pages, last_positions


def build_indexer(arguments: Any) -> None:
    starts, __, end = last_positions(arguments.query_start_loc, arguments.seq_lens)
    rows = end * (np.diff(starts) > 0) // arguments.counts.compress_ratio
    check_pages("block_table", arguments.block_table, np.zeros_like(rows), rows, arguments.counts.block_size)


def compressed_slot_mapping(arguments: Any) -> None:
    if arguments.compress_ratio > 1:  # ratio 1: pages of states, freed when no longer needed
        __, begin, end = last_positions(arguments.query_start_loc, arguments.seq_lens)
        begin, end = np.maximum(begin, 0) // arguments.compress_ratio, end // arguments.compress_ratio
        check_pages("block_table", arguments.block_table, begin, end, arguments.block_size)
