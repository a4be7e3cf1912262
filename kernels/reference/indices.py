"""Index maps: from positions and local top-k entries to cache slots."""

from __future__ import annotations

import itertools

import numpy as np

from ..types.indices import CombinedIndices, MixedIndices, TopkSlots, WindowSlots
from .rows import lookup_slot


def compute_swa_indices_and_lens(args: WindowSlots) -> None:
    args.swa_indices[:] = -1
    args.swa_lens[:] = 0
    for t in range(len(args.swa_lens)):
        token = t + args.token_offset
        request = int(args.token_to_req_indices[token])
        if not args.is_valid_token[token] or not 0 <= request < len(args.seq_lens):
            continue
        query_start, query_end = int(args.query_start_loc[request]), int(args.query_start_loc[request + 1])
        position = int(args.seq_lens[request]) - (query_end - query_start) + (token - query_start)
        start = max(position - args.window_size + 1, 0)
        args.swa_lens[t] = max(0, position + 1 - start)
        for j in range(args.swa_lens[t]):
            args.swa_indices[t, j] = lookup_slot(args.block_table, request, start + j, args.block_size)


def compute_global_topk_indices_and_lens(args: TopkSlots) -> None:
    for token, local in enumerate(args.topk_indices):
        request = int(args.token_to_req_indices[token])
        table, block_size = args.block_table, args.block_size
        if args.pool > 1:
            slots = _slots_of_pools(args, token, request)
            args.global_topk_indices[token] = -1
            args.global_topk_indices[token, : len(slots)] = slots
            args.topk_lens[token] = len(slots) if args.is_valid_token[token] else 0
            continue
        slots = np.array([lookup_slot(table, request, int(i), block_size) for i in local], np.int32)
        if args.positions is not None:
            slots[local >= (int(args.positions[token]) + 1) // args.compress_ratio] = -1
        valid = slots >= 0
        if args.compact:
            slots = np.concatenate([slots[valid], slots[~valid]])
        args.global_topk_indices[token] = slots
        args.topk_lens[token] = valid.sum() if args.is_valid_token[token] else 0


def _slots_of_pools(args: TopkSlots, token: int, request: int) -> np.ndarray:
    """Slots of the positions of the selected pools, then of the open pool, without absent pages."""
    pool, end = args.pool, max(int(args.positions[token]) + 1, 0)
    selected = [(int(p), pool) for p in args.topk_indices[token] if 0 <= p < end // pool] + [(end // pool, end % pool)]
    slots: list[int] = []
    for p, count in selected:
        place = lookup_slot(args.block_table, request, p, args.block_size // pool)
        if 0 <= place < 2**31 // pool:
            slots += range(place * pool, place * pool + count)
    return np.array(slots, np.int32)


def combine_topk_swa_indices(args: CombinedIndices) -> None:
    rows, row_stride, swa_start = args.combined_indices, args.row_stride, args.swa_start
    rows[:] = -1
    args.combined_lens[:] = 0
    starts = args.query_start_loc.astype(int) - int(args.query_start_loc[0])
    for request, (query_start, query_end) in enumerate(itertools.pairwise(starts.tolist())):
        seq_len = int(args.seq_lens[request])
        first_gathered = seq_len - int(args.gather_lens[request])
        base = row_stride * request
        for token in range(max(query_start, 0), min(query_end, len(rows))):
            position = seq_len - (query_end - query_start) + (token - query_start)
            if position < 0:
                continue
            complete = (position + 1) // args.compress_ratio
            num_swa = min(position + 1, args.window_size)
            local = args.topk_indices[token, : args.topk if args.compact else min(complete, args.topk)]
            local = local.astype(np.int64)
            if args.compact:
                local = local[(local >= 0) & (local < min(complete, swa_start))]
            num_topk = len(local)
            rows[token, :num_topk] = np.where((local >= 0) & (local < swa_start), base + local, -1)
            gathered = position - num_swa + 1 - first_gathered + np.arange(num_swa)
            inside = (gathered >= 0) & (swa_start + gathered < row_stride)
            rows[token, num_topk : num_topk + num_swa] = np.where(inside, base + swa_start + gathered, -1)
            args.combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(args: MixedIndices) -> None:
    def swa_page(slot: int) -> int:
        return to_span(slot, args.swa_block_size, args.swa_block_span)

    def compressed_slot(request: int, local: int) -> int:
        assert args.compressed_block_table is not None
        return lookup_slot(args.compressed_block_table, request, local, args.compressed_block_size)

    def compressed_page(slot: int) -> int:
        return to_span(slot, args.compressed_block_size, args.compressed_block_span)

    args.sparse_indices[:] = -1
    num_decode_tokens = len(args.decode_swa_indices)
    for token in range(num_decode_tokens):
        request = int(args.token_to_req_indices[token])
        args.sparse_indices[token, : args.window_size] = [
            swa_page(int(slot)) for slot in args.decode_swa_indices[token]
        ]
        num_compressed = 0
        if args.decode_compressed_indices is not None:
            slots = [int(i) for i in args.decode_compressed_indices[token]]
            if args.decode_compressed_indices_are_local:
                slots = [compressed_slot(request, i) for i in slots]
                valid = args.decode_is_valid_token is None or args.decode_is_valid_token[token]
                num_compressed = sum(slot >= 0 for slot in slots) if valid else 0
            else:
                num_compressed = len(slots)
            if args.decode_compressed_topk_lens is not None and not args.decode_compressed_indices_are_local:
                num_compressed = min(max(int(args.decode_compressed_topk_lens[token]), 0), len(slots))
            args.sparse_indices[token, args.window_size : args.window_size + len(slots)] = [
                compressed_page(slot) for slot in slots
            ]
        args.sparse_topk_lens[token] = args.window_size + num_compressed
    for token in range(num_decode_tokens, len(args.sparse_topk_lens)):
        request = int(args.token_to_req_indices[token])
        args.sparse_topk_lens[token] = args.window_size
        if not 0 <= request < len(args.seq_lens):
            continue
        query_start, query_end = int(args.query_start_loc[request]), int(args.query_start_loc[request + 1])
        position = int(args.seq_lens[request]) - (query_end - query_start) + (token - query_start)
        start = max(position - args.window_size + 1, 0)
        for j in range(position + 1 - start):
            slot = lookup_slot(args.swa_block_table, request, start + j, args.swa_block_size)
            args.sparse_indices[token, j] = swa_page(slot)
        if args.compressed_block_table is None:
            continue
        num_compressed = max(0, min((position + 1) // args.compress_ratio, args.topk))
        for j in range(num_compressed):
            slot = compressed_slot(request, int(args.prefill_topk_indices[token - num_decode_tokens, j]))
            args.sparse_indices[token, args.window_size + j] = compressed_page(slot)
        args.sparse_topk_lens[token] += num_compressed


def to_span(slot: int, block_size: int, block_span: int) -> int:
    """Converts a slot to `block_span` slots from page to page instead of `block_size`; -1 stays absent."""
    slot = slot // block_size * block_span + slot % block_size if slot >= 0 else -1
    return slot if slot < 2**31 else -1
