"""Arrays of random numbers for the cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dispatch.backends import array_module
from ..dispatch.call import BFLOAT16
from ..layout import CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache

BLOCK, NUM_BLOCKS, HEADS = 5, 7, 3
QUERY_LENS, SEQ_LENS = (1, 1, 4), (13, 2, 19)


class Bench:
    """The environment of a case: a backend, its arrays, and random values that are the same for every backend."""

    def __init__(self, backend: str, seed: int, heads: int = HEADS) -> None:
        self.backend, self.heads = backend, heads
        self.xp = array_module(backend)
        self.rng = np.random.default_rng(seed)

    def put(self, array: Any, dtype: Any = None) -> Any:
        return self.xp.asarray(np.asarray(array, dtype))

    def normal(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        """Heavy-tailed values."""
        return self.put(self.heavy_tailed(*shape).astype(dtype))

    def heavy_tailed(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape) * np.exp(self.rng.standard_normal(shape) / 2)

    def small(self, *shape: int) -> Any:
        """Values of a magnitude for which the bounds of attention hold."""
        return self.put(0.1 * self.rng.standard_normal(shape), BFLOAT16)

    def indices(self, end: int, *shape: int) -> Any:
        """int32 from -2 to end, absent ones included."""
        return self.put(self.rng.integers(-2, end + 1, shape), np.int32)

    def cache(self, layout: CacheLayout) -> Any:
        """A cache of random rows in random order."""
        pages = np.zeros((NUM_BLOCKS, layout.page_bytes(BLOCK)), np.uint8)
        cache = layout.view(pages, BLOCK)
        rows = self.heavy_tailed(NUM_BLOCKS * BLOCK, layout.head_dim).astype(BFLOAT16)
        if layout.quantized_dim:
            slots = self.rng.permutation(len(rows))
            quantize_and_insert_k_cache(rows, cache, slots, BLOCK, layout=layout, backend="reference")
        else:
            cache[...] = rows.view(np.uint8).reshape(cache.shape)
        return layout.view(self.put(pages), BLOCK)

    def starts(self, lens: Sequence[int]) -> Any:
        """int32: the start of each of consecutive ranges of these lengths, and the end of the last."""
        return self.put(np.cumsum([0, *lens]), np.int32)

    def batch(self) -> dict[str, Any]:
        """Two decodes and a prefill, as arrays by name."""
        blocks = self.rng.permutation(3 * NUM_BLOCKS)[: 3 * 4].reshape(3, 4) % NUM_BLOCKS
        return {
            "query_start_loc": self.starts(QUERY_LENS),
            "seq_lens": self.put(SEQ_LENS, np.int32),
            "token_to_req_indices": self.put(np.repeat(np.arange(3), QUERY_LENS), np.int32),
            "is_valid_token": self.put([True, False, True, True, True, True]),
            "block_table": self.put(blocks, np.int32),
        }
