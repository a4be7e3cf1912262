"""Metadata of a step for the indexer: lengths and slots, block tables, schedule of the splits, prefill chunks."""

from typing import Any

import numpy as np

from ..types.metadata import SPLIT_PAGES, CompressedSlots, IndexerChunk, IndexerStep
from .compiler import cuda
from .launch import launch
from .rows import find_request, lookup_block, token_position

THREADS = 128


def build_indexer(step: IndexerStep) -> None:
    query_start_loc, seq_lens, block_table, counts, buffers, chunk = step
    launch(
        lengths_kernel, -(-len(buffers.decode_lens) // THREADS), THREADS,
        query_start_loc, seq_lens, counts, buffers.decode_lens, buffers.seq_lens,
    )  # fmt: skip
    entries = max(counts.batch_size if counts.flatten else 0, counts.entries_before)
    if entries:
        launch(
            tables_kernel, entries, THREADS, query_start_loc, block_table, counts, buffers.block_table
        )  # fmt: skip
    launch(schedule_kernel, 1, THREADS, counts, buffers.seq_lens, buffers.schedule)
    if counts.maps_slots:
        compressed_slot_mapping(step.slots)
    if chunk is not None:
        build_indexer_chunk(query_start_loc, seq_lens, counts.compress_ratio, chunk)


def compressed_slot_mapping(args: CompressedSlots) -> None:
    launch(slots_kernel, -(-len(args.slots) // THREADS), THREADS, args)


def build_indexer_chunk(query_start_loc: Any, seq_lens: Any, compress_ratio: int, chunk: IndexerChunk) -> None:
    launch(chunk_kernel, chunk.num_reqs, THREADS, query_start_loc, seq_lens, compress_ratio, chunk)


@cuda.jit(device=True)
def rows_of(positions, compress_ratio):
    """Number of complete rows in `positions` positions."""
    return max(np.int64(positions), np.int64(0)) // compress_ratio


@cuda.jit(device=True)
def decode_of(query_start_loc, counts, entry):
    """The request of an entry, or -1 if the entry is a padding token."""
    request = find_request(query_start_loc, entry)
    return request if request < counts.num_decodes and entry < counts.batch_size else -1


def lengths_kernel(query_start_loc, seq_lens, counts, decode_lens, out_seq_lens):
    """A thread takes the elements of both arrays at its index, in a grid-stride loop."""
    for i in range(cuda.grid(1), len(decode_lens), cuda.gridsize(1)):
        decode_len, rows = np.int64(0), np.int64(0)
        if counts.flatten:
            if i < counts.batch_size:
                decode_len = np.int64(1)
            request = decode_of(query_start_loc, counts, i)
            if request >= 0:
                rows = rows_of(token_position(query_start_loc, seq_lens, request, i) + 1, counts.compress_ratio)
        else:
            entry, later = i // counts.lens_per_entry, max(counts.decode_len - 1 - i % counts.lens_per_entry, 0)
            if i < counts.batch_size:
                decode_len = np.int64(query_start_loc[i + 1]) - query_start_loc[i]
            if entry < counts.batch_size:
                rows = rows_of(np.int64(seq_lens[entry]) - later, counts.compress_ratio)
        decode_lens[i] = decode_len
        out_seq_lens[i] = rows


def tables_kernel(query_start_loc, block_table, counts, out_block_table):
    """A thread block copies an entry's row and clears the columns that the previous build wrote beyond it."""
    entry, request = cuda.blockIdx.x, -1
    if counts.flatten:
        request = decode_of(query_start_loc, counts, entry)
    for column in range(cuda.threadIdx.x, max(counts.columns, counts.columns_before), cuda.blockDim.x):
        block = 0
        if request >= 0 and column < counts.columns:
            block = block_table[request, column]
        out_block_table[entry, column] = block


def schedule_kernel(counts, lens, schedule):
    """One thread block; a thread searches for the starts of its SMs' ranges among the splits of all entries."""
    num_sms = len(schedule) - 1
    total = np.int64(0)
    for entry in range(counts.batch_size):
        total += splits_of(lens, counts, entry)
    for sm in range(cuda.threadIdx.x, num_sms + 1, cuda.blockDim.x):
        page = sm * (total // num_sms) + min(np.int64(sm), total % num_sms)
        entry = 0
        while entry < counts.batch_size and page >= splits_of(lens, counts, entry):
            page -= splits_of(lens, counts, entry)
            entry += 1
        schedule[sm, 0] = entry
        schedule[sm, 1] = page


@cuda.jit(device=True)
def splits_of(lens, counts, entry):
    """Number of splits in an entry's longest length, rounded up."""
    split = SPLIT_PAGES * counts.block_size
    return (np.int64(lens[(entry + 1) * counts.lens_per_entry - 1]) + split - 1) // split


def slots_kernel(args):
    """A thread takes the tokens of its index, in a grid-stride loop."""
    for token in range(cuda.grid(1), len(args.slots), cuda.gridsize(1)):
        slot = np.int64(-1)
        request = find_request(args.query_start_loc, token)
        if token < args.num_tokens and request >= 0:
            positions = token_position(args.query_start_loc, args.seq_lens, request, token) + 1
            if positions > 0 and positions % args.compress_ratio == 0:
                row = positions // args.compress_ratio - 1
                block = lookup_block(args.block_table, request, row // args.block_size)
                if block >= 0:
                    slot = block * args.block_size + row % args.block_size
        args.slots[token] = slot


def chunk_kernel(query_start_loc, seq_lens, compress_ratio, chunk):
    """A thread block takes a request, its threads every blockDim.x-th row and query."""
    number = cuda.blockIdx.x
    request = chunk.first_request + number
    total_rows, row_start = np.int64(len(chunk.token_to_seq)), np.int64(0)
    for earlier in range(chunk.first_request, request):
        row_start = min(row_start + rows_of(seq_lens[earlier], compress_ratio), total_rows)
    row_end = min(row_start + rows_of(seq_lens[request], compress_ratio), total_rows)
    for row in range(row_start + cuda.threadIdx.x, row_end, cuda.blockDim.x):
        chunk.token_to_seq[row] = number
    origin = np.int64(query_start_loc[chunk.first_request])
    first = max(query_start_loc[request] - origin, np.int64(0))
    last = min(query_start_loc[request + 1] - origin, np.int64(len(chunk.cu_seqlen_ks)))
    for token in range(first + cuda.threadIdx.x, last, cuda.blockDim.x):
        visible = token_position(query_start_loc, seq_lens, request, token + origin) + 1
        chunk.cu_seqlen_ks[token] = row_start
        chunk.cu_seqlen_ke[token] = row_start + rows_of(visible, compress_ratio)
    if cuda.threadIdx.x == 0:
        if number == 0:
            chunk.cu_seq_lens[0] = 0
        chunk.cu_seq_lens[number + 1] = row_end
