"""Inputs of attention: lists of token indices into paged caches, and packed sequences."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from ...layout import CacheLayout

V_DIM = 512  # values of a result: those of a latent row, without RoPE unless it is part of them


class Pages(NamedTuple):
    """A paged cache as raw bytes.

    bytes       uint8 [num_blocks, block_size * token_bytes]; the first stride is the page stride
    block_size  tokens of a page
    layout      offsets of a token's bytes in a page
    """

    bytes: Any
    block_size: int
    layout: CacheLayout

    @property
    def num_slots(self) -> int:
        return int(self.bytes.shape[0]) * self.block_size


class Segment(NamedTuple):
    """The tokens of one cache that each query attends to.

    pages    the cache
    indices  int32 [b, s_q, topk]: slots (page * block_size + row); out of range counts as absent
    lengths  int32 [b, s_q] (a stride may be 0): entries of `indices` in use, or None for all
    """

    pages: Pages
    indices: Any
    lengths: Any | None


def packed_rows(cu_seqlens: np.ndarray, num_rows: int) -> list[slice]:
    """The rows of each packed sequence, clamped to the array."""
    starts = np.clip(cu_seqlens.astype(np.int64), 0, num_rows).tolist()
    return [slice(first, max(first, end)) for first, end in itertools.pairwise(starts)]
