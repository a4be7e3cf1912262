"""How the work of one attention call is divided among thread blocks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import NamedTuple

MAX_SHARES, MOST_DEALT = 512, 1 << 14  # shares, and tiles that may be dealt, as in csrc/common/sparse/work.cuh
INT32_LIMIT = 2**31 - 1
# Blocks of a thread block from which on a plan pays where lengths differ: it costs about as much as reading six blocks.
MOST_UNPLANNED = 24


class Division(NamedTuple):
    """Who does what.

    shares   thread blocks, each with a run of blocks of work
    planned  lengths differ: where shares begin, or which tiles they have, is decided on the device. Whole tiles of a
             thread block each and `parts` need no plan: the kernel splits every tile by its own length
    cut      shares may begin inside a tile
    parts    shares of each tile, where all have as many and no share has two; or 0
    together the thread blocks of a tile are a cluster, which leaves results and not parts
    """

    shares: int
    planned: bool
    cut: bool
    parts: int = 0
    together: bool = False


UNDIVIDED = Division(0, False, False)


class Costs(NamedTuple):
    """What a division is chosen by: times, in units of one another or in us (NOTES.md).

    block     a block of keys
    tile      to read a tile's Q and to write its result
    cut       to write a part of a tile, and to put parts together
    straddle  the same where a share has parts of two tiles
    part      to put together one part more, of all that there are
    together  within a cluster, to put together one part more
    """

    block: float
    tile: float
    cut: float
    straddle: float
    part: float
    together: float = 0


# As in csrc/common/sparse/plan.cu.
COSTS = Costs(block=1, tile=2, cut=2, straddle=5, part=1 / 64)


def terms(division: Division, tiles: int, blocks: int, max_shares: int) -> Costs:
    """How often each of the costs is met where tiles of so many blocks are divided like this."""
    count = division.parts
    if division.together:
        return Costs(block=-(-blocks // count), tile=1, cut=0, straddle=0, part=0, together=count - 1)
    if count:
        return Costs(block=-(-blocks // count), tile=1, cut=1, straddle=0, part=count * (tiles + 1))
    if division.cut:
        return Costs(
            block=tiles * blocks / max_shares, tile=tiles / max_shares, cut=0, straddle=1,
            part=max_shares / tiles * (tiles + 1),
        )  # fmt: skip
    rounds = -(-tiles // max_shares)
    return Costs(block=rounds * blocks, tile=rounds, cut=0, straddle=0, part=0)


def choices(tiles: int, blocks: int, max_shares: int, clusters: tuple[tuple[int, int], ...] = ()) -> Iterator[Division]:
    """How tiles of so many blocks, one like the other, may be divided; the simplest first."""
    yield Division(min(max_shares, tiles), False, False)
    for count, most in clusters:
        if count <= blocks and tiles <= most:
            yield Division(tiles * count, False, False, count, together=True)
    for count in range(2, min(max_shares // tiles, blocks) + 1):
        yield Division(tiles * count, False, True, count)
    yield Division(min(max_shares, tiles * blocks), False, True)


@functools.lru_cache(maxsize=1024)
def divide(
    tiles: int,
    blocks: int,
    ragged: bool,
    may_cut: bool,
    max_shares: int,
    costs: Costs = COSTS,
    clusters: tuple[tuple[int, int], ...] = (),
) -> tuple[Division, float]:
    """How to spread tiles of so many blocks over at most `max_shares` thread blocks, and what that costs.

    ragged    tiles may have fewer blocks: they are divided as if they had all, unless thread blocks would have many
              blocks or several tiles each, which a plan evens out
    may_cut   whether a tile may be shared
    clusters  how many thread blocks may share a tile as a cluster, and how many such clusters run at a time
    """
    may_cut = may_cut and tiles * blocks <= INT32_LIMIT
    max_shares = min(max_shares, MAX_SHARES)

    def cost(division: Division) -> float:
        return sum(map(operator.mul, terms(division, tiles, blocks, max_shares), costs))

    best = Division(min(max_shares, tiles), False, False)
    if may_cut:
        best = min(choices(tiles, blocks, max_shares, clusters), key=cost)
    splits = max(best.parts, 1)
    if ragged and (best.shares != tiles * splits or (may_cut and blocks > MOST_UNPLANNED * splits)):
        return Division(min(max_shares, tiles * blocks if may_cut else tiles), True, may_cut), cost(best)
    return best, cost(best)


# Of Hopper's decode kernel by heads of a tile, in us. benchmarks/divisions.py measures them.
HOPPER_COSTS = {
    64: Costs(block=2.1, tile=6.8, cut=1.2, straddle=13, part=1 / 13, together=0.85),
    32: Costs(block=1.65, tile=5, cut=1.5, straddle=9, part=1 / 36, together=0.35),
    16: Costs(block=1.65, tile=4, cut=1.2, straddle=6, part=1 / 65, together=0.1),
}


@functools.lru_cache(maxsize=1024)
def tile_heads(
    tokens: int, heads: int, blocks: int, may_cut: bool, max_shares: int, clusters: tuple[tuple[int, int], ...] = ()
) -> int:
    """Of how many heads tiles of Hopper's decode kernel are best, if lists are as long as they may be."""
    highest = min((height for height in HOPPER_COSTS if height >= heads), default=max(HOPPER_COSTS))
    if not may_cut:
        return highest

    def cost(height: int) -> float:
        tiles = tokens * -(-heads // height)
        return divide(tiles, blocks, False, True, max_shares, HOPPER_COSTS[height], clusters)[1]

    return min((height for height in HOPPER_COSTS if height <= highest), key=cost)
