"""Divides the context of prefills into chunks that fit a workspace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ContextChunks(NamedTuple):
    """The chunks of several prefills' context. In a chunk's workspace the requests' parts are packed in order.

    Attributes:
        starts: [num_chunks, num_prefills] int32, first position of each part
        cu_seq_lens: [num_chunks, num_prefills + 1] int32, rows of the workspace before each part
        seq_tot: tokens of each chunk
        max_seq_lens: longest part of each chunk
    """

    starts: np.ndarray
    cu_seq_lens: np.ndarray
    seq_tot: list[int]
    max_seq_lens: list[int]


def cut_context(context_lens: np.ndarray, workspace_size: int, page_size: int) -> ContextChunks | None:
    """Give each prefill that has context an equal part of the workspace, in whole pages.

    Args:
        context_lens: host [num_prefills] integers, without the decodes, which need no workspace
        workspace_size: rows that a chunk may take
        page_size: parts start at a multiple of page_size

    Returns None if no prefill has context. Raises ValueError if a part is less than a page.
    """
    with_context = int(np.count_nonzero(context_lens > 0))
    if not with_context:
        return None
    tokens_of_chunk = workspace_size // with_context // page_size * page_size
    if not tokens_of_chunk:
        raise ValueError(
            f"workspace_size: got {workspace_size} tokens, expected at least {with_context * page_size}: "
            f"a page of {page_size} for each of {with_context} prefills with context"
        )
    num_chunks = -(-int(context_lens.max()) // tokens_of_chunk)
    starts = np.arange(num_chunks, dtype=np.int64)[:, None] * tokens_of_chunk
    lens = np.clip(context_lens - starts, 0, tokens_of_chunk)
    cu_seq_lens = np.zeros((num_chunks, len(context_lens) + 1), np.int32)
    np.cumsum(lens, axis=1, out=cu_seq_lens[:, 1:])
    starts = np.broadcast_to(starts, lens.shape).astype(np.int32)
    return ContextChunks(starts, cu_seq_lens, lens.sum(axis=1).tolist(), lens.max(axis=1).tolist())
