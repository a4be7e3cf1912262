"""Divides the work of one attention call among CTAs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import NamedTuple

from ..constants import constant

# Work ranges, and tiles that may be reordered.
MAX_RANGES, MAX_ORDERED = (constant("common/sparse/work.cuh", name) for name in ("MAX_RANGES", "MAX_ORDERED"))
INT32_LIMIT = 2**31 - 1
# Least blocks per CTA for which a plan is faster if lengths differ: a plan costs about as much as reading six blocks.
MOST_UNPLANNED = 24


class Division(NamedTuple):
    """Division of a call's work among CTAs.

    Attributes:
        ranges: CTAs, each with a work range: consecutive blocks of work
        planned: lengths differ: the device decides where ranges begin, or their tiles. Whole tiles with one CTA each
            and `parts` need no plan: the kernel splits every tile by the tile's length
        split: ranges may begin inside a tile
        parts: splits of each tile, if all tiles have the same number and no CTA has two; or 0
        together: the CTAs of a tile are a cluster, which stores results and no partial results
    """

    ranges: int
    planned: bool
    split: bool
    parts: int = 0
    cluster: bool = False


UNDIVIDED = Division(0, False, False)
INVARIANT_PARTS = 2  # splits of every tile of a batch-invariant call, whose lists have selected rows


def invariant(tiles: int, has_selection: bool, clusters: tuple[tuple[int, int], ...]) -> Division | None:
    """The division of a batch-invariant call among clusters, which must not depend on the batch, or None.

    A cluster divides the blocks of its tile evenly, so the splits follow from the tile's own lists. There are more
    clusters than run at a time if there are many tiles.

    Args:
        has_selection: whether lists have selected rows; a window alone is too short to be split
        clusters: as of `divide`
    """
    if not has_selection or not dict(clusters).get(INVARIANT_PARTS):
        return None
    return Division(tiles * INVARIANT_PARTS, False, False, INVARIANT_PARTS, cluster=True)


class Costs(NamedTuple):
    """Terms of the cost model that selects a division, relative or in us (docs/kernels/decode-splits.md).

    Attributes:
        block: a block of keys
        tile: reading a tile's Q and writing its result
        split: writing a partial result and combining a tile's
        straddle: writing and combining in a range with partial results of two tiles
        part: combining one more partial result, counted over the call
        cluster: combining one more partial result within a cluster
    """

    block: float
    tile: float
    split: float
    straddle: float
    part: float
    cluster: float = 0


_of_plan = functools.partial(constant, "common/sparse/plan.cu")
COSTS = Costs(
    block=1, tile=_of_plan("TILE_COST"), split=_of_plan("SPLIT_COST"), straddle=_of_plan("STRADDLE_COST"),
    part=1 / _of_plan("PARTS_A_BLOCK"),
)  # fmt: skip


def terms(division: Division, tiles: int, blocks: int, max_ranges: int) -> Costs:
    """The number of times that each cost occurs if tiles of `blocks` blocks are divided in this way."""
    count = division.parts
    if division.cluster:
        return Costs(block=-(-blocks // count), tile=1, split=0, straddle=0, part=0, cluster=count - 1)
    if count:
        return Costs(block=-(-blocks // count), tile=1, split=1, straddle=0, part=count * (tiles + 1))
    if division.split:
        return Costs(
            block=tiles * blocks / max_ranges, tile=tiles / max_ranges, split=0, straddle=1,
            part=max_ranges / tiles * (tiles + 1),
        )  # fmt: skip
    rounds = -(-tiles // max_ranges)
    return Costs(block=rounds * blocks, tile=rounds, split=0, straddle=0, part=0)


def choices(tiles: int, blocks: int, max_ranges: int, clusters: tuple[tuple[int, int], ...] = ()) -> Iterator[Division]:
    """Candidate divisions of equal tiles of `blocks` blocks, the simplest first."""
    yield Division(min(max_ranges, tiles), False, False)
    for count, most in clusters:
        if count <= blocks and tiles <= most:
            yield Division(tiles * count, False, False, count, cluster=True)
    for count in range(2, min(max_ranges // tiles, blocks) + 1):
        yield Division(tiles * count, False, True, count)
    yield Division(min(max_ranges, tiles * blocks), False, True)


@functools.lru_cache(maxsize=1024)
def divide(
    tiles: int,
    blocks: int,
    ragged: bool,
    may_split: bool,
    max_ranges: int,
    costs: Costs = COSTS,
    clusters: tuple[tuple[int, int], ...] = (),
) -> tuple[Division, float]:
    """The best division of tiles of `blocks` blocks over at most `max_ranges` CTAs, and its cost.

    Args:
        ragged: tiles may have fewer blocks: they are divided as if they had all, unless CTAs would have many blocks or
            several tiles each, which a plan balances
        may_split: whether several CTAs may split a tile
        clusters: sizes of clusters that may split a tile, and the number of such clusters that run at a time
    """
    may_split = may_split and tiles * blocks <= INT32_LIMIT
    max_ranges = min(max_ranges, MAX_RANGES)

    def cost(division: Division) -> float:
        return sum(map(operator.mul, terms(division, tiles, blocks, max_ranges), costs))

    best = Division(min(max_ranges, tiles), False, False)
    if may_split:
        best = min(choices(tiles, blocks, max_ranges, clusters), key=cost)
    splits = max(best.parts, 1)
    if ragged and (best.ranges != tiles * splits or (may_split and blocks > MOST_UNPLANNED * splits)):
        return Division(min(max_ranges, tiles * blocks if may_split else tiles), True, may_split), cost(best)
    return best, cost(best)


# Costs of Hopper's decode kernel by heads of a tile, in us: a least-squares fit to measured divisions
# (docs/kernels/decode-splits.md).
HOPPER_COSTS = {
    64: Costs(block=2.1, tile=6.8, split=1.2, straddle=13, part=1 / 13, cluster=0.85),
    32: Costs(block=1.65, tile=5, split=1.5, straddle=9, part=1 / 36, cluster=0.35),
    16: Costs(block=1.65, tile=4, split=1.2, straddle=6, part=1 / 65, cluster=0.1),
}


@functools.lru_cache(maxsize=1024)
def tile_heads(
    tokens: int, heads: int, blocks: int, may_split: bool, max_ranges: int, clusters: tuple[tuple[int, int], ...] = ()
) -> int:
    """The fastest number of heads per tile of Hopper's decode kernel, for lists of maximum length."""
    highest = min((height for height in HOPPER_COSTS if height >= heads), default=max(HOPPER_COSTS))
    if not may_split:
        return highest

    def cost(height: int) -> float:
        tiles = tokens * -(-heads // height)
        return divide(tiles, blocks, False, True, max_ranges, HOPPER_COSTS[height], clusters)[1]

    return min((height for height in HOPPER_COSTS if height <= highest), key=cost)
