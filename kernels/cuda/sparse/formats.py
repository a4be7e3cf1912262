"""The formats of a call's two caches, as macros for the attention kernels."""

from __future__ import annotations

from typing import Any

from ....layout import (
    DSV4_BF16,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    MLA_BF16,
    V32_FP8,
    V32_NOPE_FP8,
    CacheLayout,
)

Formats = tuple[CacheLayout, CacheLayout]  # formats of the first and second list's cache; equal for one list
SLICE = 64  # values of a row that the kernels multiply at a time
# Formats of csrc/sm90/decode: e4m3 or e2m1 values with a tail of one slice or none, or bfloat16 in tiles of 64 heads.
HOPPER_BF16 = (DSV4_BF16, MLA_BF16)
LATENT = (V32_FP8, V32_NOPE_FP8, MLA_BF16)  # formats whose first list is a selection; of others it is a window
HOPPER = (DSV4_FP8, V32_FP8, V32_NOPE_FP8, DSV41_FP8, DSV41_FP4, DSV41_FP8_SPLIT, DSV41_FP4_SPLIT, *HOPPER_BF16)


def has_whole_slices(layout: CacheLayout) -> bool:
    """Whether fast kernels support the format: its quantised values and its 16-bit tail are multiples of a slice."""
    return layout.head_dim % SLICE == 0 and layout.quantized_dim % SLICE == 0


def layout_macros(formats: Formats) -> dict[str, str | int]:
    """LAYOUT, and EXTRA_LAYOUT if the second cache has another format."""
    first, second = formats
    return {"LAYOUT": first.name, **({"EXTRA_LAYOUT": second.name} if second.name != first.name else {})}


def exact_macros(formats: Formats, aligned: bool, heads: int, combines: bool) -> dict[str, Any]:
    """The macros for csrc/common/sparse/exact.cu; `combines`: whether calls may have split tiles."""
    follows = all(has_whole_slices(x) and not x.has_fine_scales for x in formats)
    more = {"COMBINES": int(combines), **({} if follows else {"FLOAT64_ONLY": 1})}
    return {**layout_macros(formats), "ALIGNED": int(aligned), "TILE_HEADS": heads, **more}
