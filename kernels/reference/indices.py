"""Index maps: from positions and local top-k entries to cache slots."""

from __future__ import annotations

import numpy as np

from ..types.indices import MixedIndices
from .rows import lookup_slot


def compute_swa_indices_and_lens(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    token_to_req_indices: np.ndarray,
    is_valid_token: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
    window_size: int,
    token_offset: int,
    swa_indices: np.ndarray,
    swa_lens: np.ndarray,
) -> None:
    swa_indices[:] = -1
    swa_lens[:] = 0
    for t in range(len(swa_lens)):
        token = t + token_offset
        request = int(token_to_req_indices[token])
        if not is_valid_token[token] or not 0 <= request < len(seq_lens):
            continue
        query_start, query_end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        position = int(seq_lens[request]) - (query_end - query_start) + (token - query_start)
        start = max(position - window_size + 1, 0)
        swa_lens[t] = max(0, position + 1 - start)
        for j in range(swa_lens[t]):
            swa_indices[t, j] = lookup_slot(block_table, request, start + j, block_size)


def compute_global_topk_indices_and_lens(
    topk_indices: np.ndarray,
    token_to_req_indices: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
    is_valid_token: np.ndarray,
    compact: bool,
    positions: np.ndarray | None,
    compress_ratio: int,
    global_topk_indices: np.ndarray,
    topk_lens: np.ndarray,
) -> None:
    for token, local in enumerate(topk_indices):
        request = int(token_to_req_indices[token])
        slots = np.array([lookup_slot(block_table, request, int(i), block_size) for i in local], np.int32)
        if positions is not None:
            slots[local >= (int(positions[token]) + 1) // compress_ratio] = -1
        valid = slots >= 0
        if compact:
            slots = np.concatenate([slots[valid], slots[~valid]])
        global_topk_indices[token] = slots
        topk_lens[token] = valid.sum() if is_valid_token[token] else 0


def combine_topk_swa_indices(
    topk_indices: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    gather_lens: np.ndarray,
    window_size: int,
    compress_ratio: int,
    topk: int,
    row_stride: int,
    swa_start: int,
    compact: bool,
    combined_indices: np.ndarray,
    combined_lens: np.ndarray,
) -> None:
    combined_indices[:] = -1
    combined_lens[:] = 0
    for request in range(len(seq_lens)):
        query_start, query_end = (int(x) - int(query_start_loc[0]) for x in query_start_loc[request : request + 2])
        seq_len = int(seq_lens[request])
        first_gathered = seq_len - int(gather_lens[request])
        base = row_stride * request
        for token in range(max(query_start, 0), min(query_end, len(combined_lens))):
            position = seq_len - (query_end - query_start) + (token - query_start)
            if position < 0:
                continue
            complete = (position + 1) // compress_ratio
            num_swa = min(position + 1, window_size)
            local = topk_indices[token, : topk if compact else min(complete, topk)].astype(np.int64)
            if compact:
                local = local[(local >= 0) & (local < min(complete, swa_start))]
            num_topk = len(local)
            combined_indices[token, :num_topk] = np.where((local >= 0) & (local < swa_start), base + local, -1)
            gathered = position - num_swa + 1 - first_gathered + np.arange(num_swa)
            inside = (gathered >= 0) & (swa_start + gathered < row_stride)
            combined_indices[token, num_topk : num_topk + num_swa] = np.where(inside, base + swa_start + gathered, -1)
            combined_lens[token] = num_topk + num_swa


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
