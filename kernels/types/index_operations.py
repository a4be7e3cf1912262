"""The integer operations among those of `operations.py`: steps, index maps, a batch's metadata."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from .metadata import BatchCounts, IndexerBuffers, IndexerChunk, IndexerCounts, SwaBuffers

Array: TypeAlias = Any


class Advance(Protocol):
    """One decode step forward (`cumla.ops.advance`)."""

    def advance_step(
        self,
        num_seqs: int,
        num_queries: int,
        block_size: int,
        input_tokens: Array,
        sampled_token_ids: Array,
        input_positions: Array,
        seq_lens: Array,
        slot_mapping: Array,
        block_tables: Array,
    ) -> None: ...


class IndexerMetadata(Protocol):
    """The indexer's metadata of a batch: of its decodes, and of its first chunk of prefills if it has one."""

    def build_indexer(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        block_table: Array,
        counts: IndexerCounts,
        buffers: IndexerBuffers,
        chunk: IndexerChunk | None,
    ) -> None: ...

    def compressed_slot_mapping(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        block_table: Array,
        num_tokens: int,
        block_size: int,
        compress_ratio: int,
        slots: Array,
    ) -> None: ...

    def build_indexer_chunk(
        self, query_start_loc: Array, seq_lens: Array, compress_ratio: int, chunk: IndexerChunk
    ) -> None: ...


class MixedIndices(NamedTuple):
    """The arguments of `cumla.build_flashinfer_mixed_sparse_indices`, and the arrays of its results."""

    decode_swa_indices: Array
    decode_compressed_indices: Array | None
    decode_compressed_topk_lens: Array | None
    prefill_topk_indices: Array
    query_start_loc: Array
    seq_lens: Array
    token_to_req_indices: Array
    swa_block_table: Array
    swa_block_size: int
    compressed_block_table: Array | None
    compressed_block_size: int
    window_size: int
    compress_ratio: int
    topk: int
    decode_compressed_indices_are_local: bool
    decode_is_valid_token: Array | None
    swa_block_span: int
    compressed_block_span: int
    sparse_indices: Array
    sparse_topk_lens: Array


class Indices(Protocol):
    """Maps of the indices that attention reads."""

    def compute_swa_indices_and_lens(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        token_to_req_indices: Array,
        is_valid_token: Array,
        block_table: Array,
        block_size: int,
        window_size: int,
        token_offset: int,
        swa_indices: Array,
        swa_lens: Array,
    ) -> None: ...

    def compute_global_topk_indices_and_lens(
        self,
        topk_indices: Array,
        token_to_req_indices: Array,
        block_table: Array,
        block_size: int,
        is_valid_token: Array,
        compact: bool,
        positions: Array | None,
        compress_ratio: int,
        global_topk_indices: Array,
        topk_lens: Array,
    ) -> None: ...

    def combine_topk_swa_indices(
        self,
        topk_indices: Array,
        query_start_loc: Array,
        seq_lens: Array,
        gather_lens: Array,
        window_size: int,
        compress_ratio: int,
        topk: int,
        row_stride: int,
        swa_start: int,
        compact: bool,
        combined_indices: Array,
        combined_lens: Array,
    ) -> None: ...

    def build_flashinfer_mixed_sparse_indices(self, given: MixedIndices) -> None: ...


class WindowMetadata(Protocol):
    """The window's metadata of a batch."""

    def build_sparse_swa(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        slot_mapping: Array,
        block_table: Array,
        c128a_block_table: Array | None,
        counts: BatchCounts,
        block_size: int,
        window_size: int,
        c128a_block_size: int,
        c128a_width: int,
        buffers: SwaBuffers,
    ) -> None: ...
