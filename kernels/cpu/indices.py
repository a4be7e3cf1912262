"""Index maps: from positions and local top-k entries to cache slots, one token per loop step, parallel over cores."""

import numpy as np

from ..numba_common import slots
from ..numba_common.compiled import compiled
from ..types.indices import CombinedIndices, MixedIndices, TopkSlots, WindowSlots
from .rows import lookup_slot
from .threads import parallel_for

TO_MAP = 3  # approximate nanoseconds per entry

token_position = compiled(slots.token_position)
to_span = compiled(slots.to_span)
complete_rows = compiled(slots.complete_rows)
NO_VECTOR = np.empty(0, np.int32)


def compute_swa_indices_and_lens(args: WindowSlots):
    parallel_for(len(args.swa_lens), args.window_size * TO_MAP, _swa, args)


@compiled(nogil=True)
def _swa(first_token, end_token, args):
    for t in range(first_token, end_token):
        args.swa_indices[t] = -1
        args.swa_lens[t] = 0
        token = t + args.token_offset
        request = args.token_to_req_indices[token]
        if args.is_valid_token[token] and 0 <= request < len(args.seq_lens):
            position = token_position(args.query_start_loc, args.seq_lens, request, token)
            row = args.swa_indices[t, : args.window_size]
            args.swa_lens[t] = write_window(args.block_table, request, position, args.block_size, args.block_size, row)


@compiled
def write_window(block_table, request, position, block_size, block_span, row):
    """Write the slots of the last len(row) positions up to `position` into `row`; returns their number."""
    start = max(position - len(row) + 1, 0)
    count = max(position + 1 - start, 0)
    for j in range(count):
        row[j] = to_span(lookup_slot(block_table, request, start + j, block_size), block_size, block_span)
    return count


def compute_global_topk_indices_and_lens(args: TopkSlots):
    if args.positions is None:
        args = args._replace(positions=NO_VECTOR)
    parallel_for(len(args.topk_indices), args.topk_indices.shape[1] * TO_MAP, _map_topk, args)


@compiled(nogil=True)
def _map_topk(first_token, end_token, args):
    slots, pool, block_size = args.global_topk_indices, args.pool, args.block_size // args.pool
    for token in range(first_token, end_token):
        request = args.token_to_req_indices[token]
        complete = complete_rows(args.positions, token, args.compress_ratio)
        count = 0
        for j in range(args.topk_indices.shape[1]):
            local = np.int64(args.topk_indices[token, j])
            slot = lookup_slot(args.block_table, request, local, block_size) if local < complete else -1
            if not args.compact:
                slots[token, j] = slot
                count += slot >= 0
            elif 0 <= slot < 2**31 // pool:
                for i in range(pool):
                    slots[token, count + i] = slot * pool + i
                count += pool
        if pool > 1:
            slot = lookup_slot(args.block_table, request, complete, block_size)  # of the open pool
            if 0 <= slot < 2**31 // pool:
                for i in range(max(np.int64(args.positions[token]) + 1, 0) % pool):
                    slots[token, count] = slot * pool + i
                    count += 1
        if args.compact:
            slots[token, count:] = -1
        args.topk_lens[token] = count if args.is_valid_token[token] else 0


def combine_topk_swa_indices(args: CombinedIndices):
    parallel_for(len(args.combined_lens), args.combined_indices.shape[1] * TO_MAP, _combine, args)


@compiled(nogil=True)
def _combine(first_token, end_token, args):
    num_requests, swa_start, rows = len(args.seq_lens), args.swa_start, args.combined_indices
    for token in range(first_token, end_token):
        rows[token] = -1
        args.combined_lens[token] = 0
        query = token + args.query_start_loc[0]
        request = np.searchsorted(args.query_start_loc, query, side="right") - 1
        if not 0 <= request < num_requests:
            continue
        position = token_position(args.query_start_loc, args.seq_lens, request, query)
        if position < 0:
            continue
        base = np.int64(args.row_stride) * request
        complete = (position + 1) // args.compress_ratio
        num_topk = 0 if args.compact else min(complete, args.topk)
        num_swa = min(position + 1, args.window_size)
        for j in range(args.topk if args.compact else num_topk):
            local = args.topk_indices[token, j]
            if args.compact and 0 <= local < min(complete, swa_start):
                rows[token, num_topk] = base + local
                num_topk += 1
            elif not args.compact and 0 <= local < swa_start:
                rows[token, j] = base + local
        first_gathered = np.int64(args.seq_lens[request]) - args.gather_lens[request]
        for j in range(num_swa):
            gathered = position - num_swa + 1 - first_gathered + j
            if gathered >= 0 and swa_start + gathered < args.row_stride:
                rows[token, num_topk + j] = base + swa_start + gathered
        args.combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(args: MixedIndices):
    # Compiled code takes arrays, not None: an array without effect replaces a missing argument.
    decodes, lens, valid = len(args.decode_swa_indices), args.decode_compressed_topk_lens, args.decode_is_valid_token
    if lens is None or args.decode_compressed_indices_are_local:
        lens = np.full(decodes, np.iinfo(np.int32).max, np.int32)
    args = args._replace(
        decode_compressed_topk_lens=lens, decode_is_valid_token=np.ones(decodes, np.bool_) if valid is None else valid
    )
    if args.decode_compressed_indices is None:
        args = args._replace(decode_compressed_indices=np.empty((decodes, 0), np.int32))
    if args.compressed_block_table is None:
        args = args._replace(compressed_block_table=np.empty((0, 0), np.int32), topk=0)
    parallel_for(len(args.sparse_topk_lens), args.sparse_indices.shape[1] * TO_MAP, _build_mixed, args)


@compiled(nogil=True)
def _build_mixed(first_token, end_token, args):
    num_decode_tokens, window_size = len(args.decode_swa_indices), args.window_size
    width, are_local = args.decode_compressed_indices.shape[1], args.decode_compressed_indices_are_local
    for token in range(first_token, end_token):
        row = args.sparse_indices[token]
        row[:] = -1
        request = args.token_to_req_indices[token]
        compressed = 0
        if token < num_decode_tokens:
            for j in range(window_size):
                row[j] = to_span(args.decode_swa_indices[token, j], args.swa_block_size, args.swa_block_span)
            for j in range(width):
                slot = np.int64(args.decode_compressed_indices[token, j])
                if are_local:
                    slot = lookup_slot(args.compressed_block_table, request, slot, args.compressed_block_size)
                    compressed += slot >= 0 and args.decode_is_valid_token[token]
                row[window_size + j] = to_span(slot, args.compressed_block_size, args.compressed_block_span)
            if not are_local:
                compressed = min(max(args.decode_compressed_topk_lens[token], 0), width)
        elif 0 <= request < len(args.seq_lens):
            position = token_position(args.query_start_loc, args.seq_lens, request, token)
            table, block_size, block_span = args.swa_block_table, args.swa_block_size, args.swa_block_span
            write_window(table, request, position, block_size, block_span, row[:window_size])
            compressed = max(0, min((position + 1) // args.compress_ratio, args.topk))
            for j in range(compressed):
                local = np.int64(args.prefill_topk_indices[token - num_decode_tokens, j])
                slot = lookup_slot(args.compressed_block_table, request, local, args.compressed_block_size)
                row[window_size + j] = to_span(slot, args.compressed_block_size, args.compressed_block_span)
        args.sparse_topk_lens[token] = window_size + compressed
