"""Candidate blocks of DeepSeek V4.1's indexer: one layer chooses blocks of positions, later layers select from them.

The candidate source scores every position, as an index layer does, and `select_candidate_blocks` selects the blocks
with the best scores. A later index layer scores only the positions of these blocks (`candidate_topk`,
`candidate_logits`); an engine that already has all scores masks them (`apply_candidate_mask`).

A position is a row of the layer: position p is row p of a request's index keys. Block i contains the positions
i * candidate_block_size <= p < (i + 1) * candidate_block_size.
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays.array import Array
from ..dispatch.call import FLOAT32, INT32, Call
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_flags, check_integers
from ..kernels.types.indexer import CandidateScores, Rows
from ..layout import CacheLayout
from .indexer import checked_paged
from .indexer_topk import (
    CANDIDATE_BLOCK,
    INDEX_LIMIT,
    WORKSPACE_BYTES,
    blocks_of,
    checked_logits,
    logits_memory,
    logits_row_bytes,
    rows_in,
)

TOPK_BLOCKS = 2048


@launch_cached
def select_candidate_blocks(
    logits: Array,
    topk_blocks: int = TOPK_BLOCKS,
    row_starts: Array | None = None,
    row_ends: Array | None = None,
    *,
    seq_lens: Array | None = None,
    next_n: int = 1,
    candidate_block_size: int = CANDIDATE_BLOCK,
    max_workspace_bytes: int = WORKSPACE_BYTES,
    workspace: Array | None = None,
    out: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """The blocks of positions with the best scores of each row.

    Args:
        logits: [M, N] float32, scores of all positions
        topk_blocks: how many blocks to select
        row_starts, row_ends, seq_lens, next_n: the valid columns of a row, as in top_k_per_row; blocks count from the
            first valid column
        candidate_block_size: positions of a block
        max_workspace_bytes: most device memory for the blocks' scores; at least one request's scores must fit
        workspace: uint8 [bytes] to use instead of allocating; its size is the bound
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: to write instead of allocating

    Returns int32 [M, topk_blocks]: blocks in ascending order, then -1. A block's score is its largest valid logit; NaN
    is left out, and +inf counts as the largest finite value. The newest block, which has the row's last valid column,
    is always selected; other blocks only if their score is above -inf. Scores, including subnormal ones, are compared
    by value; -0 equals 0. Among equal scores the lowest blocks are selected, so every backend selects the same.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM select_candidate_blocks (DeepSeek V4.1), which leaves order and ties open.
    """
    check_integers(0, topk_blocks=topk_blocks)
    check_integers(1, next_n=next_n, candidate_block_size=candidate_block_size)
    check_integers(1, 2**63 - 1, max_workspace_bytes=max_workspace_bytes)
    call = Call(backend, stream, early_release)
    logits, rows = checked_logits(call, logits, row_starts, row_ends, seq_lens, next_n)
    tokens, width = len(logits), blocks_of(logits.shape[1], candidate_block_size)
    candidates = call.output("out", out, INT32, (tokens, int(topk_blocks)))
    if candidates.size:
        row_bytes = logits_row_bytes(width)
        memory, step = logits_memory(call, workspace, max_workspace_bytes, row_bytes, tokens, rows.next_n)
        with call.kernels("candidates") as kernels:
            for first in range(0, tokens, step):
                part = slice(first, min(first + step, tokens))
                maxima, _ = rows_in(memory, part.stop - first, row_bytes, width)
                kernels.select_candidate_blocks(
                    logits[part], rows_of(rows, part), candidate_block_size, maxima, candidates[part]
                )
    return call.results()


@launch_cached
def apply_candidate_mask(
    logits: Array,
    candidate_blocks: Array,
    row_starts: Array | None = None,
    row_ends: Array | None = None,
    *,
    seq_lens: Array | None = None,
    next_n: int = 1,
    candidate_block_size: int = CANDIDATE_BLOCK,
    with_nan: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Write -inf to the logits outside of each row's candidate blocks, in place.

    Args:
        logits: [M, N] float32, scores of all positions
        candidate_blocks: [M, K] int32, blocks of each row in any order; those outside of the row, such as -1, are
            ignored
        row_starts, row_ends, seq_lens, next_n: the valid columns of a row, as in top_k_per_row; blocks count from the
            first valid column. Other columns are not written
        candidate_block_size: positions of a block
        with_nan: write NaN instead, which top_k_per_row never selects: the selection of a row with fewer candidates
            than topk then ends in -1 instead of positions that are not candidates

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM apply_candidate_mask (DeepSeek V4.1), without its write to a row's last column.
    """
    check_integers(1, next_n=next_n, candidate_block_size=candidate_block_size)
    check_flags(with_nan=with_nan)
    call = Call(backend, stream)
    logits, rows = checked_logits(call, logits, row_starts, row_ends, seq_lens, next_n, writable=True)
    candidates = call.array("candidate_blocks", candidate_blocks, INT32, (len(logits), "K"))
    if logits.size:
        fill = math.nan if with_nan else -math.inf
        with call.kernels("candidates") as kernels:
            kernels.apply_candidate_mask(logits, rows, candidates, candidate_block_size, fill)


