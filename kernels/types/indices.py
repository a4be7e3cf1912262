"""Arguments of the index maps that take many."""

from typing import Any, NamedTuple


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
