"""Sizes of csrc/sm80/sparse: heads and keys that its kernels take at a time, by formats and shared memory.

attention.cu takes all formats, decode and prefill; prefill.cu gathered rows for more than 32 heads.
"""

from __future__ import annotations

from typing import NamedTuple

from ....layout import CacheLayout
from ..constants import constant
from .formats import Formats, layout_macros

THREADS = constant("sm80/sparse/rows.cuh", "THREADS")
PREFILL_THREADS = constant("sm80/sparse/prefill_rows.cuh", "THREADS")
PREFILL_Q_REGISTERS = 96  # of a thread of the scores
RESERVED_BYTES = 1024  # of an SM's shared memory, per CTA


class Size(NamedTuple):
    """heads of a tile, keys of a step, stages of the ring (both in tokens), CTAs per SM."""

    heads: int
    keys: int
    stages: int
    blocks: int


# The fastest first, for each height (docs/kernels/portable.md).
SIZES = {
    64: (Size(64, 64, 3, 1), Size(64, 32, 3, 1), Size(64, 16, 3, 1)),
    32: (Size(32, 64, 3, 1), Size(32, 32, 3, 1), Size(32, 16, 3, 1)),
    16: (Size(16, 32, 3, 2), Size(16, 16, 3, 2), Size(16, 16, 3, 1)),
}


def choose(formats: Formats, heads: int, block_limit: int, multiprocessor_limit: int) -> Size:
    """The sizes for queries of `heads` heads, within the shared memory of a CTA and of an SM in bytes.

    Raises ValueError if there is too little for any size.
    """
    highest = min((height for height in SIZES if height >= heads), default=64)
    for height in (height for height in SIZES if height <= highest):
        for size in SIZES[height]:
            needed = shared_bytes(formats, size)
            if needed <= block_limit and size.blocks * (needed + RESERVED_BYTES) <= multiprocessor_limit:
                return size
    raise ValueError(f"shared memory: got {block_limit} bytes a thread block, expected more for {formats[0].name}")


# Sizes of prefill.cu, the fastest first.
PREFILL_SIZES = (Size(64, 32, 4, 1), Size(64, 32, 3, 1), Size(64, 16, 4, 1), Size(64, 16, 3, 1))
PREFILL_MOST_OTHERS = 32  # heads up to which prefill takes attention.cu


def choose_for_prefill(layout: CacheLayout, heads: int, block_limit: int) -> Size | None:
    """The sizes of prefill.cu for gathered rows within the shared memory of a CTA; None: take attention.cu."""
    fitting = (size for size in PREFILL_SIZES if prefill_shared_bytes(layout, size) <= block_limit)
    return next(fitting, None) if heads > PREFILL_MOST_OTHERS else None


def prefill_macros(layout: CacheLayout, size: Size) -> dict[str, str | int]:
    """The macros for csrc/sm80/sparse/prefill.cu."""
    return {
        "LAYOUT": layout.name,
        "KEYS": size.keys,
        "STAGES": size.stages,
        "Q_REGISTERS": PREFILL_Q_REGISTERS,
    }


def prefill_shared_bytes(layout: CacheLayout, size: Size) -> int:
    """Shared memory of csrc/sm80/sparse/prefill.cu."""
    given = prefill_macros(layout, size) | {"LAYOUT": layout}
    return constant("sm80/sparse/prefill_scores.cuh", "SHARED_BYTES", **given)


def macros(formats: Formats, size: Size) -> dict[str, str | int]:
    """The macros for csrc/sm80/sparse/attention.cu."""
    return {
        **layout_macros(formats),
        "TILE_HEADS": size.heads,
        "KEYS": size.keys,
        "STAGES": size.stages,
        "CTAS": size.blocks,
    }


def shared_bytes(formats: Formats, size: Size) -> int:
    """Shared memory of csrc/sm80/sparse/attention.cu."""
    first, second = formats
    given = macros(formats, size) | {"LAYOUT": first, "EXTRA_LAYOUT": second}
    return constant("sm80/sparse/scores.cuh", "SHARED_BYTES", **given)
