"""Every format of a cache: insert, gather and decode, and what decodes over V4.1's and bfloat16 rows must reach."""

from __future__ import annotations

import functools
from typing import Any

from ..layout import (
    DSV4_BF16,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    INDEXER_FP8,
    INDEXER_MXFP4,
    MLA_BF16,
    V32_FP8,
    V32_NOPE_FP8,
)
from .caches import DenseGather, Gather, Insert, KeyGather
from .sparse import with_slots

ROWS, REQUESTS, LENGTH = 1 << 15, 16, 8192
LATENTS = (DSV4_FP8, V32_FP8, V32_NOPE_FP8, DSV41_FP8, DSV41_FP8_SPLIT, DSV41_FP4, DSV41_FP4_SPLIT)
KEYS = (INDEXER_FP8, INDEXER_MXFP4)


def recorded() -> list[Any]:
    """Decodes of V4's rows attend to as many as V4.1's do."""
    v4, v32, v41, mla = (functools.partial(with_slots, layout) for layout in (DSV4_FP8, V32_FP8, DSV41_FP8, MLA_BF16))
    return [
        *(v41(64, b, 1, 128, 512, 32, lengths=True, ratio=2) for b in (1, 8, 32, 128)),
        *(v4(64, b, 1, 128, 512, 256, lengths=True, ratio=2) for b in (1, 8, 32, 128)),
        *(v41(heads, b, 1, 128, 512, 32, lengths=True, ratio=2) for heads in (8, 16) for b in (32, 128)),
        *(v4(heads, b, 1, 128, 512, 256, lengths=True, ratio=2) for heads in (8, 16) for b in (32, 128)),
        *(mla(128, b, 2, 2048, beside_portable=True) for b in (8, 64, 128)),
        *(v32(128, b, 2, 2048) for b in (8, 64, 128)),
        *(Insert(ROWS, layout) for layout in (*LATENTS, MLA_BF16, *KEYS)),
        *(Gather(REQUESTS, LENGTH, layout) for layout in (*LATENTS, DSV4_BF16)),
        DenseGather(REQUESTS, LENGTH),
        *(KeyGather(REQUESTS, LENGTH, layout) for layout in KEYS),
    ]
