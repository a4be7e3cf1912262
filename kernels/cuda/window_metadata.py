"""Metadata of a step, in one kernel."""

from ..types.metadata import WindowStep
from .compile import kernel
from .constants import constant
from .launch import C_TYPES, pointer

WARPS = constant("common/window_metadata.cu", "WARPS")  # per CTA


def build_sparse_swa(args: WindowStep) -> None:
    counts, buffers, table = args.counts, args.buffers, args.block_table
    c128a = (0, 0, 0)
    if args.c128a_block_table is not None:
        c128a = (
            args.c128a_block_table.data.ptr,
            args.c128a_block_table.strides[0] // 4,
            args.c128a_block_table.shape[1],
        )
    token_blocks = -(-max(counts.rows, counts.rows_before) // WARPS)
    kernel("common/window_metadata.cu", "build_sparse_swa", SLOT=C_TYPES[args.slot_mapping.dtype])(
        (token_blocks + 1,),
        (32 * WARPS,),
        (
            args.query_start_loc, args.seq_lens, counts.num_reqs, counts.num_decodes,
            counts.num_decode_tokens, counts.num_tokens, counts.rows, counts.rows_before,
            args.slot_mapping, table, table.strides[0] // 4, table.shape[1], args.block_size,
            args.window_size, *c128a, args.c128a_block_size, args.c128a_width, counts.width_before,
            buffers.c128a_indices.shape[1], buffers.token_to_req_indices, buffers.is_valid_token, buffers.positions,
            buffers.swa_indices, buffers.swa_lens, buffers.prefill_gather_lens,
            len(buffers.prefill_gather_lens), buffers.c128a_indices, buffers.c128a_lens, token_blocks,
            pointer(args.replay_start), args.noncausal, buffers.swa_indices.shape[1],
        ),
        overlap=True,
    )  # fmt: skip
