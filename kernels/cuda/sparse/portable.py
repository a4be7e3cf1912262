"""Sizes of csrc/sm80/sparse: heads and keys that its kernels take at a time, by formats and shared memory.

heads64.cu has tiles of 64 heads, attention.cu smaller tiles; both read paged caches and gathered rows.
"""

from __future__ import annotations

from typing import NamedTuple

from ..constants import constant
from .formats import Formats, layout_macros

RESERVED_BYTES = 1024  # shared memory that an SM reserves per CTA


class Size(NamedTuple):
    """Heads of a tile, keys of a step, stages of the ring (both in tokens), CTAs per SM.

    Attributes:
        q_registers: registers of a score thread of heads64.cu that hold queries; other queries are in shared memory
    """

    heads: int
    keys: int
    stages: int
    blocks: int
    q_registers: int = 96

    @property
    def file(self) -> str:
        """Source of the kernel."""
        return f"sm80/sparse/{'heads64' if self.heads == 64 else 'attention'}.cu"

    @property
    def function(self) -> str:
        """Name of the kernel."""
        return "sparse_mla_mma_64" if self.heads == 64 else "sparse_mla_mma"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return constant(f"sm80/sparse/{'heads64_steps' if self.heads == 64 else 'rows'}.cuh", "THREADS")


# Sizes for each tile height, the fastest first (docs/kernels/portable.md).
SIZES = {
    64: (
        Size(64, 32, 4, 1),
        Size(64, 32, 3, 1),
        Size(64, 16, 4, 1),
        Size(64, 16, 4, 1, q_registers=112),
        Size(64, 16, 3, 1),
    ),
    32: (Size(32, 64, 3, 1), Size(32, 32, 3, 1), Size(32, 16, 3, 1)),
    16: (Size(16, 32, 3, 2), Size(16, 16, 3, 2), Size(16, 16, 3, 1)),
}


def choose(formats: Formats, heads: int, block_limit: int, multiprocessor_limit: int) -> Size:
    """The sizes for queries of `heads` heads, within the shared memory of a CTA and of an SM in bytes.

    Raises ValueError if no size fits.
    """
    highest = min((height for height in SIZES if height >= heads), default=64)
    for height in (height for height in SIZES if height <= highest):
        for size in SIZES[height]:
            needed = shared_bytes(formats, size)
            if needed <= block_limit and size.blocks * (needed + RESERVED_BYTES) <= multiprocessor_limit:
                return size
    raise ValueError(f"shared memory: got {block_limit} bytes a thread block, expected more for {formats[0].name}")


def macros(formats: Formats, size: Size) -> dict[str, str | int]:
    """The macros for the source of these sizes."""
    sizes: dict[str, str | int] = {"KEYS": size.keys, "STAGES": size.stages}
    if size.heads == 64:
        return {**layout_macros(formats), **sizes, "Q_REGISTERS": size.q_registers}
    return {**layout_macros(formats), **sizes, "TILE_HEADS": size.heads, "CTAS": size.blocks}


def shared_bytes(formats: Formats, size: Size) -> int:
    """Shared memory of a CTA of these sizes."""
    first, second = formats
    defines = macros(formats, size) | {"LAYOUT": first, "EXTRA_LAYOUT": second}
    return constant(f"sm80/sparse/{'heads64_' if size.heads == 64 else ''}scores.cuh", "SHARED_BYTES", **defines)
