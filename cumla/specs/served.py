"""Inputs of the sizes that a served model has: for warm-up, which makes each call to compile what it launches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..layout import CacheLayout
from .inputs import Inputs, Size, Step


class Served(Inputs):
    """Zeros, and lists without entries: a call takes no longer than its launches.

    Args:
        shared: arrays that the inputs of other sizes begin with, too: thousands of calls would take gigabytes
    """

    def __init__(self, backend: str, size: Size, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(backend, size)
        self.shared = {} if shared is None else shared

    def rows(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        return self.filled(0, shape, dtype)

    def keys(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        return self.rows(*shape, dtype=dtype)

    def logs(self, *shape: int) -> Any:
        return self.floats(*shape)

    def states(self, *shape: int) -> Any:
        return self.xp.zeros(shape, np.float32)

    def rotation(self, positions: int) -> Any:
        return self.filled(0, (max(positions, 1), 64), np.float32)

    def positions(self, count: int) -> Any:
        return self.filled(0, (count,), np.int64)

    def newest(self, end: int, *shape: int) -> np.ndarray:
        return np.full(shape, -1)

    def weights(self, *shape: int) -> Any:
        return self.filled(0, shape, np.uint8)

    def index_values(self, *shape: int) -> Any:
        return self.filled(0, shape, np.uint8)

    def index_weights(self, rows: int, heads: int) -> Any:
        return self.filled(0, (rows, heads), np.float32)

    def scales(self, *shape: int) -> Any:
        return self.filled(0, shape, np.float32)

    def ranges(self, rows: int, columns: int) -> tuple[Any, Any]:
        return self.context_lens(rows, 1), self.context_lens(rows, 1)

    def context_lens(self, requests: int, next_n: int) -> Any:
        return self.filled(0, (requests,), np.int32)

    def blocks(self, rows: int, count: int, end: int) -> Any:
        return self.filled(-1, (rows, count), np.int32)

    def filled(self, value: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array that is only read: the first rows of a shared one."""
        key, count = (value, shape[1:], np.dtype(dtype)), shape[0]
        if key not in self.shared or len(self.shared[key]) < count:
            longer = max(count, 2 * len(self.shared.get(key, ()))), *shape[1:]
            self.shared[key] = self.xp.full(longer, value, dtype) if value else self.xp.zeros(longer, dtype)
        return self.shared[key][:count]

    def unwritten(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        return self.xp.empty(shape, dtype)

    def new_cache(self, layout: CacheLayout) -> Any:
        return layout.allocate(self.size.pages, self.size.block_size, self.xp)

    def cache(self, layout: CacheLayout, block_size: int | None = None) -> Any:
        key = layout, self.size.pages, block_size or self.size.block_size
        if key not in self.shared:
            self.shared[key] = layout.allocate(*key[1:], self.xp)
        return self.shared[key]

    def slots(self, count: int, dtype: Any = np.int64) -> Any:
        return self.xp.arange(count, dtype=dtype)

    def new_slots(self, count: int) -> np.ndarray:
        return np.arange(count)

    def table(self, requests: int, positions: int) -> Any:
        return self.filled(0, (requests, -(-positions // self.size.block_size)), np.int32)

    def pairs(self, pages: int) -> Any:
        return self.filled(-1, (1, 2), np.int64)

    @functools.cached_property
    def step(self) -> Step:
        return Step(self.size.query_lens, self.size.query_lens, None)

    def longest(self, lens: np.ndarray) -> int:
        return self.size.context

    def valid(self, tokens: int) -> Any:
        return self.filled(0, (tokens,), np.bool_)

    def selected(self, visible: np.ndarray, columns: int) -> Any:
        return self.filled(-1, (len(visible), columns), np.int32)

    def entries(self, end: int, *shape: int) -> Any:
        return self.filled(-1, shape, np.int32)

    def used(self, most: int, *shape: int) -> Any:
        return self.filled(0, shape, np.int32)
