"""The path of a chunk of prefills: attention over the pages of the caches, or over rows gathered from them first.

The pages path gathers nothing and needs no workspace, but dequantises rows again for every token that attends to them.
The gathered path first dequantises all rows that a request's tokens reach to bfloat16, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..kernels.types.metadata import C128A_RATIO
from ..layout import DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, V32_FP8, CacheLayout
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata

PATHS = ("pages", "rows")
HEADS, BLOCK = 64, 64  # heads of a tile, keys of a block
# Time of a last wave of few tiles relative to a full wave: its tiles wait less for rows. And us that prefill tokens add
# to the decodes' call, apart from their blocks, with the launch that maps rows to slots (docs/kernels/layer.md).
LAST_WAVE, TAKEN_ALONG = 0.45, 5.0


class Chunk(NamedTuple):
    """A chunk of prefills.

    Attributes:
        prefills: slice of the step's prefills
        n, m: as in get_prefill_chunk_plan
        path: "pages" or "rows"
        ahead: its first tokens that may attend over pages in the call of the step's decodes: with "pages" all tokens,
            with "rows" the tokens whose tiles would fill only part of a last wave
    """

    prefills: slice
    n: int
    m: int
    path: str
    ahead: int


@dataclass(frozen=True)
class Costs:
    """Measured times of a chunk on a backend, in us. A tile is 64 heads of a token, a block 64 keys of a tile.

    Attributes:
        pages: fixed time of a chunk over pages
        pages_map: time to map compressed rows to slots, if there are any
        pages_tile, pages_block: time of a tile's start and end and of a block, with all multiprocessors busy
        rows: fixed time of a chunk over gathered rows: a gather, indices, attention
        rows_map: time to gather compressed rows and to list them, if there are any
        gathered: time of a gathered row
        wave_tile: time of the start and end of a wave, one tile on each multiprocessor
        wave_block: time of one block of each of these tiles
        tiles: tiles of a wave
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


# Measured on an H200 (docs/kernels/layer.md), except V4.1's prefill: it has DSV4_FP8's costs, but for a block over
# pages, whose time is from decodes of 128 tokens, which take 46 us where DSV4_FP8 takes 35.
DSV4_COSTS = Costs(
    pages=10, pages_map=8, pages_tile=0.0271, pages_block=0.0153, rows=32, rows_map=26, gathered=0.0005,
    wave_tile=3.85, wave_block=1.575, tiles=132,
)  # fmt: skip
DSV41_COSTS = replace(DSV4_COSTS, pages_block=0.024)
V32_COSTS = Costs(
    pages=10, pages_map=40, pages_tile=0.0271, pages_block=0.0162, rows=20, rows_map=40, gathered=0.0014,
    wave_tile=3.85, wave_block=1.78, tiles=132,
)  # fmt: skip
# By backend and format of the first cache. Other backends and layouts gather.
COSTS = {
    ("cuda", DSV4_FP8.name): DSV4_COSTS, ("cuda", V32_FP8.name): V32_COSTS,
    ("cuda", DSV41_FP8.name): DSV41_COSTS, ("cuda", DSV41_FP8_SPLIT.name): DSV41_COSTS,
}  # fmt: skip
# Costs for at most this many heads (docs/kernels/layer.md): a tile over pages costs less.
FEW_HEADS = {
    ("cuda", DSV4_FP8.name): {
        16: replace(DSV4_COSTS, pages_tile=0.0154, pages_block=0.0104, wave_tile=0.8, wave_block=1.15),
        32: replace(DSV4_COSTS, pages_tile=0.0245, pages_block=0.0115, wave_tile=1.8, wave_block=1.15),
    }
}


def costs_of(backend: str, layout: CacheLayout, heads: int) -> Costs | None:
    """The costs of a chunk with `heads` heads; None if not measured."""
    by_heads = FEW_HEADS.get((backend, layout.name), {})
    return by_heads.get(min((most for most in by_heads if heads <= most), default=0), COSTS.get((backend, layout.name)))


