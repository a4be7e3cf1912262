"""How the work of one attention call is divided among thread blocks."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

MAX_SHARES, MOST_DEALT = 512, 1 << 14  # shares, and tiles that may be dealt, as in csrc/common/sparse/work.cuh
INT32_LIMIT = 2**31 - 1


class Division(NamedTuple):
    """Who does what.

    shares   thread blocks, each with a run of blocks of work
    planned  lengths differ: where shares begin, or which tiles they have, is decided on the device
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
    together  to put parts together within a cluster
    """

    block: float
    tile: float
    cut: float
    straddle: float
    part: float
    together: float = 0


# As in csrc/common/sparse/plan.cu.
COSTS = Costs(block=1, tile=2, cut=2, straddle=5, part=1 / 64)


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

    ragged    tiles may have fewer blocks
    may_cut   whether a tile may be shared
    clusters  how many thread blocks may share a tile as a cluster, and how many such clusters run at a time
    """
    block, tile, cut, straddle, part, together = costs
    may_cut = may_cut and tiles * blocks <= INT32_LIMIT
    max_shares = min(max_shares, MAX_SHARES)
    whole_cost = -(-tiles // max_shares) * (blocks * block + tile)
    if ragged:
        return Division(min(max_shares, tiles * blocks if may_cut else tiles), True, may_cut), whole_cost
    whole = Division(min(max_shares, tiles), False, False)
    if not may_cut:
        return whole, whole_cost
    # As many parts as make the longest shorter, while that saves more than it costs to put them together.
    parts, parts_cost, cluster, cluster_cost = 0, math.inf, whole, math.inf
    for count in range(2, min(max_shares // tiles, blocks) + 1):
        count_cost = -(-blocks // count) * block + tile + cut + count * (tiles + 1) * part
        if count_cost < parts_cost:
            parts, parts_cost = count, count_cost
    for count, most in clusters:
        count_cost = -(-blocks // count) * block + tile + together
        if count <= blocks and tiles <= most and count_cost < min(whole_cost, cluster_cost):
            cluster, cluster_cost = Division(tiles * count, False, False, count, True), count_cost
    straddle_cost = tiles * (blocks * block + tile) / max_shares + straddle + max_shares / tiles * (tiles + 1) * part
    if whole_cost <= min(parts_cost, straddle_cost, cluster_cost):
        return whole, whole_cost
    if cluster_cost <= min(parts_cost, straddle_cost):
        return cluster, cluster_cost
    if parts_cost <= straddle_cost:
        return Division(tiles * parts, False, True, parts), parts_cost
    return Division(min(max_shares, tiles * blocks), False, True), straddle_cost


# Of Hopper's decode kernel by heads of a tile, in us.
HOPPER_COSTS = {
    64: Costs(block=2.1, tile=6.8, cut=1.2, straddle=13, part=1 / 13, together=3),
    32: Costs(block=1.65, tile=5, cut=1.5, straddle=9, part=1 / 36, together=1.5),
    16: Costs(block=1.65, tile=4, cut=1.2, straddle=6, part=1 / 65, together=1),
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
