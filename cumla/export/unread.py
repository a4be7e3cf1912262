"""Arrays of the calls that are recorded: shapes and types, without contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..specs.inputs import Size
from ..specs.served import Served

MOST_PAGES, LEAST_PAGES = 1 << 20, 2  # of a cache


class Unread(Served):
    """Arrays of a size whose contents nothing reads or writes."""

    def __init__(self, size: Size, shared: dict[Any, Any]) -> None:
        super().__init__("reference", size, shared)

    def resized(self, **sizes: int) -> Unread:
        return type(self)(replace(self.size, **sizes), self.shared)  # type: ignore[arg-type]

    def in_rings(self) -> Rings:
        """The same, with states in a ring for each request."""
        return Rings(self.size, self.shared)

    def widened(self, table: Any, columns: int) -> Any:
        """A table with these columns."""
        return np.empty((len(table), columns), table.dtype)

    def filled(self, value: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def e4m3(self, *shape: int, end: int = 0x7F) -> Any:
        return self.filled(0, shape, np.uint8)

    def unwritten(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        return self.filled(0, shape, dtype)

    def states(self, *shape: int) -> Any:
        """Pages of states, of any number."""
        return np.broadcast_to(np.float32(0), (self.pages(), *shape[1:]))

    def new_cache(self, layout: Any) -> Any:
        return self.cache(layout)

    def cache(self, layout: Any, block_size: int | None = None) -> Any:
        """A cache of any number of pages: its shape alone matters."""
        key = layout, block_size or self.size.block_size
        if key not in self.shared:
            self.shared[key] = layout.allocate(1, key[1], np)
        page = self.shared[key]
        return np.broadcast_to(page, (self.pages(), *page.shape[1:]))

    def pages(self) -> int:
        """Pages of the next cache: the caches of a call have different numbers."""
        self.caches = getattr(self, "caches", 0) + 1
        if self.caches == 1 or self.size.pages in (LEAST_PAGES, MOST_PAGES):
            return self.size.pages
        return LEAST_PAGES + (self.size.pages - LEAST_PAGES) * 7919 * self.caches % (MOST_PAGES - LEAST_PAGES + 1)


class Rings(Unread):
    """The same, with states in a ring for each request."""

    def states(self, *shape: int) -> Any:
        return np.empty(shape, np.float32)
