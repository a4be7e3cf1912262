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


def compute_swa_indices_and_lens(given: WindowSlots) -> None:
    launch(
        "compute_swa_indices_and_lens", len(given.swa_lens),
        given.window_size % 4 == 0 and is_aligned(given.swa_indices),
        (
            len(given.swa_lens), given.query_start_loc, given.seq_lens, len(given.seq_lens), given.token_to_req_indices,
            given.is_valid_token, *table_arguments(given.block_table), *division(given.block_size), given.window_size,
            given.token_offset, given.swa_indices, strides(given.swa_indices)[0], given.swa_lens,
        ),
    )  # fmt: skip


def compute_global_topk_indices_and_lens(given: TopkSlots) -> None:
    local, slots = given.topk_indices, given.global_topk_indices
    tokens, topk = local.shape
    name = "compute_compact_topk_indices_and_lens" if given.compact else "compute_global_topk_indices_and_lens"
    launch(
        name, tokens, not given.compact and topk % 4 == 0 and is_aligned(local, slots),
        (
            tokens, local, strides(local)[0], topk, given.token_to_req_indices, *table_arguments(given.block_table),
            *division(given.block_size), given.is_valid_token, pointer(given.positions), given.compress_ratio,
            slots, strides(slots)[0], given.topk_lens,
        ),
    )  # fmt: skip


def combine_topk_swa_indices(given: CombinedIndices) -> None:
    name = "combine_compact_topk_swa_indices" if given.compact else "combine_topk_swa_indices"
    launch(name, len(given.combined_lens), takes_four(given), combined_arguments(given))


def takes_four(given: CombinedIndices) -> bool:
    """Whether a lane takes four entries at a time."""
    return given.topk % 4 == 0 and is_aligned(given.topk_indices, given.combined_indices)


def combined_arguments(given: CombinedIndices) -> tuple[Any, ...]:
    """Members of `CombinedRows` (common/combined_rows.cuh)."""
    local, rows = given.topk_indices, given.combined_indices
    return (
        local, strides(local)[0], given.query_start_loc, given.seq_lens, given.gather_lens, rows, strides(rows)[0],
        given.combined_lens, len(rows), len(given.seq_lens), given.window_size, given.compress_ratio, given.topk,
        given.row_stride, given.swa_start, rows.shape[1],
    )  # fmt: skip


def build_flashinfer_mixed_sparse_indices(given: MixedIndices) -> None:
    no_array = (0, 0)
    decode_compressed, decode_topk = no_array, 0
    rows = [given.decode_swa_indices, given.prefill_topk_indices, given.sparse_indices]
    if given.decode_compressed_indices is not None:
        decode_compressed = given.decode_compressed_indices.data.ptr, strides(given.decode_compressed_indices)[0]
        decode_topk = given.decode_compressed_indices.shape[1]
        rows.append(given.decode_compressed_indices)
    compressed_table = (*no_array, 0, 0)
    if given.compressed_block_table is not None:
        compressed_table = table_arguments(given.compressed_block_table)
    launch(
        "build_flashinfer_mixed_sparse_indices", len(given.sparse_topk_lens),
        (given.window_size | given.topk | decode_topk) % 4 == 0 and is_aligned(*rows),
        (
            len(given.sparse_topk_lens), given.decode_swa_indices, strides(given.decode_swa_indices)[0],
            len(given.decode_swa_indices), *decode_compressed, decode_topk, pointer(given.decode_compressed_topk_lens),
            given.prefill_topk_indices, strides(given.prefill_topk_indices)[0],
            given.query_start_loc, given.seq_lens, len(given.seq_lens), given.token_to_req_indices,
            *table_arguments(given.swa_block_table), *division(given.swa_block_size),
            *compressed_table, *division(given.compressed_block_size),
            given.window_size, given.compress_ratio, given.topk, given.decode_compressed_indices_are_local,
            pointer(given.decode_is_valid_token), given.swa_block_span, given.compressed_block_span,
            given.sparse_indices, strides(given.sparse_indices)[0], given.sparse_indices.shape[1],
            given.sparse_topk_lens,
        ),
    )  # fmt: skip
