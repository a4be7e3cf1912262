"""Candidate blocks: a thread takes a block, a column or a score."""

from typing import Any

import numpy as np

from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import float32_bits
from ..types.indexer import CandidateScores, PagedScores, Rows
from .compiler import cuda
from .indexer import (
    element_kind,
    keys_kind,
    length_of,
    page_score,
    paged_mqa_logits,
    two_axes,
)
from .indexer_topk import order_of, top_k_per_row
from .launch import MAX_BLOCKS, NO_TABLE, NO_VECTOR, launch
from .rows import lookup_slot

THREADS = 128
LARGEST_BITS, NAN_BITS, INFINITY_BITS = 0x7F7FFFFF, 0x7FC00000, 0x7F800000
SEGMENT = 1024  # blocks of a row that a thread block masks


def column_arguments(rows: Rows) -> tuple[Any, ...]:
    return (
        NO_VECTOR if rows.starts is None else rows.starts, NO_VECTOR if rows.ends is None else rows.ends,
        NO_TABLE if rows.lens is None else two_axes(rows.lens), rows.next_n,
    )  # fmt: skip


@cuda.jit(device=True)
def columns_of(m, starts, ends, lens, next_n, width):
    """The first valid column of row m, and the column after the last valid one."""
    if lens.shape[0]:
        return np.int64(0), min(max(length_of(lens, m // next_n, m % next_n, next_n), 0), width)
    first = min(max(np.int64(starts[m]), 0), width) if len(starts) else np.int64(0)
    end = min(max(np.int64(ends[m]), first), width) if len(ends) else width
    return first, end


def select_candidate_blocks(logits: Any, rows: Rows, block: int, maxima: Any, candidates: Any) -> None:
    launch(
        maxima_kernel, min(-(-maxima.size // THREADS), MAX_BLOCKS), THREADS,
        logits, *column_arguments(rows), block, maxima,
    )  # fmt: skip
    top_k_per_row(maxima, Rows(), candidates)


def maxima_kernel(logits, starts, ends, lens, next_n, block, maxima):
    width = np.int64(logits.shape[1])
    for number in range(cuda.grid(1), maxima.shape[0] * maxima.shape[1], cuda.gridsize(1)):
        m, i = number // maxima.shape[1], np.int64(number % maxima.shape[1])
        first, end = columns_of(m, starts, ends, lens, next_n, width)
        newest = (end - first - 1) // block if end > first else np.int64(-1)
        largest = np.int64(0)
        best = np.int64(NAN_BITS)
        for column in range(first + i * block, min(first + (i + 1) * block, end)):
            bits = np.int64(logits[m, column])
            if order_of(bits) > largest:
                largest, best = order_of(bits), bits
        if i == newest:
            best = np.int64(INFINITY_BITS)
        elif best == 0xFF800000:  # -inf
            best = np.int64(NAN_BITS)
        elif best == INFINITY_BITS:
            best = np.int64(LARGEST_BITS)
        maxima[m, i] = best


def paged_logits_and_blocks(args: PagedScores, block: int, maxima: Any, candidates: Any) -> None:
    paged_mqa_logits(args)
    select_candidate_blocks(
        args.logits, Rows(lens=args.context_lens, next_n=args.q.shape[1]), block, maxima, candidates
    )


def apply_candidate_mask(logits: Any, rows: Rows, candidates: Any, block: int, fill: float) -> None:
    segments = -(-logits.shape[1] // (SEGMENT * block))
    launch(
        mask_kernel, min(len(logits) * segments, MAX_BLOCKS), THREADS,
        logits, *column_arguments(rows), candidates, block, int(np.float32(fill).view(np.uint32)),
    )  # fmt: skip


def mask_kernel(logits, starts, ends, lens, next_n, candidates, block, fill):
    """A thread block takes SEGMENT blocks of a row."""
    is_candidate = cuda.shared.array(SEGMENT, np.int32)
    width, span = np.int64(logits.shape[1]), np.int64(SEGMENT * block)
    segments = (width + span - 1) // span
    for number in range(cuda.blockIdx.x, logits.shape[0] * segments, cuda.gridDim.x):
        m, segment = number // segments, np.int64(number % segments)
        first, end = columns_of(m, starts, ends, lens, next_n, width)
        for i in range(cuda.threadIdx.x, SEGMENT, cuda.blockDim.x):
            is_candidate[i] = 0
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, candidates.shape[1], cuda.blockDim.x):
            here = np.int64(candidates[m, i]) - segment * SEGMENT
            if here >= 0 and here < SEGMENT:
                is_candidate[here] = 1
        cuda.syncthreads()
        begin = first + segment * span
        for column in range(begin + cuda.threadIdx.x, min(begin + span, end), cuda.blockDim.x):
            if not is_candidate[(column - begin) // block]:
                logits[m, column] = fill
        cuda.syncthreads()


def candidate_logits(args: CandidateScores) -> None:
    q, pages, weights, candidates, context_lens, block_table, block, fill, logits, _ = args
    layout = pages.layout
    launch(
        logits_kernel, min(-(-logits.size // THREADS), MAX_BLOCKS), THREADS,
        q, element_kind(q), pages.bytes, geometry_of(pages), keys_kind(pages), layout.row_bytes // layout.head_dim,
        weights, candidates, two_axes(context_lens), block_table, block, int(np.float32(fill).view(np.uint32)), logits,
    )  # fmt: skip


def logits_kernel(
    q, query_kind, pages, g, kind, size, weights, candidates, lens, block_table, block, fill, logits
):  # fmt: skip
    """A thread takes a candidate position of a query."""
    next_n, covered = q.shape[1], np.int64(block_table.shape[1]) * g.block_size
    for number in range(cuda.grid(1), logits.shape[0] * logits.shape[1], cuda.gridsize(1)):
        row, column = number // logits.shape[1], number % logits.shape[1]
        entry, j = row // next_n, row % next_n
        candidate = np.int64(candidates[row, column // block])
        position = candidate * block + column % block
        if candidate < 0 or position >= min(length_of(lens, entry, j, next_n), covered):
            logits[row, column] = fill
            continue
        slot = lookup_slot(block_table, entry, position, g.block_size)
        score = page_score(q[entry, j], weights[row], pages, slot, g, kind, size, query_kind)
        logits[row, column] = float32_bits(score)


def top_k_of_candidates(logits: Any, candidates: Any, block: int, positions: Any) -> None:
    top_k_per_row(logits, Rows(), positions)
    launch(positions_kernel, min(-(-positions.size // THREADS), MAX_BLOCKS), THREADS, candidates, block, positions)


def positions_kernel(candidates, block, indices):
    for number in range(cuda.grid(1), indices.shape[0] * indices.shape[1], cuda.gridsize(1)):
        m, i = number // indices.shape[1], number % indices.shape[1]
        column = np.int64(indices[m, i])
        if column >= 0:
            indices[m, i] = np.int64(candidates[m, column // block]) * block + column % block
