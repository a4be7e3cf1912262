"""Caches for tests: of any layout, page stride and alignment, between sentinels."""

import numpy as np

import cumla
from support.guarded import Guarded
from support.lab import BF16

FP8_LAYOUTS = (
    cumla.DSV4_FP8, cumla.V32_FP8, cumla.INDEXER_FP8, cumla.DSV41_FP8, cumla.DSV41_FP8_SPLIT, cumla.V32_NOPE_FP8,
)  # fmt: skip
FP4_LAYOUTS = (cumla.DSV41_FP4, cumla.DSV41_FP4_SPLIT, cumla.INDEXER_MXFP4)
QUANTIZED_LAYOUTS = (*FP8_LAYOUTS, *FP4_LAYOUTS)
BLOCK_SIZES = (1, 2, 53, 64, 256)
CACHE_GAPS = (0, 1, 16, 576)  # bytes between pages, in addition to the layout's padding


class GuardedCache:
    """Random bytes as a cache.

    Attributes:
        bytes: the page bytes that tokens use, on the lab's side; `array` is the same as [num_blocks, block_size, ...]
    """

    def __init__(self, lab, layout, num_blocks, block_size, content, gap=0, offset=0):
        self.layout, self.block_size = layout, block_size
        padding = layout.page_bytes(block_size) - block_size * layout.token_bytes
        self.memory = Guarded(lab, content, (0, padding + gap), offset)
        pages = self.memory.array
        shape = (num_blocks, block_size, layout.token_bytes)
        strides = (pages.strides[0], layout.token_bytes, 1)
        if isinstance(pages, np.ndarray):
            self.array = np.lib.stride_tricks.as_strided(pages, shape, strides)
        else:
            self.array = type(pages)(shape, pages.dtype, pages.data, strides)

    def everything(self):
        """All memory; every NaN among the 16-bit values is replaced by the same NaN."""
        raw = self.memory.everything()
        pages = self.memory.view_of(raw)
        layout = self.layout
        if layout.quantized_dim < layout.head_dim:
            for row in range(self.block_size):
                start = row * layout.row_bytes + (layout.rope_offset if layout.quantized_dim else 0)
                stop = start + 2 * (layout.head_dim - layout.quantized_dim)
                words = np.ascontiguousarray(pages[:, start:stop]).view(np.uint16)
                dtype = np.float16 if layout.value_type == "float16" else BF16
                words[np.isnan(words.view(dtype).astype(np.float32))] = 0x7FFF
                pages[:, start:stop] = words.view(np.uint8)
        return raw


def pair_of_caches(lab, reference, rng, layout, num_blocks, block_size, gap=0, offset=0):
    """The same cache for a backend and for the reference."""
    content = rng.integers(0, 256, (num_blocks, block_size * layout.token_bytes), np.uint8)
    return [GuardedCache(x, layout, num_blocks, block_size, content, gap, offset) for x in (lab, reference)]
