"""Metadata of a step for the indexer, request by request."""

import numpy as np

from ..types.metadata import SPLIT_PAGES, CompressedSlots, IndexerChunk, IndexerStep
from .indexer import paged_mqa_logits_metadata


def build_indexer(step: IndexerStep) -> None:
    query_start_loc, seq_lens, block_table, counts, buffers, chunk = step
    buffers.decode_lens[:] = 0
    buffers.seq_lens[:] = 0
    buffers.block_table[:] = 0
    if counts.flatten:
        buffers.decode_lens[: counts.batch_size] = 1
    for request in range(counts.num_decodes):
        start, end, length = (int(x) for x in (*query_start_loc[request : request + 2], seq_lens[request]))
        if counts.flatten:
            for token in range(max(start, 0), min(end, counts.batch_size)):
                buffers.seq_lens[token] = rows_of(length - (end - 1 - token), counts.compress_ratio)
                buffers.block_table[token, : counts.columns] = block_table[request, : counts.columns]
        else:
            buffers.decode_lens[request] = end - start
            for j in range(counts.lens_per_entry):
                visible = length - max(counts.decode_len - 1 - j, 0)
                buffers.seq_lens[request * counts.lens_per_entry + j] = rows_of(visible, counts.compress_ratio)
    longest = buffers.seq_lens[: counts.batch_size * counts.lens_per_entry].reshape(-1, counts.lens_per_entry)[:, -1]
    paged_mqa_logits_metadata(longest, SPLIT_PAGES * counts.block_size, buffers.schedule)
    if counts.maps_slots:
        compressed_slot_mapping(step.slots)
    if chunk is not None:
        build_indexer_chunk(query_start_loc, seq_lens, counts.compress_ratio, chunk)


def rows_of(positions: int, compress_ratio: int) -> int:
    """Number of complete rows in `positions` positions."""
    return max(positions, 0) // compress_ratio


def compressed_slot_mapping(args: CompressedSlots) -> None:
    args.slots[:] = -1
    for request in range(len(args.seq_lens)):
        start, end = (int(x) for x in args.query_start_loc[request : request + 2])
        for token in range(max(start, 0), min(end, args.num_tokens)):
            position = int(args.seq_lens[request]) - end + token
            row, last = divmod(position + 1, args.compress_ratio)
            if position < 0 or last or row > args.block_table.shape[1] * args.block_size:
                continue
            page, offset = divmod(row - 1, args.block_size)
            if (block := int(args.block_table[request, page])) >= 0:
                args.slots[token] = block * args.block_size + offset


def build_indexer_chunk(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, compress_ratio: int, chunk: IndexerChunk
) -> None:
    first, count, _, cu_seqlen_ks, cu_seqlen_ke, cu_seq_lens, token_to_seq = chunk
    origin = int(query_start_loc[first])
    row_start = 0
    for i in range(count):
        request = first + i
        start, end, length = (int(x) for x in (*query_start_loc[request : request + 2], seq_lens[request]))
        row_end = min(row_start + rows_of(length, compress_ratio), len(token_to_seq))
        cu_seq_lens[i : i + 2] = row_start, row_end
        token_to_seq[row_start:row_end] = i
        for token in range(max(start - origin, 0), min(end - origin, len(cu_seqlen_ks))):
            cu_seqlen_ks[token] = row_start
            cu_seqlen_ke[token] = row_start + rows_of(length - end + origin + token + 1, compress_ratio)
        row_start = row_end
