"""Arguments of the index maps, in named tuples."""

from typing import Any, NamedTuple


class WindowSlots(NamedTuple):
    """The arguments of `cumla.compute_swa_indices_and_lens`, and the arrays of its results."""

    query_start_loc: Any
    seq_lens: Any
    token_to_req_indices: Any
    is_valid_token: Any
    block_table: Any
    block_size: int
    window_size: int
    token_offset: int
    swa_indices: Any
    swa_lens: Any


class TopkSlots(NamedTuple):
    """The arguments of `cumla.compute_global_topk_indices_and_lens`, and the arrays of its results.

    Attributes:
        pool: positions of an entry, a divisor of block_size; 1, or compress_ratio in the compact form, where the slots
            of an entry's positions and then of the open pool's are written
    """

    topk_indices: Any
    token_to_req_indices: Any
    block_table: Any
    block_size: int
    is_valid_token: Any
    positions: Any
    compress_ratio: int
    global_topk_indices: Any
    topk_lens: Any
    compact: bool
    pool: int = 1


class CombinedIndices(NamedTuple):
    """The arguments of `cumla.combine_topk_swa_indices`, and the arrays of its results.

    Attributes:
        row_stride: rows of a request in the workspace
        swa_start: first of these rows that is not compressed
    """

    topk_indices: Any
    query_start_loc: Any
    seq_lens: Any
    gather_lens: Any
    window_size: int
    compress_ratio: int
    topk: int
    row_stride: int
    swa_start: int
    compact: bool
    combined_indices: Any
    combined_lens: Any


class MixedIndices(NamedTuple):
    """The arguments of `cumla.build_flashinfer_mixed_sparse_indices`, and the arrays of its results."""

    decode_swa_indices: Any
    decode_compressed_indices: Any
    decode_compressed_topk_lens: Any
    prefill_topk_indices: Any
    query_start_loc: Any
    seq_lens: Any
    token_to_req_indices: Any
    swa_block_table: Any
    swa_block_size: int
    compressed_block_table: Any
    compressed_block_size: int
    window_size: int
    compress_ratio: int
    topk: int
    decode_compressed_indices_are_local: bool
    decode_is_valid_token: Any
    swa_block_span: int
    compressed_block_span: int
    sparse_indices: Any
    sparse_topk_lens: Any
