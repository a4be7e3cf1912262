"""The pool of cache blocks: the blocks of each request, and the prefixes that can be shared.

A block is 256 positions of one request in every cache of every layer: four pages of 64 tokens in a window
cache, one page of 64 rows at ratio 4, one of 2 rows at ratio 128. A trace's hash id stands for 512 tokens, so
blocks are shared in pairs. A `Prefix` is a hash id and its index in the prompt, because RoPE makes rows depend on
their position.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Protocol

from .trace import HASH_TOKENS

BLOCK_TOKENS = 256
BLOCKS_PER_HASH = HASH_TOKENS // BLOCK_TOKENS
Prefix = tuple[int, int]


class Store(Protocol):
    """Where prefixes go whose blocks are freed: `Offload`."""

    def __contains__(self, prefix: Prefix) -> bool: ...

    def store(self, prefixes: Sequence[tuple[Prefix, Sequence[int]]], pinned: Collection[Prefix] = ()) -> None:
        """Take what a hit needs of these blocks; may drop other prefixes, but not the pinned ones."""

    def restore(self, prefixes: Sequence[tuple[Prefix, Sequence[int]]]) -> None:
        """Give prefixes back in these blocks."""


class BlockPool:
    """Blocks 0 to num_blocks - 1. Each is free, held by one or more requests, or idle.

    An idle block is held by no request but still contains the rows of a prefix. If blocks are needed, the pair that
    has been idle for longest is freed first.

    Args:
        offload: takes what a hit needs of a pair before the pair is freed, and gives it back later; None: it is lost
    """

    def __init__(self, num_blocks: int, offload: Store | None = None) -> None:
        self.num_blocks, self.offload = num_blocks, offload
        self.holders = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._shared: dict[Prefix, tuple[int, ...]] = {}  # blocks of a prefix
        self._prefix_of: dict[int, Prefix] = {}  # prefix of a block
        self._idle: OrderedDict[Prefix, None] = OrderedDict()  # longest idle first

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self.num_idle

    @property
    def num_idle(self) -> int:
        return len(self._idle) * BLOCKS_PER_HASH

    def find(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """The leading prefixes whose rows are in the cache, or in host memory."""
        return list(itertools.takewhile(self._is_known, prefixes))

    def _is_known(self, prefix: Prefix) -> bool:
        return prefix in self._shared or (self.offload is not None and prefix in self.offload)

    def acquire(self, shared: Sequence[Prefix], num_new: int) -> list[int] | None:
        """The blocks of prefixes that `find` found, then `num_new` more; None if too few blocks are left."""
        swapped = [prefix for prefix in shared if prefix not in self._shared]
        needed = num_new + len(swapped) * BLOCKS_PER_HASH
        reclaimable = (len(self._idle) - sum(prefix in self._idle for prefix in shared)) * BLOCKS_PER_HASH
        if needed > len(self._free) + reclaimable:
            return None
        for prefix in shared:
            self._idle.pop(prefix, None)
        freed = []
        while len(self._free) < needed:
            freed.append(self._forget_longest_idle())
        if self.offload is not None:
            self.offload.store(freed, pinned=swapped)
        for prefix in swapped:
            self.publish(prefix, [self._free.popleft() for _ in range(BLOCKS_PER_HASH)])
        if self.offload is not None:
            self.offload.restore([(prefix, self._shared[prefix]) for prefix in swapped])
        blocks = [block for prefix in shared for block in self._shared[prefix]]
        blocks += [self._free.popleft() for _ in range(num_new)]
        for block in blocks:
            self.holders[block] += 1
        return blocks

    def publish(self, prefix: Prefix, blocks: Sequence[int]) -> None:
        """Share blocks whose rows are all written with later requests, unless another request already did."""
        if prefix not in self._shared:
            self._shared[prefix] = tuple(blocks)
            self._prefix_of.update((block, prefix) for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Release a request's blocks. The end of a prefix becomes idle first: fewer requests can use it."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            prefix = self._prefix_of.get(block)
            if self.holders[block]:
                continue
            if prefix is None:
                self._free.append(block)
            elif not any(self.holders[other] for other in self._shared[prefix]):
                self._idle[prefix] = None

    def _forget_longest_idle(self) -> tuple[Prefix, tuple[int, ...]]:
        """Free a prefix's blocks. Returns both."""
        prefix, _ = self._idle.popitem(last=False)
        blocks = self._shared.pop(prefix)
        for block in blocks:
            del self._prefix_of[block]
            self._free.append(block)
        return prefix, blocks
