"""Metadata of a step for the indexer: one kernel for decodes and the first prefill chunk, one for each other chunk."""

from typing import Any

from ..types.metadata import CompressedSlots, IndexerChunk, IndexerStep
from .compile import kernel
from .constants import constant

THREADS, COLUMNS = (constant("common/indexer_metadata.cu", name) for name in ("THREADS", "COLUMNS"))
WARPS = THREADS // 32
ITEMS_PER_THREAD = 4  # rows of a prefill request per thread; more rows take more CTAs
MOST_SPLITS = 256
NO_CHUNK = (0, 0, 0, 0, 0, 0, 1, 0, 0, 0)  # `Chunk` of common/indexer_metadata.cu


def build_indexer(step: IndexerStep) -> None:
    query_start_loc, seq_lens, block_table, counts, buffers, chunk = step
    capacity = len(buffers.decode_lens)
    element_blocks = -(-capacity // THREADS)
    copied = counts.batch_size if counts.flatten else 0
    width = max(counts.columns, counts.columns_before)
    copy_blocks = -(-max(copied, counts.entries_before) // WARPS) * -(-width // COLUMNS)
    decode_blocks, chunk_blocks, chunk_struct = 1 + element_blocks + copy_blocks, 0, NO_CHUNK
    if chunk is not None:
        chunk_struct, chunk_blocks = _struct(chunk)
    kernel("common/indexer_metadata.cu", "build_indexer")(
        (decode_blocks + chunk_blocks,),
        (THREADS,),
        (
            query_start_loc, seq_lens, len(seq_lens), block_table, block_table.strides[0] // 4,
            block_table.shape[1], counts.num_decodes, counts.batch_size, counts.flatten,
            counts.lens_per_entry, counts.columns, counts.entries_before,
            counts.columns_before, counts.block_size, counts.compress_ratio, counts.decode_len, counts.maps_slots,
            buffers.decode_lens, buffers.seq_lens, capacity, buffers.slot_mapping, buffers.block_table,
            buffers.block_table.shape[1], buffers.schedule, len(buffers.schedule) - 1, element_blocks,
            decode_blocks, *chunk_struct,
        ),
        overlap=True,
    )  # fmt: skip


def compressed_slot_mapping(args: CompressedSlots) -> None:
    table, slots = args.block_table, args.slots
    if not len(slots):
        return
    kernel("common/indexer_metadata.cu", "compressed_slot_mapping")(
        (-(-len(slots) // THREADS),),
        (THREADS,),
        (
            args.query_start_loc, args.seq_lens, len(args.seq_lens), table, table.strides[0] // 4, table.shape[1],
            args.num_tokens, args.block_size, args.compress_ratio, slots, len(slots),
        ),
        overlap=True,
    )  # fmt: skip


def build_indexer_chunk(query_start_loc: Any, seq_lens: Any, compress_ratio: int, chunk: IndexerChunk) -> None:
    chunk_struct, blocks = _struct(chunk)
    kernel("common/indexer_metadata.cu", "build_indexer_chunk")(
        (blocks,), (THREADS,), (query_start_loc, seq_lens, compress_ratio, *chunk_struct), overlap=True
    )


def _struct(chunk: IndexerChunk) -> tuple[tuple[Any, ...], int]:
    """`Chunk` of common/indexer_metadata.cu, and its CTAs."""
    first_request, num_reqs, longest, cu_seqlen_ks, cu_seqlen_ke, cu_seq_lens, token_to_seq = chunk
    splits = min(max(-(-longest // (ITEMS_PER_THREAD * THREADS)), 1), MOST_SPLITS)
    members = (
        cu_seqlen_ks, cu_seqlen_ke, cu_seq_lens, token_to_seq, first_request, num_reqs, splits, len(cu_seqlen_ks),
        len(token_to_seq), 0,
    )  # fmt: skip
    return members, num_reqs * splits
