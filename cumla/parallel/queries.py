"""Shards a prefill's queries across ranks with even causal work: a rank takes an early and a late piece."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_integers, plain_integers
from .communicator import Communicator, copy


@dataclass(frozen=True)
class CausalPiece:
    """A call of `mha_varlen` with causal=True: one piece of each request, and the keys that its last query sees.

    Attributes:
        tokens: [n] int32, indices of the queries in the step
        keys: [m] int32, indices of the rows of K and V in the step: the first rows of each request
        cu_seqlens_q: [R + 1] int32
        cu_seqlens_k: [R + 1] int32
    """

    tokens: np.ndarray
    keys: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray


@dataclass(frozen=True)
class QueryShards:
    """The tokens of a step on each rank. Arrays are on the host: copy them to the device once a step.

    Attributes:
        tokens: [size, count] int32, tokens of each rank in ascending order, padded with -1
        places: [num_tokens] int32: index of a token's row among all ranks' rows, [size * count]
        pieces: [size] of two CausalPieces
    """

    tokens: np.ndarray
    places: np.ndarray
    pieces: tuple[tuple[CausalPiece, CausalPiece], ...]

    def own(self, rank: int) -> np.ndarray:
        """[n] int32: the tokens of a rank."""
        row: np.ndarray = self.tokens[rank]
        return row[row >= 0]

    def gather(self, comm: Communicator, rows: Any, places: Any = None) -> Any:
        """Rows of all tokens in order, [num_tokens, ...], such as K, gathered from each rank's own rows [n, ...].

        Args:
            places: `self.places` on the rows' device, for steps that must not copy it
        """
        native = dlpack.borrow(rows, "rows")
        size, count = self.tokens.shape
        expected = len(self.own(comm.rank))
        if len(native) != expected:
            raise ValueError(f"rows: got {len(native)}, expected {expected}, one a token of rank {comm.rank}")
        xp = dlpack.namespace_of(native)
        padded = dlpack.empty((count, *native.shape[1:]), native.dtype, native)
        copy(padded[:expected], native)
        copy(padded[expected:], xp.zeros_like(padded[expected:].view(f"u{native.dtype.itemsize}")))
        everyones = comm.all_gather(padded).reshape(size * count, *native.shape[1:])
        taken = everyones.view(f"u{native.dtype.itemsize}")[xp.asarray(self.places if places is None else places)]
        return dlpack.give(taken.view(native.dtype), dlpack.framework_of(rows))


@plain_integers
def shard_queries(query_start_loc: Any, size: int) -> QueryShards:
    """Shard the queries of a step.

    Args:
        query_start_loc: [R + 1] integers on the host, ascending from 0
        size: ranks

    Each request is divided into 2 * size consecutive pieces of almost equal length; rank r takes pieces r and
    2 * size - 1 - r. An early piece sees fewer keys, a late piece more: their sum is the same for all ranks.
    """
    check_integers(1, size=size)
    starts = np.asarray(query_start_loc)
    if starts.ndim != 1 or not len(starts) or starts.dtype.kind not in "iu":
        raise ValueError(f"query_start_loc: got {starts.dtype} of shape {starts.shape}, expected [R + 1] integers")
    starts = starts.astype(np.int64)
    if starts[0] or (np.diff(starts) < 0).any():
        raise ValueError("query_start_loc: got starts that do not ascend from 0, expected starts of packed requests")
    requests = list(itertools.pairwise(starts.tolist()))

    def piece(number: int) -> CausalPiece:
        cuts = [
            (first, first + (end - first) * number // (2 * size), first + (end - first) * (number + 1) // (2 * size))
            for first, end in requests
        ]
        return CausalPiece(
            joined([np.arange(start, stop) for _, start, stop in cuts]),
            # A piece without queries has no keys.
            joined([np.arange(first, stop if stop > start else first) for first, start, stop in cuts]),
            ends([stop - start for _, start, stop in cuts]),
            ends([stop - first if stop > start else 0 for first, start, stop in cuts]),
        )

    pieces = tuple((piece(rank), piece(2 * size - 1 - rank)) for rank in range(size))
    owned = [np.sort(joined([early.tokens, late.tokens])) for early, late in pieces]
    count = max(len(tokens) for tokens in owned)
    table = np.full((size, count), -1, np.int32)
    places = np.empty(int(starts[-1]), np.int32)
    for rank, tokens in enumerate(owned):
        table[rank, : len(tokens)] = tokens
        places[tokens] = rank * count + np.arange(len(tokens))
    return QueryShards(table, places, pieces)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)


def ends(counts: list[int]) -> np.ndarray:
    """Counts as [len + 1] int32 starts."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
