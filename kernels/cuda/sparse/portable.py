"""Sizes of csrc/sm80/sparse: heads and keys that its kernels take at a time, by formats and shared memory.

attention.cu takes all formats, decode and prefill; prefill.cu gathered rows for more than 32 heads.
"""

from __future__ import annotations

from typing import NamedTuple

from ....layout import CacheLayout
from .formats import Formats, layout_macros

THREADS, WARPS = 256, 8
STEP_BYTES, CURSOR_BYTES, STEPS_LISTED = 24, 64, 16  # Step and StepCursor of sm80/sparse/rows.cuh
PREFILL_THREADS = 384
PREFILL_TILES_BYTES = 4 * 40 + 16  # RowRing's tiles and range, of sm80/sparse/prefill_rows.cuh
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
        "SHARED_BYTES": prefill_shared_bytes(layout, size),
    }


def prefill_shared_bytes(layout: CacheLayout, size: Size) -> int:
    """The size of PrefillShared in csrc/sm80/sparse/prefill.cu, which asserts it."""
    heads, keys, stages, _ = size
    ring = _aligned(stages * keys * (2 * layout.head_dim + 16 + 4) + PREFILL_TILES_BYTES)
    weights, queries = 2 * heads * (2 * keys + 16), 2 * heads * (layout.head_dim - 4 * PREFILL_Q_REGISTERS)
    return _aligned(ring + weights + queries + 4 * (4 * heads + 3))


def macros(formats: Formats, size: Size) -> dict[str, str | int]:
    """The macros for csrc/sm80/sparse/attention.cu."""
    return {
        **layout_macros(formats),
        "TILE_HEADS": size.heads,
        "KEYS": size.keys,
        "STAGES": size.stages,
        "CTAS": size.blocks,
        "SHARED_BYTES": shared_bytes(formats, size),
    }


def shared_bytes(formats: Formats, size: Size) -> int:
    """The size of SparseShared in csrc/sm80/sparse/scores.cuh, which asserts it."""
    heads, keys, stages, _ = size
    tokens, head_dim = stages * keys, formats[0].head_dim
    row_stride = (max(map(_ring_row_bytes, formats)) + 31) // 64 * 64 + 32
    scales = max(x.num_scales for x in formats)
    bookkeeping = STEPS_LISTED * STEP_BYTES + CURSOR_BYTES + 8
    ring = _aligned(tokens * (row_stride + 4 * (1 + max(scales, 1) + 1)) + bookkeeping)
    operands = heads * (2 * head_dim + 16) + 2 * heads * (2 * keys + 16)
    warps_of_keys = min(keys // 8, WARPS // min(heads // 16, 2))
    return _aligned(ring + operands + 4 * heads * (2 * warps_of_keys + 2))


def _ring_row_bytes(layout: CacheLayout) -> int:
    """Bytes of a row in the ring, where rows of fine scales are expanded to a byte a value."""
    return max(layout.token_bytes, layout.quantized_dim if layout.has_fine_scales else 0)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
