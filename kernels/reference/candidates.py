"""Candidate blocks, row by row."""

import numpy as np

from ..types.indexer import CandidateScores, PagedScores, Rows
from .indexer import keys_and_scales, paged_mqa_logits, row_lens, scores
from .indexer_topk import columns_of, top_k_per_row
from .rows import lookup_slot

LARGEST = np.finfo(np.float32).max


def select_candidate_blocks(
    logits: np.ndarray, rows: Rows, block: int, maxima: np.ndarray, candidates: np.ndarray
) -> None:
    """`maxima` is NaN, which top_k_per_row never selects, for absent blocks and blocks without a score above -inf."""
    maxima[:] = np.nan
    for m, row in enumerate(logits):
        start, end = columns_of(rows, m, len(row))
        count = -(-(end - start) // block)
        if not count:
            continue
        columns = np.full(count * block, np.nan, np.float32)
        columns[: end - start] = row[start:end]
        best = np.minimum(np.fmax.reduce(columns.reshape(count, block), axis=1), LARGEST)
        best[best == -np.inf] = np.nan
        best[-1] = np.inf
        maxima[m, :count] = best
    top_k_per_row(maxima, Rows(), candidates)


def paged_logits_and_blocks(args: PagedScores, block: int, maxima: np.ndarray, candidates: np.ndarray) -> None:
    """Scores as in paged_mqa_logits, and the blocks with the largest scores."""
    paged_mqa_logits(args)
    select_candidate_blocks(
        args.logits, Rows(lens=args.context_lens, next_n=args.q.shape[1]), block, maxima, candidates
    )


def apply_candidate_mask(logits: np.ndarray, rows: Rows, candidates: np.ndarray, block: int, fill: float) -> None:
    for m, row in enumerate(logits):
        start, end = columns_of(rows, m, len(row))
        is_candidate = np.isin(np.arange(end - start) // block, candidates[m])
        row[start:end][~is_candidate] = fill


def candidate_logits(args: CandidateScores) -> None:
    q, pages, weights, candidates, context_lens, block_table, block, fill, logits, _ = args
    next_n, covered = q.shape[1], block_table.shape[1] * pages.block_size
    for row, length in enumerate(row_lens(context_lens, next_n)):
        request, j = divmod(row, next_n)
        positions = positions_of(candidates[row], block)
        seen = (positions >= 0) & (positions < min(length, covered))
        slots = [lookup_slot(block_table, request, int(p), pages.block_size) for p in positions]
        where = np.array(slots, np.int64)
        present = seen & (where >= 0) & (where < pages.num_slots)
        logits[row] = np.where(seen, np.float32(-np.inf), np.float32(fill))
        keys, scales = keys_and_scales(pages, where[present])
        with np.errstate(over="ignore"):
            logits[row, present] = scores(q[request, j], keys, scales, weights[row])


def positions_of(candidates: np.ndarray, block: int) -> np.ndarray:
    """Positions in candidate blocks [..., K], int64 [..., K * block]; -1 where a block is absent."""
    blocks = candidates.astype(np.int64)[..., None]
    positions = np.where(blocks >= 0, blocks * block + np.arange(block), -1)
    return positions.reshape(*candidates.shape[:-1], -1)


def top_k_of_candidates(logits: np.ndarray, candidates: np.ndarray, block: int, positions: np.ndarray) -> None:
    top_k_per_row(logits, Rows(), positions)
    for m, columns in enumerate(positions):
        chosen = columns >= 0
        columns[chosen] = positions_of(candidates[m], block)[columns[chosen]]
