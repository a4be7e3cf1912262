"""Candidate blocks: selection, mask, and scores of candidates only."""

from collections.abc import Callable
from typing import Any

from ...layout import INDEXER_MXFP4
from ..types.indexer import CandidateScores, PagedScores, Rows
from .compile import kernel
from .constants import constant
from .index_scores import index_scores
from .indexer import (
    BOX_ROWS,
    CANDIDATE_ROWS,
    MAX_GRID_Y,
    candidates_fit_hopper,
    candidates_on_hopper,
    kernel_for_pages,
    scores_of_pages,
)
from .indexer_topk import top_k_per_row
from .indices import table_arguments
from .launch import MAX_BLOCKS, pointer, strides

THREADS = 256
SEGMENT = constant("common/candidates.cu", "SEGMENT")  # blocks of a row
FEW_QUERIES = 4
MAXIMUM_OF = 8  # sm90/indexer/logits.cu writes the maximum of this number of logits
TILE = constant("common/candidate_logits.cu", "KEYS")  # positions


def row_arguments(logits: Any, rows: Rows) -> tuple[Any, ...]:
    lens = rows.lens
    return (
        logits, strides(logits)[0], logits.shape[1], len(logits), pointer(rows.starts), pointer(rows.ends),
        pointer(lens), 0 if lens is None else strides(lens)[0], rows.next_n, lens is not None and lens.ndim == 2,
    )  # fmt: skip


def grid(blocks: int, rows: int) -> tuple[int, int]:
    return min(blocks, MAX_BLOCKS), min(rows, MAX_GRID_Y)


def select_candidate_blocks(logits: Any, rows: Rows, block: int, maxima: Any, candidates: Any) -> None:
    kernel("common/candidates.cu", "candidate_maxima", THREADS=THREADS)(
        grid(-(-maxima.shape[1] // THREADS), len(logits)),
        (THREADS,),
        (*row_arguments(logits, rows), block, maxima, strides(maxima)[0], maxima.shape[1]),
        overlap=True,
    )  # fmt: skip
    top_k_per_row(maxima, Rows(), candidates)


def paged_logits_and_blocks(args: PagedScores, block: int, maxima: Any, candidates: Any) -> None:
    # MXFP4 keys are loaded as fast as they are scored: for many queries a separate kernel for the maxima is faster.
    fused = block == MAXIMUM_OF and (args.pages.layout is not INDEXER_MXFP4 or len(args.weights) <= FEW_QUERIES)
    if scores_of_pages(args, maxima if fused else None):
        top_k_per_row(maxima, Rows(), candidates)
    else:
        rows = Rows(lens=args.context_lens, next_n=args.q.shape[1])
        select_candidate_blocks(args.logits, rows, block, maxima, candidates)


def apply_candidate_mask(logits: Any, rows: Rows, candidates: Any, block: int, fill: float) -> None:
    kernel("common/candidates.cu", "apply_candidate_mask", THREADS=THREADS)(
        grid(-(-logits.shape[1] // (SEGMENT * block)), len(logits)),
        (THREADS,),
        (*row_arguments(logits, rows), block, candidates, strides(candidates)[0], candidates.shape[1], fill),
        overlap=True,
    )  # fmt: skip


def candidate_logits(args: CandidateScores) -> None:
    q, pages, weights, candidates, context_lens, block_table, block, fill, logits, batch_invariant = args
    seen = (context_lens, 0, strides(context_lens)[0], context_lens.ndim == 2, q.shape[1])
    blocks = (candidates, strides(candidates)[0], block)
    if q.dtype.name != "float32":
        table = table_arguments(block_table)
        if not candidates_on_hopper(q, weights, seen, pages, table, logits, blocks, fill, batch_invariant):
            index_scores(q, weights, seen, pages, table, logits, candidates=blocks, fill=fill)
        return
    kernel("common/candidate_logits.cu", "candidate_logits", LAYOUT=pages.layout.name)(
        grid(-(-logits.shape[1] // TILE), len(logits)),
        (128,),
        (
            q, *strides(q)[:3], q.shape[2], weights, strides(weights)[0], context_lens, strides(context_lens)[0],
            context_lens.ndim == 2, q.shape[1], len(logits), *blocks, logits.shape[1], fill,
            *table_arguments(block_table), pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size,
            logits, strides(logits)[0],
        ),
        overlap=True,
    )  # fmt: skip


def kernel_for_candidates(args: CandidateScores, device: int) -> str:
    """The kernel of candidate_logits for aligned arrays: "hopper" or "portable"."""
    fits = candidates_fit_hopper(len(args.weights), args.pages, args.block, args.batch_invariant)
    return kernel_for_pages(args.q, args.pages, CANDIDATE_ROWS, device) if fits else "portable"


def kernel_for_blocks(args: PagedScores, block: int, maxima: Any, candidates: Any, device: int) -> str:
    """The kernel of paged_logits_and_blocks: "hopper" or "portable"."""
    return kernel_for_pages(args.q, args.pages, BOX_ROWS, device)


KERNEL_FOR: dict[str, Callable[..., str]] = {
    "candidate_logits": kernel_for_candidates,
    "paged_logits_and_blocks": kernel_for_blocks,
}


def top_k_of_candidates(logits: Any, candidates: Any, block: int, positions: Any) -> None:
    top_k_per_row(logits, Rows(), positions)
    kernel("common/candidates.cu", "candidate_positions", THREADS=THREADS)(
        grid(-(-positions.shape[1] // THREADS), len(positions)),
        (THREADS,),
        (
            positions, strides(positions)[0], positions.shape[1], len(positions), candidates, strides(candidates)[0],
            block,
        ),
        overlap=True,
    )  # fmt: skip
