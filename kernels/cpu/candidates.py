"""Candidate blocks on the CPU: BLAS computes the scores, query by query; Numba compiles everything else."""

import numpy as np

from ..numba_common.compiled import compiled
from ..reference.candidates import positions_of
from ..reference.indexer import row_lens
from ..types.indexer import CandidateScores, PagedScores, Rows
from .indexer import _keys_and_scales, _scores, paged_mqa_logits
from .indexer_topk import columns_of, top_k_per_row
from .rows import lookup_slot
from .threads import parallel_for

TO_READ = 1  # approximate nanoseconds per logit
LARGEST = np.finfo(np.float32).max


def select_candidate_blocks(
    logits: np.ndarray, rows: Rows, block: int, maxima: np.ndarray, candidates: np.ndarray
) -> None:
    first, count = columns_of(rows, *logits.shape)
    parallel_for(len(logits), logits.shape[1] * TO_READ, _find_maxima, logits, first, count, block, maxima)
    top_k_per_row(maxima, Rows(), candidates)


@compiled(nogil=True)
def _find_maxima(first_row, end_row, logits, first, count, block, maxima):
    for m in range(first_row, end_row):
        row = logits[m, first[m] : first[m] + count[m]]
        newest = (len(row) - 1) // block if len(row) else -1
        for i in range(maxima.shape[1]):
            best = np.float32(-np.inf)
            for column in range(i * block, min((i + 1) * block, len(row))):
                best = max(best, row[column]) if row[column] == row[column] else best
            if i == newest:
                best = np.float32(np.inf)
            elif best == -np.inf:
                best = np.float32(np.nan)
            else:
                best = min(best, LARGEST)
            maxima[m, i] = best


def paged_logits_and_blocks(args: PagedScores, block: int, maxima: np.ndarray, candidates: np.ndarray) -> None:
    paged_mqa_logits(args)
    select_candidate_blocks(
        args.logits, Rows(lens=args.context_lens, next_n=args.q.shape[1]), block, maxima, candidates
    )


def apply_candidate_mask(logits: np.ndarray, rows: Rows, candidates: np.ndarray, block: int, fill: float) -> None:
    first, count = columns_of(rows, *logits.shape)
    is_candidate = np.empty((len(logits), -(-logits.shape[1] // block)), np.bool_)
    parallel_for(
        len(logits), logits.shape[1] * TO_READ, _mask,
        logits, first, count, candidates, block, np.float32(fill), is_candidate,
    )  # fmt: skip


@compiled(nogil=True)
def _mask(first_row, end_row, logits, first, count, candidates, block, fill, all_candidates):
    for m in range(first_row, end_row):
        is_candidate = all_candidates[m]
        is_candidate[:] = False
        for i in candidates[m]:
            if 0 <= i < len(is_candidate):
                is_candidate[i] = True
        for column in range(count[m]):
            if not is_candidate[column // block]:
                logits[m, first[m] + column] = fill


def candidate_logits(args: CandidateScores) -> None:
    q, pages, weights, candidates, context_lens, block_table, block, fill, logits, _ = args
    next_n, covered = q.shape[1], block_table.shape[1] * pages.block_size
    slots = np.empty(logits.shape[1], np.int64)
    for row, length in enumerate(row_lens(context_lens, next_n)):
        request, j = divmod(row, next_n)
        positions = positions_of(candidates[row], block)
        _look_up(block_table, request, positions, pages.block_size, slots)
        seen = (positions >= 0) & (positions < min(int(length), covered))
        present = seen & (slots >= 0) & (slots < pages.num_slots)
        logits[row] = np.where(seen, np.float32(-np.inf), np.float32(fill))
        if not present.any():
            continue
        keys, scales = _keys_and_scales(pages, slots[present])
        logits[row, present] = _scores(q[request, j : j + 1], keys, scales, weights[row : row + 1])[0]


@compiled
def _look_up(block_table, request, positions, block_size, slots):
    for i in range(len(slots)):
        slots[i] = lookup_slot(block_table, request, positions[i], block_size)


def top_k_of_candidates(logits: np.ndarray, candidates: np.ndarray, block: int, positions: np.ndarray) -> None:
    top_k_per_row(logits, Rows(), positions)
    parallel_for(len(positions), positions.shape[1] * TO_READ, _to_positions, candidates, block, positions)


@compiled(nogil=True)
def _to_positions(first_row, end_row, candidates, block, indices):
    for m in range(first_row, end_row):
        for i in range(indices.shape[1]):
            column = np.int64(indices[m, i])
            if column >= 0:
                indices[m, i] = np.int64(candidates[m, column // block]) * block + column % block
