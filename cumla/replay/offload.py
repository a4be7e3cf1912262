"""Prefixes in host memory: what a hit needs of their pages is swapped out before their blocks are freed, and back in
for a later hit."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.memory import to_host
from ..pages import FreePages, Group, Pools, host_pool, pools_of, swap_in, swap_out
from ..timing import Stopwatch
from .blocks import BLOCK_TOKENS, BLOCKS_PER_HASH, Prefix
from .groups import LayerGroups
from .trace import HASH_TOKENS

Blocks = Sequence[int]
STEP = "step"  # in place of a layer, as in the engine


class Side(NamedTuple):
    """The pages of some layers on the device and on the host."""

    device: Pools
    host: Pools
    free: FreePages


class Stored(NamedTuple):
    """A prefix in host memory: pages by group for each Side, and the checksum of the device's pages."""

    pages: list[dict[str, list[int]]]
    checksum: int


class Offload:
    """A pool of host pages. The prefix that was stored longest ago is dropped first.

    Args:
        layers: whose pages are swapped
        num_pages: pages of each group in host memory
        checks: whether pages that come back are compared with the pages that left

    Attributes:
        counts: pages, bytes and prefixes that were swapped out and in; prefixes that were dropped; prefixes compared
        failures: a line for each prefix that came back changed
    """

    def __init__(
        self, layers: Sequence[LayerGroups], num_pages: int, stopwatch: Stopwatch, backend: str, pinned: bool,
        checks: bool = True,
    ) -> None:  # fmt: skip
        counts = [{group.name: num_pages for group in description} for _, description, _ in layers]
        size = sum(Pools.bytes_of(description, its) for (_, description, _), its in zip(layers, counts, strict=True))
        memory = host_pool(size, pinned)
        self.sides = [
            Side(pools_of(description, caches), Pools.allocate(description, its, memory), FreePages(its))
            for (_, description, caches), its in zip(layers, counts, strict=True)
        ]
        self.num_bytes, self.checks, self._stopwatch, self._backend = size, checks, stopwatch, backend
        self._stored: OrderedDict[Prefix, Stored] = OrderedDict()
        names = ("pages_out", "bytes_out", "prefixes_out", "pages_in", "bytes_in", "prefixes_in", "dropped", "compared")
        self.counts = dict.fromkeys(names, 0)
        self.failures: list[str] = []

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def store(self, prefixes: Sequence[tuple[Prefix, Blocks]], pinned: Collection[Prefix] = ()) -> None:
        """Copy what hits need of these prefixes to the host, as far as there are pages without the pinned prefixes'."""
        kept = {*pinned, *(prefix for prefix, _ in prefixes)}
        taken = []
        for prefix, blocks in prefixes:
            self._drop(prefix)
            pages = self._take(prefix, kept)
            if pages is None:
                self.counts["dropped"] += 1
            else:
                taken.append((prefix, blocks, pages))
        sums = [self._checksum(prefix, blocks) for prefix, blocks, _ in taken]
        self._swap("out", taken)
        for (prefix, _, pages), checksum in zip(taken, sums, strict=True):
            self._stored[prefix] = Stored(pages, checksum)

    def restore(self, prefixes: Sequence[tuple[Prefix, Blocks]]) -> None:
        """Copy stored prefixes into these blocks; they are no longer stored."""
        stored = [(prefix, blocks, self._stored[prefix]) for prefix, blocks in prefixes]
        self._swap("in", [(prefix, blocks, its.pages) for prefix, blocks, its in stored])
        for prefix, blocks, its in stored:
            if self.checks:
                self.counts["compared"] += 1
                if self._checksum(prefix, blocks) != its.checksum:
                    first, end = (HASH_TOKENS * (prefix[0] + i) for i in range(2))
                    self.failures.append(f"positions {first} to {end - 1} of hash id {prefix[1]} came back changed")
            self._drop(prefix)

    def _swap(self, direction: str, prefixes: Sequence[tuple[Prefix, Blocks, list[dict[str, list[int]]]]]) -> None:
        if not prefixes:
            return
        self.counts[f"prefixes_{direction}"] += len(prefixes)
        with self._stopwatch.measure((STEP, f"swap {direction}")):
            for number, side in enumerate(self.sides):
                pairs: dict[str, list[tuple[int, int]]] = {}
                for prefix, blocks, pages in prefixes:
                    for group, columns in self._columns(prefix, side):
                        theirs = pages[number][group.name]
                        both = zip(device_pages(group, columns, prefix, blocks), theirs, strict=True)
                        pairs.setdefault(group.name, []).extend(both)
                for group in side.device.description:
                    count = len(pairs.get(group.name, ()))
                    self.counts[f"pages_{direction}"] += count
                    self.counts[f"bytes_{direction}"] += count * group.page_bytes
                if direction == "out":
                    swap_out(side.device, side.host, pairs, backend=self._backend)
                else:
                    back = {name: [(theirs, ours) for ours, theirs in its] for name, its in pairs.items()}
                    swap_in(side.host, side.device, back, backend=self._backend)

    def _take(self, prefix: Prefix, kept: Collection[Prefix]) -> list[dict[str, list[int]]] | None:
        """Host pages for a prefix; None if there are too few, even without the prefixes that need not be kept."""
        while True:
            taken: list[dict[str, list[int]]] = []
            for side in self.sides:
                found = side.free.take({group.name: len(columns) for group, columns in self._columns(prefix, side)})
                if found is None:
                    break
                taken.append(found)
            else:
                return taken
            self._give_back(taken)
            oldest = next((other for other in self._stored if other not in kept), None)
            if oldest is None:
                return None
            self._drop(oldest)
            self.counts["dropped"] += 1

    def _drop(self, prefix: Prefix) -> None:
        """Free the host pages of a prefix, if it has any."""
        stored = self._stored.pop(prefix, None)
        if stored is not None:
            self._give_back(stored.pages)

    def _give_back(self, taken: Sequence[Mapping[str, Sequence[int]]]) -> None:
        for side, groups in zip(self.sides, taken, strict=False):
            for name, pages in groups.items():
                for page in pages:
                    side.free.give_back(name, page)

    def _columns(self, prefix: Prefix, side: Side) -> Iterator[tuple[Group, range]]:
        """Columns of a prefix's own blocks that a hit that ends with the prefix, or later, needs of each group."""
        for group in side.device.description:
            if group.tokens:
                per_prefix, end = HASH_TOKENS // group.tokens, HASH_TOKENS * (prefix[0] + 1)
                pages = group.part(end).pages
                yield group, range(max(pages.start, prefix[0] * per_prefix), pages.stop)

    def _checksum(self, prefix: Prefix, blocks: Blocks) -> int:
        """Of the device's pages of a prefix. Waits for the device."""
        found = 0
        if self.checks:
            with self._stopwatch.measure((STEP, "verify")):
                for side in self.sides:
                    for group, columns in self._columns(prefix, side):
                        pages = device_pages(group, columns, prefix, blocks)
                        for pool in side.device.pools:
                            if pages and pool.group is group:
                                found = zlib.crc32(np.ascontiguousarray(to_host(pool.array[pages])).data, found)
        return found


def device_pages(group: Group, columns: range, prefix: Prefix, blocks: Blocks) -> list[int]:
    """The device's pages of these columns of a group, in the blocks of a prefix."""
    per_block, first = BLOCK_TOKENS // group.tokens, prefix[0] * BLOCKS_PER_HASH
    return [blocks[column // per_block - first] * per_block + column % per_block for column in columns]
