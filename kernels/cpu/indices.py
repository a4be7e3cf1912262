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


def compute_swa_indices_and_lens(given: WindowSlots):
    parallel_for(len(given.swa_lens), given.window_size * TO_MAP, _swa, given)


@compiled(nogil=True)
def _swa(first_token, end_token, given):
    for t in range(first_token, end_token):
        given.swa_indices[t] = -1
        given.swa_lens[t] = 0
        token = t + given.token_offset
        request = given.token_to_req_indices[token]
        if given.is_valid_token[token] and 0 <= request < len(given.seq_lens):
            position = token_position(given.query_start_loc, given.seq_lens, request, token)
            row = given.swa_indices[t, : given.window_size]
            given.swa_lens[t] = write_window(
                given.block_table, request, position, given.block_size, given.block_size, row
            )


@compiled
def write_window(block_table, request, position, block_size, block_span, row):
    """Write the slots of the last len(row) positions up to `position` into `row`; returns their number."""
    start = max(position - len(row) + 1, 0)
    count = max(position + 1 - start, 0)
    for j in range(count):
        row[j] = to_span(lookup_slot(block_table, request, start + j, block_size), block_size, block_span)
    return count


def compute_global_topk_indices_and_lens(given: TopkSlots):
    if given.positions is None:
        given = given._replace(positions=NO_VECTOR)
    parallel_for(len(given.topk_indices), given.topk_indices.shape[1] * TO_MAP, _map_topk, given)


@compiled(nogil=True)
def _map_topk(first_token, end_token, given):
    slots = given.global_topk_indices
    for token in range(first_token, end_token):
        request = given.token_to_req_indices[token]
        complete = complete_rows(given.positions, token, given.compress_ratio)
        count = 0
        for j in range(slots.shape[1]):
            local = np.int64(given.topk_indices[token, j])
            slot = lookup_slot(given.block_table, request, local, given.block_size) if local < complete else -1
            if given.compact:
                slots[token, j] = -1
                if slot >= 0:
                    slots[token, count] = slot
            else:
                slots[token, j] = slot
            count += slot >= 0
        given.topk_lens[token] = count if given.is_valid_token[token] else 0


def combine_topk_swa_indices(given: CombinedIndices):
    parallel_for(len(given.combined_lens), given.combined_indices.shape[1] * TO_MAP, _combine, given)


@compiled(nogil=True)
def _combine(first_token, end_token, given):
    num_requests, swa_start, rows = len(given.seq_lens), given.swa_start, given.combined_indices
    for token in range(first_token, end_token):
        rows[token] = -1
        given.combined_lens[token] = 0
        query = token + given.query_start_loc[0]
        request = np.searchsorted(given.query_start_loc, query, side="right") - 1
        if not 0 <= request < num_requests:
            continue
        position = token_position(given.query_start_loc, given.seq_lens, request, query)
        if position < 0:
            continue
        base = np.int64(given.row_stride) * request
        complete = (position + 1) // given.compress_ratio
        num_topk = 0 if given.compact else min(complete, given.topk)
        num_swa = min(position + 1, given.window_size)
        for j in range(given.topk if given.compact else num_topk):
            local = given.topk_indices[token, j]
            if given.compact and 0 <= local < min(complete, swa_start):
                rows[token, num_topk] = base + local
                num_topk += 1
            elif not given.compact and 0 <= local < swa_start:
                rows[token, j] = base + local
        first_gathered = np.int64(given.seq_lens[request]) - given.gather_lens[request]
        for j in range(num_swa):
            gathered = position - num_swa + 1 - first_gathered + j
            if gathered >= 0 and swa_start + gathered < given.row_stride:
                rows[token, num_topk + j] = base + swa_start + gathered
        given.combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(given: MixedIndices):
    # Compiled code takes arrays, not None: an array without effect replaces a missing argument.
    decodes, lens, valid = len(given.decode_swa_indices), given.decode_compressed_topk_lens, given.decode_is_valid_token
    if lens is None or given.decode_compressed_indices_are_local:
        lens = np.full(decodes, np.iinfo(np.int32).max, np.int32)
    given = given._replace(
        decode_compressed_topk_lens=lens, decode_is_valid_token=np.ones(decodes, np.bool_) if valid is None else valid
    )
    if given.decode_compressed_indices is None:
        given = given._replace(decode_compressed_indices=np.empty((decodes, 0), np.int32))
    if given.compressed_block_table is None:
        given = given._replace(compressed_block_table=np.empty((0, 0), np.int32), topk=0)
    parallel_for(len(given.sparse_topk_lens), given.sparse_indices.shape[1] * TO_MAP, _build_mixed, given)


@compiled(nogil=True)
def _build_mixed(first_token, end_token, given):
    num_decode_tokens, window_size = len(given.decode_swa_indices), given.window_size
    width, are_local = given.decode_compressed_indices.shape[1], given.decode_compressed_indices_are_local
    for token in range(first_token, end_token):
        row = given.sparse_indices[token]
        row[:] = -1
        request = given.token_to_req_indices[token]
        compressed = 0
        if token < num_decode_tokens:
            for j in range(window_size):
                row[j] = to_span(given.decode_swa_indices[token, j], given.swa_block_size, given.swa_block_span)
            for j in range(width):
                slot = np.int64(given.decode_compressed_indices[token, j])
                if are_local:
                    slot = lookup_slot(given.compressed_block_table, request, slot, given.compressed_block_size)
                    compressed += slot >= 0 and given.decode_is_valid_token[token]
                row[window_size + j] = to_span(slot, given.compressed_block_size, given.compressed_block_span)
            if not are_local:
                compressed = min(max(given.decode_compressed_topk_lens[token], 0), width)
        elif 0 <= request < len(given.seq_lens):
            position = token_position(given.query_start_loc, given.seq_lens, request, token)
            table, block_size, block_span = given.swa_block_table, given.swa_block_size, given.swa_block_span
            write_window(table, request, position, block_size, block_span, row[:window_size])
            compressed = max(0, min((position + 1) // given.compress_ratio, given.topk))
            for j in range(compressed):
                local = np.int64(given.prefill_topk_indices[token - num_decode_tokens, j])
                slot = lookup_slot(given.compressed_block_table, request, local, given.compressed_block_size)
                row[window_size + j] = to_span(slot, given.compressed_block_size, given.compressed_block_span)
        given.sparse_topk_lens[token] = window_size + compressed
