"""Metadata of a step, in one kernel."""

from typing import Any

from ..types.metadata import BatchCounts, SwaBuffers
from .compile import kernel
from .launch import C_TYPES, pointer

WARPS = 4  # per CTA, as in common/window_metadata.cu


def build_sparse_swa(
    query_start_loc: Any,
    seq_lens: Any,
    slot_mapping: Any,
    block_table: Any,
    c128a_block_table: Any | None,
    counts: BatchCounts,
    block_size: int,
    window_size: int,
    c128a_block_size: int,
    c128a_width: int,
    buffers: SwaBuffers,
    replay_start: Any | None = None,
    noncausal: bool = False,
) -> None:
    c128a = (0, 0, 0)
    if c128a_block_table is not None:
        c128a = (c128a_block_table.data.ptr, c128a_block_table.strides[0] // 4, c128a_block_table.shape[1])
    token_blocks = -(-max(counts.rows, counts.rows_before) // WARPS)
    kernel("common/window_metadata.cu", "build_sparse_swa", SLOT=C_TYPES[slot_mapping.dtype])(
        (token_blocks + 1,),
        (32 * WARPS,),
        (
            query_start_loc, seq_lens, counts.num_reqs, counts.num_decodes,
            counts.num_decode_tokens, counts.num_tokens, counts.rows, counts.rows_before,
            slot_mapping, block_table, block_table.strides[0] // 4, block_table.shape[1], block_size,
            window_size, *c128a, c128a_block_size, c128a_width, counts.width_before,
            buffers.c128a_indices.shape[1], buffers.token_to_req_indices, buffers.is_valid_token, buffers.positions,
            buffers.swa_indices, buffers.swa_lens, buffers.prefill_gather_lens,
            len(buffers.prefill_gather_lens), buffers.c128a_indices, buffers.c128a_lens, token_blocks,
            pointer(replay_start), noncausal, buffers.swa_indices.shape[1],
        ),
        overlap=True,
    )  # fmt: skip
