"""Metadata of a step, one token a loop step over all cores."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..step import C128A_RATIO, BatchCounts, SwaBuffers
from .indices import token_position, write_window
from .rows import lookup_slot


def build_sparse_swa(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    slot_mapping: np.ndarray,
    block_table: np.ndarray,
    c128a_block_table: np.ndarray | None,
    counts: BatchCounts,
    block_size: int,
    window_size: int,
    c128a_block_size: int,
    c128a_width: int,
    buffers: SwaBuffers,
) -> None:
    table = np.empty((0, 0), np.int32) if c128a_block_table is None else c128a_block_table
    _build(
        query_start_loc, seq_lens, slot_mapping, block_table, table, counts, block_size, window_size,
        c128a_block_size, c128a_width, *buffers,
    )  # fmt: skip


@njit(parallel=True, cache=True)
def _build(
    query_start_loc,
    seq_lens,
    slot_mapping,
    block_table,
    c128a_block_table,
    counts,
    block_size,
    window_size,
    c128a_block_size,
    c128a_width,
    token_to_req_indices,  # one by one: stores through a tuple's arrays inside prange are lost (Numba 0.68)
    is_valid_token,
    swa_indices,
    swa_lens,
    prefill_gather_lens,
    c128a_indices,
    c128a_lens,
):
    for token in prange(max(counts.rows, counts.rows_before)):
        valid = token < counts.rows and slot_mapping[token] >= 0
        is_valid_token[token] = valid
        request = 0
        if token < counts.num_tokens:
            request = np.searchsorted(query_start_loc, token, side="right") - 1
        token_to_req_indices[token] = request
        window = swa_indices[token]
        length = 0
        compressed = 0
        if valid and token < counts.num_tokens:
            position = token_position(query_start_loc, seq_lens, request, token)
            length = write_window(block_table, request, position, block_size, block_size, window)
            compressed = min(max((position + 1) // C128A_RATIO, 0), c128a_width)
        window[length:] = -1
        swa_lens[token] = length
        if c128a_width > 0:
            row = c128a_indices[token]
            for j in range(compressed):
                if token < counts.num_decode_tokens:
                    row[j] = lookup_slot(c128a_block_table, request, j, c128a_block_size)
                else:
                    row[j] = j
            row[compressed:c128a_width] = -1
            c128a_lens[token] = compressed
    for prefill in range(counts.num_reqs - counts.num_decodes):
        request = counts.num_decodes + prefill
        query_len = query_start_loc[request + 1] - query_start_loc[request]
        prefill_gather_lens[prefill] = query_len + min(seq_lens[request] - query_len, window_size - 1)
