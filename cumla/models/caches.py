"""The paged caches of one layer, and the formats that they come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ..dispatch.values import check_integers
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

CacheFormat = Literal["fp8", "bfloat16", "float32"]
PLAIN_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype("f4")}


@dataclass(frozen=True)
class Formats:
    """What rows are kept as: those of attention in V4 and V3.2, and the indexer's keys."""

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
    """A zeroed cache: bytes of an FP8 layout, or rows of numbers, [num_blocks, block_size, ..]."""
    check_integers(0, num_blocks=num_blocks)
    check_integers(1, block_size=block_size)
    if layout.value_type == "e4m3":
        return layout.allocate(num_blocks, block_size, xp)
    return xp.zeros((num_blocks, block_size, layout.head_dim), PLAIN_DTYPES[layout.value_type])