@launch_cached
def candidate_logits(
    q: Array,
    kv_cache: Array,
    weights: Array,
    candidate_blocks: Array,
    context_lens: Array,
    block_table: Array,
    *,
    candidate_block_size: int = CANDIDATE_BLOCK,
    layout: CacheLayout | str | None = None,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Scores of the positions of each query's candidate blocks, in a paged cache of index keys.

    Args:
        q, kv_cache: as in fp8_paged_mqa_logits
        weights: [B * next_n, H] float32
        candidate_blocks: [B * next_n, K] int32, blocks of each query; -1: none
        context_lens: [B] int32, rows of each request: query j sees the first context_lens - next_n + 1 + j rows; or [B,
            next_n], rows that each query sees; clamped to the rows of block_table. A prefill chunk has B queries of
            next_n 1
        block_table: [>= B, C] int32, page of each block_size rows
        candidate_block_size: positions of a candidate block; not the cache's block size
        layout: INDEXER_FP8, INDEXER_BF16, INDEXER_F32 or INDEXER_MXFP4, or the name of one; by kv_cache and q if None
        out: to write instead of allocating

    Returns logits float32 [B * next_n, K * candidate_block_size]: column c scores the position
    candidate_blocks[m, c // size] * size + c % size, where size is candidate_block_size. The logit is -inf where there
    is no block, where the query does not see the position, and where its page is absent. Except for rounding
    (cumla.bounds.SCORES), scores are the same as fp8_paged_mqa_logits'. A query's logits do not depend on the other
    queries of the call.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    check_integers(1, candidate_block_size=candidate_block_size)
    call = Call(backend, stream)
    q, pages, weights, lens, table = checked_paged(call, q, kv_cache, weights, context_lens, block_table, layout)
    tokens = q.shape[0] * q.shape[1]
    candidates, width = checked_candidates(call, candidate_blocks, tokens, candidate_block_size)
    logits = call.output("out", out, FLOAT32, (tokens, width))
    if logits.size:
        with call.kernels("candidates") as kernels:
            kernels.candidate_logits(
                CandidateScores(q, pages, weights, candidates, lens, table, candidate_block_size, -math.inf, logits)
            )
    return call.results()


@launch_cached
def candidate_topk(
    q: Array,
    kv_cache: Array,
    weights: Array,
    candidate_blocks: Array,
    topk: int,
    context_lens: Array,
    block_table: Array,
    *,
    candidate_block_size: int = CANDIDATE_BLOCK,
    layout: CacheLayout | str | None = None,
    max_workspace_bytes: int = WORKSPACE_BYTES,
    workspace: Array | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Score the positions of each query's candidate blocks and select the topk best positions.

    Args:
        q, kv_cache, weights, context_lens, block_table, candidate_block_size, layout: as in candidate_logits
        candidate_blocks: [B * next_n, K] int32, each block at most once, ascending, as from select_candidate_blocks;
            -1: none
        topk: how many positions to select
        max_workspace_bytes: most device memory for logits; at least the logits of one request must fit
        workspace: uint8 [bytes] to use instead of allocating; its size is the bound
        batch_invariant: True: one kernel scores any number of queries, so that a query's selection is the same in every
            call. False: on a GPU the number of queries decides, and selections between scores that differ only by
            rounding may differ
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: to write instead of allocating

    Returns int32 [B * next_n, topk]: positions in the order of their blocks, then -1 where there are fewer candidates:
    no position outside of the blocks, beyond the query's rows or beyond block_table is ever selected. Among equal
    scores the first positions are selected. A position whose page is absent scores -inf; NaN is never selected.
    `compute_global_topk_indices_and_lens` maps the positions to slots.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    check_integers(0, topk=topk)
    check_integers(1, candidate_block_size=candidate_block_size)
    check_integers(1, 2**63 - 1, max_workspace_bytes=max_workspace_bytes)
    check_flags(batch_invariant=batch_invariant)
    call = Call(backend, stream, early_release)
    q, pages, weights, lens, table = checked_paged(call, q, kv_cache, weights, context_lens, block_table, layout)
    next_n = q.shape[1]
    tokens = len(q) * next_n
    candidates, width = checked_candidates(call, candidate_blocks, tokens, candidate_block_size)
    indices = call.output("out", out, INT32, (tokens, int(topk)))
    if indices.size:
        row_bytes = logits_row_bytes(width)
        memory, step = logits_memory(call, workspace, max_workspace_bytes, row_bytes, tokens, next_n)
        with call.kernels("candidates") as kernels:
            for first in range(0, tokens, step):
                part = slice(first, min(first + step, tokens))
                entries = slice(first // next_n, part.stop // next_n)
                logits, _ = rows_in(memory, part.stop - first, row_bytes, width)
                kernels.candidate_logits(CandidateScores(
                    q[entries], pages, weights[part], candidates[part], lens[entries], table[entries],
                    candidate_block_size, math.nan, logits, batch_invariant,
                ))  # fmt: skip
                kernels.top_k_of_candidates(logits, candidates[part], candidate_block_size, indices[part])
    return call.results()


def rows_of(rows: Rows, part: slice) -> Rows:
    """The valid columns of consecutive rows, which must belong to whole requests."""
    starts, ends = (None if array is None else array[part] for array in (rows.starts, rows.ends))
    lens = None if rows.lens is None else rows.lens[part.start // rows.next_n : part.stop // rows.next_n]
    return Rows(starts, ends, lens, rows.next_n)


def checked_candidates(call: Call, candidate_blocks: Any, tokens: int, block: int) -> tuple[Any, int]:
    """candidate_blocks [tokens, K], checked, and the number of columns of their logits."""
    candidates = call.array("candidate_blocks", candidate_blocks, INT32, (tokens, "K"))
    width = candidates.shape[1] * block
    if width > INDEX_LIMIT:
        raise ValueError(
            f"candidate_blocks: got {candidates.shape[1]} blocks of {block} positions, expected at most {INDEX_LIMIT} "
            "positions"
        )
    return candidates, width
