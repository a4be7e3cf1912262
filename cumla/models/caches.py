"""The paged caches of one layer, and their formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ..dispatch.values import check_choice, check_integers, check_kind, check_optional_size
from ..layout import (
    DSV4_BF16,
    DSV4_F32,
    DSV4_FP8,
    INDEXER_BF16,
    INDEXER_F32,
    INDEXER_FP8,
    MLA_BF16,
    MLA_F32,
    V32_FP8,
    CacheLayout,
)
from ..metadata.builder import ServingConfig
from .step import STATE_BLOCK_SIZES
from .v4_config import HEAD_DIM

CacheFormat = Literal["fp8", "bfloat16", "float32"]
PLAIN_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype("f4")}


@dataclass(frozen=True)
class Formats:
    """The layouts of the caches: of attention's rows in V4 and V3.2, and of the indexer's keys."""

    v4: CacheLayout
    v32: CacheLayout
    indexer: CacheLayout


FORMATS: dict[str, Formats] = {
    "fp8": Formats(DSV4_FP8, V32_FP8, INDEXER_FP8),
    "bfloat16": Formats(DSV4_BF16, MLA_BF16, INDEXER_BF16),
    "float32": Formats(DSV4_F32, MLA_F32, INDEXER_F32),
}


def formats(cache_format: str) -> Formats:
    """Raises ValueError for another name."""
    if cache_format not in FORMATS:
        raise ValueError(f"cache_format: got {cache_format!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[cache_format]


def allocate(layout: CacheLayout, num_blocks: int, block_size: int, xp: Any) -> Any:
    """A zeroed cache: bytes of an FP8 layout, or rows of 16- or 32-bit values, [num_blocks, block_size, ..]."""
    check_integers(0, num_blocks=num_blocks)
    check_integers(1, block_size=block_size)
    if layout.value_type == "e4m3":
        return layout.allocate(num_blocks, block_size, xp)
    return xp.zeros((num_blocks, block_size, layout.head_dim), PLAIN_DTYPES[layout.value_type])


@dataclass(frozen=True)
class DeepseekV4Caches:
    """What one layer keeps of its requests, in pages.

    window         [num_blocks, block_size, 584] uint8 (or [.., 512] numbers)
    compressed     the same of compressed rows; None at ratio 1, as are the next
    state          float32 [state_blocks, state_block_size, 2 * coff * 512], of the compressor
    indexer        [compressed_blocks, compressed_block_size / 4, 132] uint8 (or [.., 128] numbers); ratio 4 alone
    indexer_state  float32 [state_blocks, state_block_size, 512], of the indexer's compressor; ratio 4 alone
    """

    window: Any
    compressed: Any = None
    state: Any = None
    indexer: Any = None
    indexer_state: Any = None

    @classmethod
    def allocate(
        cls,
        compress_ratio: int,
        serving: ServingConfig,
        blocks: int,
        compressed_blocks: int = 0,
        state_blocks: int = 0,
        cache_format: CacheFormat = "fp8",
        xp: Any = np,
        state_block_size: int | None = None,
    ) -> DeepseekV4Caches:
        """Zeroed caches: pages of serving.block_size positions, of serving.compressed_block_size, and of states.

        cache_format  "fp8", "bfloat16", or on the host "float32"
        """
        check_choice((1, 4, 128), compress_ratio=compress_ratio)
        check_kind(ServingConfig, serving=serving)
        check_optional_size(state_block_size=state_block_size)
        layouts = formats(cache_format)
        window = allocate(layouts.v4, blocks, serving.block_size, xp)
        if compress_ratio == 1:
            return cls(window)
        rows, overlap = serving.compressed_block_size // compress_ratio, compress_ratio == 4
        block = state_block_size or STATE_BLOCK_SIZES[compress_ratio]

        def states(dim: int) -> Any:
            return xp.zeros((state_blocks, block, (4 if overlap else 2) * dim), np.float32)

        check_integers(0, compressed_blocks=compressed_blocks, state_blocks=state_blocks)
        compressed = allocate(layouts.v4, compressed_blocks, rows, xp)
        if not overlap:
            return cls(window, compressed, states(HEAD_DIM))
        keys = allocate(layouts.indexer, compressed_blocks, rows, xp)
        return cls(window, compressed, states(HEAD_DIM), keys, states(layouts.indexer.head_dim))


@dataclass(frozen=True)
class DeepseekV32Caches:
    """What one layer keeps of its requests, in pages of the same block table.

    rows     [num_blocks, block_size, 656] uint8 (or [.., 576] numbers)
    indexer  [num_blocks, block_size, 132] uint8 (or [.., 128] numbers), keys
    """

    rows: Any
    indexer: Any

    @classmethod
    def allocate(
        cls, blocks: int, block_size: int = 64, cache_format: CacheFormat = "fp8", xp: Any = np
    ) -> DeepseekV32Caches:
        """Zeroed caches. cache_format  "fp8", "bfloat16", or on the host "float32"."""
        layouts = formats(cache_format)
        return cls(
            allocate(layouts.v32, blocks, block_size, xp),
            allocate(layouts.indexer, blocks, block_size, xp),
        )