def cheaper_path(costs: Costs, tokens: int, heads: int, window: int, compressed: int, gathered: int) -> str:
    """The faster path for `tokens` tokens.

    Args:
        window, compressed: rows that each token attends to
        gathered: rows that the gathered path would gather
    """
    tiles = tokens * -(-heads // HEADS)
    listed = -(-window // BLOCK) + -(-compressed // BLOCK)
    pages = costs.pages + tiles * (costs.pages_tile + listed * costs.pages_block)
    waves = tiles / costs.tiles  # a fraction: the end of a wave overlaps with the next one
    blocks = -(-(window + compressed) // BLOCK)
    rows = costs.rows + gathered * costs.gathered + waves * (costs.wave_tile + blocks * costs.wave_block)
    if compressed:
        pages, rows = pages + costs.pages_map, rows + costs.rows_map
    return "pages" if pages < rows else "rows"


def tokens_of_a_last_wave(costs: Costs, tokens: int, heads: int, window: int, compressed: int) -> int:
    """First tokens of a chunk over gathered rows to attend over pages, so that the rest fills whole waves.

    Args:
        window, compressed: rows that each of these tokens attends to

    0 unless these tokens cost less over pages, in the call of the step's decodes, which is launched anyway.
    """
    each = -(-heads // HEADS)
    taken = -(-(tokens * each % costs.tiles) // each)
    if taken >= tokens or not taken or heads < HEADS:
        return 0
    listed = -(-window // BLOCK) + -(-compressed // BLOCK)
    pages = TAKEN_ALONG + taken * each * (costs.pages_tile + listed * costs.pages_block)
    wave = costs.wave_tile + -(-(window + compressed) // BLOCK) * costs.wave_block
    return taken if pages < LAST_WAVE * wave else 0


def first_tokens(decodes: int, compress_ratio: int, chunks: Sequence[Chunk]) -> int:
    """Tokens of a step that attend in one call over pages: its decodes, and prefills that follow them.

    Prefills follow only if there are decodes, and not in C128A layers, whose prefill rows are not listed by slots.
    """
    if not decodes or compress_ratio == C128A_RATIO:
        return decodes
    for chunk in chunks:
        decodes += chunk.ahead
        if chunk.path != "pages":
            break
    return decodes


def chunk_paths(
    metadata: DeepseekSparseSWAMetadata,
    compress_ratio: int,
    heads: int,
    topk: int | None,
    backend: str,
    layout: CacheLayout = DSV4_FP8,
    forced: str | None = None,
) -> Iterator[Chunk]:
    """The chunks of a step's prefills and their paths, from host values only.

    Args:
        topk: most rows that a token selects; None: tokens attend to all compressed rows
        forced: the path of all chunks; their tokens then do not attend in the decodes' call. None: the faster path
    """
    costs = costs_of(backend, layout, heads)
    has_compressed = metadata.config.has_compressed_rows(compress_ratio)
    for start, end, n, m in metadata.get_prefill_chunk_plan(compress_ratio, has_compressed=has_compressed):
        prefills, path, ahead = slice(start, end), forced, 0
        if path is None and costs is not None and topk is None and has_compressed and heads < HEADS:
            path = "pages"  # 16 heads, 400 rows of C128A: 247 us, over gathered rows 372; 32 heads 291 and 570
        if forced is None and costs is not None:
            tokens = int(np.sum(metadata.prefill_query_lens_cpu[prefills]))
            longest = int(np.max(metadata.prefill_seq_lens_cpu[prefills]))
            compressed = longest // compress_ratio if has_compressed else 0
            if topk is not None:
                compressed = min(compressed, topk)
            window = min(longest, metadata.config.window_size)
            path = path or cheaper_path(costs, tokens, heads, window, compressed, (end - start) * m)
            ahead = tokens
            if path != "pages":
                seen = int(metadata.prefill_seq_lens_cpu[start] - metadata.prefill_query_lens_cpu[start])
                first = min(seen, window), min(seen // max(compress_ratio, 1), compressed)
                ahead = tokens_of_a_last_wave(costs, tokens, heads, *first)
        yield Chunk(prefills, n, m, path or "rows", ahead)
