"""Metadata of a step for the indexer, one entry or token per loop step, parallel over the cores."""

import numpy as np

from ..numba_common.compiled import compiled
from ..types.metadata import SPLIT_PAGES, CompressedSlots, IndexerChunk, IndexerStep
from .rows import copy_row
from .threads import parallel_for

TO_SEARCH = 20  # nanoseconds to find a token's request


def build_indexer(step: IndexerStep) -> None:
    query_start_loc, seq_lens, block_table, counts, buffers, chunk = step
    buffers.decode_lens[:] = 0
    buffers.seq_lens[:] = 0
    entries, columns = max(counts.batch_size, counts.entries_before), max(counts.columns, counts.columns_before)
    parallel_for(
        entries, columns + TO_SEARCH, _decode,
        query_start_loc, seq_lens, block_table, counts, buffers.decode_lens, buffers.seq_lens, buffers.block_table,
    )  # fmt: skip
    schedule_splits(
        buffers.seq_lens, counts.lens_per_entry, counts.batch_size, SPLIT_PAGES * counts.block_size, buffers.schedule
    )
    if counts.maps_slots:
        compressed_slot_mapping(step.slots)
    if chunk is not None:
        build_indexer_chunk(query_start_loc, seq_lens, counts.compress_ratio, chunk)


def build_indexer_chunk(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, compress_ratio: int, chunk: IndexerChunk
) -> None:
    _chunk(query_start_loc, seq_lens, compress_ratio, chunk)


def compressed_slot_mapping(args: CompressedSlots) -> None:
    parallel_for(len(args.slots), TO_SEARCH, _slot_mapping, args)


@compiled(nogil=True)
def _decode(
    first_entry, end_entry, query_start_loc, seq_lens, block_table, counts, decode_lens, out_seq_lens, out_block_table
):
    columns = max(counts.columns, counts.columns_before)
    for entry in range(first_entry, end_entry):
        request = np.int64(-1)
        if counts.flatten and entry < counts.batch_size:
            decode_lens[entry] = 1
            request = request_of(query_start_loc, counts.num_decodes, entry)
            if request >= 0:
                visible = visible_to(query_start_loc, seq_lens, request, entry)
                out_seq_lens[entry] = rows_of(visible, counts.compress_ratio)
        elif entry < counts.batch_size:
            decode_lens[entry] = query_start_loc[entry + 1] - query_start_loc[entry]
            for j in range(counts.lens_per_entry):
                visible = np.int64(seq_lens[entry]) - max(counts.decode_len - 1 - j, 0)
                out_seq_lens[entry * counts.lens_per_entry + j] = rows_of(visible, counts.compress_ratio)
        if entry < len(out_block_table):
            out_block_table[entry, :columns] = 0
            if request >= 0:
                copy_row(out_block_table[entry, : counts.columns], block_table[request])


@compiled
def request_of(query_start_loc, num_reqs, token):
    """The request that a token belongs to, or -1."""
    if num_reqs == 0 or token < query_start_loc[0] or token >= query_start_loc[num_reqs]:
        return np.int64(-1)
    return np.searchsorted(query_start_loc[1:num_reqs], token, side="right")


@compiled
def visible_to(query_start_loc, seq_lens, request, token):
    """Positions up to and including a query token's; the last query token is the sequence's last."""
    return np.int64(seq_lens[request]) - query_start_loc[request + 1] + token + 1


@compiled
def rows_of(positions, compress_ratio):
    """Number of complete rows in `positions` positions."""
    return max(positions, np.int64(0)) // compress_ratio


@compiled
def schedule_splits(lens, lens_per_entry, batch_size, split, schedule):
    """Assign the splits of all entries to SMs in contiguous ranges of equal size, or larger by one at the front."""
    num_sms = len(schedule) - 1
    total = 0
    for entry in range(batch_size):
        total += splits_of(lens, lens_per_entry, entry, split)
    entry, passed = 0, 0
    for sm in range(num_sms + 1):
        start = sm * (total // num_sms) + min(sm, total % num_sms)
        while entry < batch_size and passed + splits_of(lens, lens_per_entry, entry, split) <= start:
            passed += splits_of(lens, lens_per_entry, entry, split)
            entry += 1
        schedule[sm, 0] = entry
        schedule[sm, 1] = start - passed


@compiled
def splits_of(lens, lens_per_entry, entry, split):
    """Number of splits in an entry's longest length, rounded up."""
    return (np.int64(lens[(entry + 1) * lens_per_entry - 1]) + split - 1) // split


@compiled(nogil=True)
def _slot_mapping(first_token, end_token, args):
    for token in range(first_token, end_token):
        args.slots[token] = -1
        request = np.int64(-1)
        if token < args.num_tokens:
            request = request_of(args.query_start_loc, len(args.seq_lens), token)
        if request < 0:
            continue
        positions = visible_to(args.query_start_loc, args.seq_lens, request, token)
        row, rows = positions // args.compress_ratio - 1, args.block_table.shape[1] * args.block_size
        if positions <= 0 or positions % args.compress_ratio or row >= rows:
            continue
        block = np.int64(args.block_table[request, row // args.block_size])
        if block >= 0:
            args.slots[token] = block * args.block_size + row % args.block_size


@compiled
def _chunk(query_start_loc, seq_lens, compress_ratio, chunk):
    origin = query_start_loc[chunk.first_request]
    row_start = 0
    for i in range(chunk.num_reqs):
        request = chunk.first_request + i
        row_end = min(row_start + rows_of(np.int64(seq_lens[request]), compress_ratio), len(chunk.token_to_seq))
        chunk.cu_seq_lens[i] = row_start
        chunk.cu_seq_lens[i + 1] = row_end
        chunk.token_to_seq[row_start:row_end] = i
        first = max(query_start_loc[request] - origin, 0)
        last = min(query_start_loc[request + 1] - origin, len(chunk.cu_seqlen_ks))
        for token in range(first, last):
            visible = visible_to(query_start_loc, seq_lens, request, token + origin)
            chunk.cu_seqlen_ks[token] = row_start
            chunk.cu_seqlen_ke[token] = row_start + rows_of(visible, compress_ratio)
        row_start = row_end
