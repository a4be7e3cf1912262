"""By which road a chunk of prefills attends: over the pages of its caches, or over rows gathered from them first.

Over the pages nothing is gathered and there is no workspace, but rows are converted anew for every token that attends
to them. Gathered rows cost a pass over all that a request's tokens reach, and are bfloat16 from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..layout import DSV4_FP8, CacheLayout
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata

ROADS = ("pages", "rows")
HEADS, BLOCK = 64, 64  # heads and keys that kernels take at a time


@dataclass(frozen=True)
class Costs:
    """What a chunk takes on a backend, in us, as measured. A tile is 64 heads of a token, a block 64 keys of a tile.

    pages        of any chunk over pages
    pages_map    of the slots of compressed rows, if there are any
    pages_tile, pages_block  of a tile's start and end and of a block, if all multiprocessors have some
    rows         of any chunk over gathered rows: a gather, indices, attention
    rows_map     of gathering compressed rows and listing them, if there are any
    gathered     of a gathered row
    wave_tile    of a tile's start and end, if all multiprocessors have one
    wave_block   of one block of each of them
    tiles        that are attended to at a time
    """

    pages: float
    pages_map: float
    pages_tile: float
    pages_block: float
    rows: float
    rows_map: float
    gathered: float
    wave_tile: float
    wave_block: float
    tiles: int


# Measured on an H200 (kernels/NOTES.md). Backends and layouts that are not here gather.
COSTS = {
    ("cuda", DSV4_FP8.name): Costs(
        pages=10, pages_map=8, pages_tile=0.0271, pages_block=0.0153, rows=32, rows_map=26, gathered=0.0005,
        wave_tile=3.85, wave_block=1.575, tiles=132,
    ),
}  # fmt: skip


def cheaper_road(costs: Costs, tokens: int, heads: int, window: int, compressed: int, gathered: int) -> str:
    """The road for `tokens` tokens that attend to so many window and compressed rows each.

    gathered  rows that gathering them would make
    """
    tiles = tokens * -(-heads // HEADS)
    listed = -(-window // BLOCK) + -(-compressed // BLOCK)
    pages = costs.pages + tiles * (costs.pages_tile + listed * costs.pages_block)
    waves = tiles / costs.tiles  # not whole ones: their ends overlap with what comes next
    blocks = -(-(window + compressed) // BLOCK)
    rows = costs.rows + gathered * costs.gathered + waves * (costs.wave_tile + blocks * costs.wave_block)
    if compressed:
        pages, rows = pages + costs.pages_map, rows + costs.rows_map
    return "pages" if pages < rows else "rows"


def chunk_roads(
    metadata: DeepseekSparseSWAMetadata,
    compress_ratio: int,
    heads: int,
    topk: int | None,
    backend: str,
    layout: CacheLayout = DSV4_FP8,
    forced: str | None = None,
) -> Iterator[tuple[slice, int, int, str]]:
    """The chunks of a step's prefills and their roads, from host numbers alone.

    topk    rows that a token selects at most; None for one that takes all compressed rows
    forced  the road of all chunks, if not None

    Yields (prefills, N, M, road), N and M as in get_prefill_chunk_plan.
    """
    costs = COSTS.get((backend, layout.name))
    for start, end, n, m in metadata.get_prefill_chunk_plan(compress_ratio):
        prefills, road = slice(start, end), forced
        if road is None and costs is not None:
            tokens = int(np.sum(metadata.prefill_query_lens_cpu[prefills]))
            longest = int(np.max(metadata.prefill_seq_lens_cpu[prefills]))
            compressed = 0 if compress_ratio == 1 else longest // compress_ratio
            if topk is not None:
                compressed = min(compressed, topk)
            window = min(longest, metadata.config.window_size)
            road = cheaper_road(costs, tokens, heads, window, compressed, (end - start) * m)
        yield prefills, n, m, road or "rows"
