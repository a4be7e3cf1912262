"""Index maps: from positions and local top-k entries to cache slots."""

from __future__ import annotations

import itertools

import numpy as np

from ..types.indices import CombinedIndices, MixedIndices, TopkSlots, WindowSlots
from .rows import lookup_slot


def compute_swa_indices_and_lens(given: WindowSlots) -> None:
    given.swa_indices[:] = -1
    given.swa_lens[:] = 0
    for t in range(len(given.swa_lens)):
        token = t + given.token_offset
        request = int(given.token_to_req_indices[token])
        if not given.is_valid_token[token] or not 0 <= request < len(given.seq_lens):
            continue
        query_start, query_end = int(given.query_start_loc[request]), int(given.query_start_loc[request + 1])
        position = int(given.seq_lens[request]) - (query_end - query_start) + (token - query_start)
        start = max(position - given.window_size + 1, 0)
        given.swa_lens[t] = max(0, position + 1 - start)
        for j in range(given.swa_lens[t]):
            given.swa_indices[t, j] = lookup_slot(given.block_table, request, start + j, given.block_size)


def compute_global_topk_indices_and_lens(given: TopkSlots) -> None:
    for token, local in enumerate(given.topk_indices):
        request = int(given.token_to_req_indices[token])
        table, block_size = given.block_table, given.block_size
        slots = np.array([lookup_slot(table, request, int(i), block_size) for i in local], np.int32)
        if given.positions is not None:
            slots[local >= (int(given.positions[token]) + 1) // given.compress_ratio] = -1
        valid = slots >= 0
        if given.compact:
            slots = np.concatenate([slots[valid], slots[~valid]])
        given.global_topk_indices[token] = slots
        given.topk_lens[token] = valid.sum() if given.is_valid_token[token] else 0


def combine_topk_swa_indices(given: CombinedIndices) -> None:
    rows, row_stride, swa_start = given.combined_indices, given.row_stride, given.swa_start
    rows[:] = -1
    given.combined_lens[:] = 0
    starts = given.query_start_loc.astype(int) - int(given.query_start_loc[0])
    for request, (query_start, query_end) in enumerate(itertools.pairwise(starts.tolist())):
        seq_len = int(given.seq_lens[request])
        first_gathered = seq_len - int(given.gather_lens[request])
        base = row_stride * request
        for token in range(max(query_start, 0), min(query_end, len(rows))):
            position = seq_len - (query_end - query_start) + (token - query_start)
            if position < 0:
                continue
            complete = (position + 1) // given.compress_ratio
            num_swa = min(position + 1, given.window_size)
            local = given.topk_indices[token, : given.topk if given.compact else min(complete, given.topk)]
            local = local.astype(np.int64)
            if given.compact:
                local = local[(local >= 0) & (local < min(complete, swa_start))]
            num_topk = len(local)
            rows[token, :num_topk] = np.where((local >= 0) & (local < swa_start), base + local, -1)
            gathered = position - num_swa + 1 - first_gathered + np.arange(num_swa)
            inside = (gathered >= 0) & (swa_start + gathered < row_stride)
            rows[token, num_topk : num_topk + num_swa] = np.where(inside, base + swa_start + gathered, -1)
            given.combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(given: MixedIndices) -> None:
    def swa_page(slot: int) -> int:
        return to_span(slot, given.swa_block_size, given.swa_block_span)

    def compressed_slot(request: int, local: int) -> int:
        assert given.compressed_block_table is not None
        return lookup_slot(given.compressed_block_table, request, local, given.compressed_block_size)

    def compressed_page(slot: int) -> int:
        return to_span(slot, given.compressed_block_size, given.compressed_block_span)

    given.sparse_indices[:] = -1
    num_decode_tokens = len(given.decode_swa_indices)
    for token in range(num_decode_tokens):
        request = int(given.token_to_req_indices[token])
        given.sparse_indices[token, : given.window_size] = [
            swa_page(int(slot)) for slot in given.decode_swa_indices[token]
        ]
        num_compressed = 0
        if given.decode_compressed_indices is not None:
            slots = [int(i) for i in given.decode_compressed_indices[token]]
            if given.decode_compressed_indices_are_local:
                slots = [compressed_slot(request, i) for i in slots]
                valid = given.decode_is_valid_token is None or given.decode_is_valid_token[token]
                num_compressed = sum(slot >= 0 for slot in slots) if valid else 0
            else:
                num_compressed = len(slots)
            if given.decode_compressed_topk_lens is not None and not given.decode_compressed_indices_are_local:
                num_compressed = min(max(int(given.decode_compressed_topk_lens[token]), 0), len(slots))
            given.sparse_indices[token, given.window_size : given.window_size + len(slots)] = [
                compressed_page(slot) for slot in slots
            ]
        given.sparse_topk_lens[token] = given.window_size + num_compressed
    for token in range(num_decode_tokens, len(given.sparse_topk_lens)):
        request = int(given.token_to_req_indices[token])
        given.sparse_topk_lens[token] = given.window_size
        if not 0 <= request < len(given.seq_lens):
            continue
        query_start, query_end = int(given.query_start_loc[request]), int(given.query_start_loc[request + 1])
        position = int(given.seq_lens[request]) - (query_end - query_start) + (token - query_start)
        start = max(position - given.window_size + 1, 0)
        for j in range(position + 1 - start):
            slot = lookup_slot(given.swa_block_table, request, start + j, given.swa_block_size)
            given.sparse_indices[token, j] = swa_page(slot)
        if given.compressed_block_table is None:
            continue
        num_compressed = max(0, min((position + 1) // given.compress_ratio, given.topk))
        for j in range(num_compressed):
            slot = compressed_slot(request, int(given.prefill_topk_indices[token - num_decode_tokens, j]))
            given.sparse_indices[token, given.window_size + j] = compressed_page(slot)
        given.sparse_topk_lens[token] += num_compressed


def to_span(slot: int, block_size: int, block_span: int) -> int:
    """Converts a slot to `block_span` slots from page to page instead of `block_size`; -1 stays absent."""
    slot = slot // block_size * block_span + slot % block_size if slot >= 0 else -1
    return slot if slot < 2**31 else -1
