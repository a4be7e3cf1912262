"""Page groups of a model as plain data, and arithmetic on them: no arrays, no device.

A group is a set of caches with one block table (or one ring a request). Positions are counted from 0 in a request. "n
tokens" are positions 0 to n - 1: they are in the caches, and position n is computed next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.values import check_choice, check_flags, check_integers, check_kind
from ..kernels.types.compressor import first_state
from ..kernels.types.shard import Shard

LIFETIMES = ("request", "window", "states", "ring")
VERSION = 1
CANDIDATES = 1 << 14  # lengths of a hit that are checked at a time


@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """One cache of a group, in each of its layers.

    Attributes:
        cache: its name among a layer's caches, such as "compressed" of `LayerCaches`
        layers: layers that own it, in order; layers that read another layer's rows are not listed
        layout: name of its format, or dtype and width of rows without one
        positions: positions of a row; 1: a row for each
        rows: rows of a page
        row_bytes, tail_bytes: bytes of a row, and of its scales at the page's end
        page_bytes: bytes of a page, without padding
        stride: bytes from page to page as allocated; arrays may have larger ones
        alignment: every stride is a multiple of it
        sharded: whether each rank has only its own rows
        whole: whether a request needs the whole page and not single rows
    """

    cache: str
    layers: tuple[int, ...]
    layout: str
    positions: int
    rows: int
    row_bytes: int
    tail_bytes: int
    page_bytes: int
    stride: int
    alignment: int
    sharded: bool = False
    whole: bool = False


class Part(NamedTuple):
    """What a number of tokens needs of one group.

    Attributes:
        group: its name
        first, end: positions whose rows, states or ring rows are needed; equal if none are
        pages: columns of the block table that must be present: range; of a ring range(1) or range(0)
        written: the last of these columns if later tokens write into it: a request that shares the page copies it
            first; -1: none
    """

    group: str
    first: int
    end: int
    pages: range
    written: int


class Hit(NamedTuple):
    """Tokens that need not be computed, and what they need of every group. Position `tokens` is computed next."""

    tokens: int
    parts: tuple[Part, ...]

    def part(self, group: str) -> Part:
        """What it needs of one group."""
        return next(part for part in self.parts if part.group == group)


class Missing(NamedTuple):
    """A page that a request needs and does not have.

    Attributes:
        request: row of the block tables
        group: name of the group
        column: of its block table
        position: first position that is needed of the page
        page: entry of the table: -1 is absent, -2 - p is page p of a host pool, anything else is not a page of the pool
    """

    request: int
    group: str
    column: int
    position: int
    page: int

    def __str__(self) -> str:
        state = "absent" if self.page == -1 else f"swapped out to page {-2 - self.page}"
        if self.page >= 0:
            state = f"page {self.page}, which the pool lacks"
        return f"request {self.request} needs a page of {self.group} for position {self.position}: it is {state}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Caches with one block table.

    Attributes:
        name: as `LayerSpec.groups` names it; "draft_" precedes groups of draft layers, "rank_" sharded rows
        tokens: positions of a page; 0: a ring, of which a request has one
        lifetime: how long a page is needed: "request", to the end of the request; "window", while a token sees one of
            its positions; "states", until the rows are complete that pool its positions; "ring", the last rows are
            overwritten by position
        reach: "window": positions before the next token that it sees; "states" and "ring": positions of a pooled row
        overlap: "states": whether a pooled row also needs the positions of the row before
        caches: the group's caches
        rank, ranks, interleave: the rank's part of sharded caches
    """

    name: str
    tokens: int
    lifetime: str
    reach: int
    caches: tuple[PagedCache, ...]
    overlap: bool = False
    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(cache.stride * len(cache.layers) for cache in self.caches)

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.ranks, self.interleave)

    def positions(self, tokens: Any) -> tuple[Any, Any]:
        """First position that n tokens need, and one after the last; `tokens` is a number or an array of numbers."""
        if self.lifetime == "request":
            return tokens * 0, self._complete(tokens)
        if self.lifetime == "window":
            return np.maximum(tokens - self.reach, 0), tokens
        return first_state(tokens, self.reach, self.overlap), tokens

    def _complete(self, tokens: Any) -> Any:
        """Positions of complete rows."""
        ends = [tokens // cache.positions * cache.positions for cache in self.caches]
        return np.max(ends, axis=0) if ends else tokens

    def part(self, tokens: int) -> Part:
        """What n tokens need."""
        first, end = (int(x) for x in self.positions(tokens))
        if not self.tokens:
            return Part(self.name, first, end, range(int(end > first)), -1)
        columns = [self.columns(cache, first, end) for cache in self.caches]
        columns = [x for x in columns if len(x)]
        if not columns:
            return Part(self.name, first, end, range(0), -1)
        pages = range(min(x.start for x in columns), max(x.stop for x in columns))
        return Part(self.name, first, end, pages, pages[-1] if self._is_written(pages[-1], tokens) else -1)

    def _is_written(self, column: int, tokens: int) -> bool:
        """Whether tokens after n write into a page."""
        return any(self.rows(cache, tokens)[1] < (column + 1) * cache.rows for cache in self.caches)

    def rows(self, cache: PagedCache, tokens: int) -> tuple[int, int]:
        """First row of a cache that n tokens need, and one after the last, counted in the request.

        Of a ring: positions, whose rows are at the position modulo the capacity; of a whole page 0 and its rows.
        """
        first, end = (int(x) for x in self.positions(tokens))
        if cache.whole:
            return 0, cache.rows * (end > first)
        if not self.tokens:
            return first, end
        return self._local(cache, first // cache.positions), self._local(cache, end // cache.positions)

    def _local(self, cache: PagedCache, rows: int) -> int:
        return self.shard.local_len(rows) if cache.sharded else rows

    def columns(self, cache: PagedCache, first: int, end: int) -> range:
        """Columns of the block table with a cache's rows of these positions."""
        start, stop = (self._local(cache, x // cache.positions) for x in (first, end))
        return range(start // cache.rows, -(-stop // cache.rows)) if stop > start else range(0)

    def pages(self, tokens: int, step_tokens: int = 0) -> range:
        """Columns with a page during the step that computes the last `step_tokens` of n tokens, or after it (0)."""
        if not self.tokens:
            return range(1)
        ranges = [self.part(tokens - step_tokens).pages]
        ranges += [self.columns(cache, tokens - step_tokens, tokens) for cache in self.caches]
        used = [x for x in ranges if len(x)]
        return range(min(x.start for x in used), max(x.stop for x in used)) if used else range(0)

    def request_bytes(self, tokens: int, step_tokens: int = 1) -> int:
        """Bytes of a request's pages in the step that computes the last `step_tokens` of its n tokens."""
        return self.page_bytes * len(self.pages(tokens, step_tokens))

    def hit_bytes(self, tokens: int) -> int:
        """Bytes of the pages that n tokens need."""
        return self.page_bytes * len(self.part(tokens).pages)

    def packed_bytes(self, tokens: int) -> int:
        """Bytes of the rows and scales that n tokens need, without the rest of their pages."""
        total = 0
        for cache in self.caches:
            first, end = self.rows(cache, tokens)
            total += (end - first) * (cache.row_bytes + cache.tail_bytes) * len(cache.layers)
        return total


@dataclass(frozen=True, kw_only=True)
class Description:
    """The page groups of a model.

    Attributes:
        model: its kind, such as "DeepseekV4Config", or the name given
        digest: of the layers' specs: two models with equal digests compute with caches in the same way
        layers, drafts: number of layers, and of draft layers after them
        groups: the groups, in an order that does not change
        version: of this description and of what `pack` makes of it
    """

    model: str
    digest: str
    layers: int
    drafts: int
    groups: tuple[Group, ...]
    version: int = VERSION

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def group(self, name: str) -> Group:
        """A group by its name. Raises ValueError for another name."""
        check_choice(tuple(group.name for group in self.groups), group=name)
        return next(group for group in self.groups if group.name == name)

    def to_json(self) -> dict[str, Any]:
        """The description as dictionaries, lists, strings and numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Description:
        """The description that `to_json` returned, also after JSON. Raises TypeError for anything else."""
        check_kind(Mapping, data=data)
        groups = tuple(
            Group(**group | {"caches": tuple(
                PagedCache(**cache | {"layers": tuple(cache["layers"])}) for cache in group["caches"]
            )})
            for group in data["groups"]
        )  # fmt: skip
        return cls(**{**data, "groups": groups})

    @property
    def page_multiple(self) -> int:
        """The least common multiple of the positions of pages: hits of its multiples need no copies of pages."""
        return math.lcm(*(group.tokens for group in self.groups if group.tokens))

    def needs(self, tokens: int) -> Hit:
        """What a hit of n tokens needs of every group."""
        check_integers(0, tokens=tokens)
        return Hit(tokens, tuple(group.part(int(tokens)) for group in self.groups))

    def hit(self, tokens: int, kept: Mapping[str, Sequence[tuple[int, int]]], copies: bool = True) -> Hit:
        """The longest hit for which everything is kept. The tokens after it are computed.

        Args:
            tokens: of the request's prompt that it shares with the prefix, or all of them; one is always computed
            kept: by group, intervals (first, end) of positions whose rows, states or ring rows are still kept
            copies: whether the request copies pages that are partly filled before it writes into them; False: hits are
                multiples of `page_multiple`

        Returns a hit of 0 tokens if there is none. Raises ValueError for a group that the model lacks.
        """
        check_integers(1, tokens=tokens)
        check_flags(copies=copies)
        for name in kept:
            self.group(name)
        unit = 1 if copies else self.page_multiple
        last = (int(tokens) - 1) // unit
        while last > 0:
            candidates = unit * np.arange(max(last - CANDIDATES, 0) + 1, last + 1)
            found = np.ones(len(candidates), np.bool_)
            for group in self.groups:
                found &= _covered(*group.positions(candidates), kept.get(group.name, ()))
            if found.any():
                return self.needs(int(candidates[found][-1]))
            last -= CANDIDATES
        return self.needs(0)

    def request_bytes(self, tokens: int, step_tokens: int = 1) -> int:
        """Bytes of the pages of a request in the step that computes the last `step_tokens` of its n tokens."""
        check_integers(0, tokens=tokens)
        check_integers(0, int(tokens), step_tokens=step_tokens)
        return sum(group.request_bytes(tokens, step_tokens) for group in self.groups)

    def checkpoint_bytes(self, tokens: int) -> int:
        """Bytes of the pages that would be freed as the request goes on, and that a hit of n tokens needs."""
        check_integers(0, tokens=tokens)
        return sum(group.hit_bytes(int(tokens)) for group in self.groups if group.lifetime != "request")

    def packed_bytes(self, tokens: int) -> int:
        """Bytes of all rows and scales that a hit of n tokens needs."""
        check_integers(0, tokens=tokens)
        return sum(group.packed_bytes(int(tokens)) for group in self.groups)


def _covered(first: np.ndarray, end: np.ndarray, intervals: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each of [first, end) is within one of the intervals, after adjacent ones are joined."""
    joined: list[list[int]] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        elif stop > start:
            joined.append([start, stop])
    if not joined:
        return np.asarray(end <= first)
    starts, stops = np.array(joined).T
    at = np.searchsorted(starts, first, side="right") - 1
    return (end <= first) | ((at >= 0) & (stops[np.maximum(at, 0)] >= end))
