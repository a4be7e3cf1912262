"""Index maps: from positions and local top-k entries to cache slots."""

import functools
from typing import Any

from ..types.indices import CombinedIndices, MixedIndices, TopkSlots, WindowSlots
from .compile import kernel
from .constants import constant
from .launch import is_aligned, pointer, strides

THREADS = constant("common/indices.cu", "THREADS")  # per CTA: a warp for a token


def launch(name: str, num_tokens: int, aligned: bool, arguments: tuple[Any, ...]) -> None:
    run = kernel("common/indices.cu", name, ALIGNED=int(aligned))
    run((-(-num_tokens // (THREADS // 32)),), (THREADS,), arguments, overlap=True)


@functools.cache
def division(block_size: int) -> tuple[int, int, int]:
    """A block size, and the multiplier and shift with which `BlockSize` of common/pages.cuh divides by it."""
    log = (block_size - 1).bit_length()
    return block_size, -(-(2 ** (31 + log)) // block_size), log


def table_arguments(block_table: Any) -> tuple[Any, ...]:
    rows, columns = block_table.shape
    return block_table, strides(block_table)[0], rows, columns


def compute_swa_indices_and_lens(args: WindowSlots) -> None:
    launch(
        "compute_swa_indices_and_lens", len(args.swa_lens),
        args.window_size % 4 == 0 and is_aligned(args.swa_indices),
        (
            len(args.swa_lens), args.query_start_loc, args.seq_lens, len(args.seq_lens), args.token_to_req_indices,
            args.is_valid_token, *table_arguments(args.block_table), *division(args.block_size), args.window_size,
            args.token_offset, args.swa_indices, strides(args.swa_indices)[0], args.swa_lens,
        ),
    )  # fmt: skip


def compute_global_topk_indices_and_lens(args: TopkSlots) -> None:
    local, slots = args.topk_indices, args.global_topk_indices
    tokens, topk = local.shape
    name = "compute_compact_topk_indices_and_lens" if args.compact else "compute_global_topk_indices_and_lens"
    pool: tuple[int, ...] = ()
    if args.pool > 1:
        name, pool = "compute_pooled_topk_indices_and_lens", (args.pool,)
    launch(
        name, tokens, not args.compact and topk % 4 == 0 and is_aligned(local, slots),
        (
            tokens, local, strides(local)[0], topk, args.token_to_req_indices, *table_arguments(args.block_table),
            *division(args.block_size // args.pool), args.is_valid_token, pointer(args.positions), args.compress_ratio,
            slots, strides(slots)[0], args.topk_lens, *pool,
        ),
    )  # fmt: skip


def combine_topk_swa_indices(args: CombinedIndices) -> None:
    name = "combine_compact_topk_swa_indices" if args.compact else "combine_topk_swa_indices"
    launch(name, len(args.combined_lens), takes_four(args), combined_arguments(args))


def takes_four(args: CombinedIndices) -> bool:
    """Whether a lane takes four entries at a time."""
    return args.topk % 4 == 0 and is_aligned(args.topk_indices, args.combined_indices)


def combined_arguments(args: CombinedIndices) -> tuple[Any, ...]:
    """Members of `CombinedRows` (common/combined_rows.cuh)."""
    local, rows = args.topk_indices, args.combined_indices
    return (
        local, strides(local)[0], args.query_start_loc, args.seq_lens, args.gather_lens, rows, strides(rows)[0],
        args.combined_lens, len(rows), len(args.seq_lens), args.window_size, args.compress_ratio, args.topk,
        args.row_stride, args.swa_start, rows.shape[1],
    )  # fmt: skip


def build_flashinfer_mixed_sparse_indices(args: MixedIndices) -> None:
    no_array = (0, 0)
    decode_compressed, decode_topk = no_array, 0
    rows = [args.decode_swa_indices, args.prefill_topk_indices, args.sparse_indices]
    if args.decode_compressed_indices is not None:
        decode_compressed = args.decode_compressed_indices.data.ptr, strides(args.decode_compressed_indices)[0]
        decode_topk = args.decode_compressed_indices.shape[1]
        rows.append(args.decode_compressed_indices)
    compressed_table = (*no_array, 0, 0)
    if args.compressed_block_table is not None:
        compressed_table = table_arguments(args.compressed_block_table)
    launch(
        "build_flashinfer_mixed_sparse_indices", len(args.sparse_topk_lens),
        (args.window_size | args.topk | decode_topk) % 4 == 0 and is_aligned(*rows),
        (
            len(args.sparse_topk_lens), args.decode_swa_indices, strides(args.decode_swa_indices)[0],
            len(args.decode_swa_indices), *decode_compressed, decode_topk, pointer(args.decode_compressed_topk_lens),
            args.prefill_topk_indices, strides(args.prefill_topk_indices)[0],
            args.query_start_loc, args.seq_lens, len(args.seq_lens), args.token_to_req_indices,
            *table_arguments(args.swa_block_table), *division(args.swa_block_size),
            *compressed_table, *division(args.compressed_block_size),
            args.window_size, args.compress_ratio, args.topk, args.decode_compressed_indices_are_local,
            pointer(args.decode_is_valid_token), args.swa_block_span, args.compressed_block_span,
            args.sparse_indices, strides(args.sparse_indices)[0], args.sparse_indices.shape[1],
            args.sparse_topk_lens,
        ),
    )  # fmt: skip
