"""Inputs of the size that steps have: for benchmarks and the soak."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..arrays.memory import to_host
from ..dispatch import backends
from ..dispatch.call import BFLOAT16
from ..layout import INDEXER_FP8, CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache
from .inputs import Inputs, Size, Step

MOST_VALUES = 1 << 20  # random values, which larger arrays repeat
HOST_ROWS, DEVICE_ROWS = 1 << 10, 1 << 16  # random rows, which a cache repeats; of index keys
KEYS_FOR_ROWS = 16  # so many times that: scores of equal keys are equal
IN_ORDER = 4096  # inserts of at least this number of rows fill pages in order, as prompts do
WINDOW = 128
STAYS = 10  # tokens that an entry of a list stays for, so that the lists of neighbours overlap by 90%


class RepeatingCache(NamedTuple):
    """A large cache, the pages that it repeats on the host, and the largest magnitude of their rows."""

    array: Any
    base: np.ndarray
    largest: float

    @property
    def slots(self) -> int:
        return int(self.array.shape[0] * self.array.shape[1])

    def in_base(self, slots: np.ndarray) -> np.ndarray:
        """The slots of the base that hold what `slots` hold; -1 stays."""
        return np.where(slots < 0, slots, slots % (self.base.shape[0] * self.base.shape[1]))


class Measured(Inputs):
    """Large arrays; lists and lengths as layers make them."""

    def rows(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        count, dtype = int(np.prod(shape)), np.dtype(dtype)
        values = self.put(self.rng.standard_normal(min(count, MOST_VALUES), np.float32).astype(dtype))
        if count <= MOST_VALUES:
            return values.reshape(shape)
        return self.xp.resize(values.view(f"u{dtype.itemsize}"), shape).view(dtype)

    def keys(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        return self.rows(*shape, dtype=dtype)

    def logs(self, *shape: int) -> Any:
        return self.floats(*shape)

    def weights(self, *shape: int) -> Any:
        """Numbers from -1.75 to 1.75."""
        count = int(np.prod(shape))
        rng = self.xp.random.default_rng(int(self.rng.integers(2**31))) if count > MOST_VALUES else self.rng
        bits = rng.integers(0, 1 << 16, shape, np.uint32)
        return self.xp.asarray(((bits & 0x80) | (bits >> 8) % 0x3E).astype(np.uint8))

    def index_values(self, *shape: int) -> Any:
        return self.weights(*shape)

    def scores(self, rows: int, columns: int) -> Any:
        rng = self.xp.random.default_rng(int(self.rng.integers(2**31)))
        return rng.standard_normal((rows, columns), np.float32)

    def ranges(self, rows: int, columns: int) -> tuple[Any, Any]:
        """Every column; with `lengths`, each row sees one more than the row before."""
        ends = np.full(rows, columns, np.int32)
        if self.size.lengths:
            ends -= np.arange(min(rows, columns))[::-1].astype(np.int32)
        return self.xp.zeros(rows, np.int32), self.put(ends)

    def context_lens(self, requests: int, next_n: int) -> Any:
        ends = np.full(requests, self.size.context)
        if self.size.lengths:
            ends = np.maximum(contexts(self.rng, requests, self.size.context), next_n)
        return self.put(ends[:, None] - np.arange(next_n)[::-1], np.int32)

    def blocks(self, rows: int, count: int, end: int) -> Any:
        found, selected = np.full((rows, count), -1, np.int32), min(count, end)
        found[:, :selected] = np.sort([self.rng.choice(end, selected, replace=False) for _ in range(rows)])
        return self.put(found)

    def unwritten(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        return self.xp.empty(shape, dtype)

    def new_cache(self, layout: CacheLayout) -> Any:
        cache = layout.allocate(self.size.pages, self.size.block_size, self.xp)
        return cache if layout.num_scales else cache.view(BFLOAT16)

    def cache(self, layout: CacheLayout, block_size: int | None = None) -> Any:
        return self.repeating(layout, block_size).array

    def repeating(self, layout: CacheLayout, block_size: int | None = None) -> RepeatingCache:
        """The cache with what it repeats."""
        slots = self.size.pages * self.size.block_size
        return repeating_cache(self.backend, layout, block_size or self.size.block_size, slots)

    def slots(self, count: int, dtype: Any = np.int64) -> Any:
        """Of decodes, each in a page anywhere, or of prompts, which fill pages."""
        pages, block_size = self.size.pages, self.size.block_size
        if count < IN_ORDER:
            return self.put(self.rng.permutation(pages * block_size)[:count], dtype)
        of_page = self.rng.permutation(pages)[:, None] * block_size
        return self.put((of_page + np.arange(block_size)).reshape(-1)[:count], dtype)

    def table(self, requests: int, positions: int) -> Any:
        """Different pages, where there are enough."""
        columns, pages = -(-positions // self.size.block_size), self.size.pages
        if requests * columns > pages:
            return self.put(self.rng.integers(0, pages, (requests, columns)), np.int32)
        return self.put(self.rng.permutation(pages)[: requests * columns].reshape(requests, columns), np.int32)

    def pairs(self, pages: int) -> Any:
        return self.put(self.rng.permutation(pages // 2 * 2).reshape(-1, 2))

    @functools.cached_property
    def step(self) -> Step:
        size, query_lens = self.size, self.size.query_lens
        before = np.full(size.requests, size.context) + np.arange(size.requests) % size.stagger
        if size.lengths:
            before = contexts(self.rng, size.requests, size.context)
        lens = (before + query_lens).astype(np.int32)
        gathered = None
        if size.tokens:
            gathered = query_lens + np.minimum(before, size.window - 1)  # its tokens and a window before them
        elif size.lengths:  # of a chunk of a quarter of the context
            gathered = np.minimum(lens, lens // 4 + WINDOW - 1)
        return Step(query_lens, lens, gathered)

    def valid(self, tokens: int) -> Any:
        return self.xp.ones(tokens, np.bool_)

    def selected(self, visible: np.ndarray, columns: int) -> Any:
        """As an indexer selects them, neighbours nearly the same; of full lists any, one in a hundred absent."""
        if self.size.lengths:
            several = len(visible) > self.size.requests
            return self.put(selected_rows(self.rng, visible, columns, neighbours=several))
        found = self.rng.integers(0, visible[:, None], (len(visible), columns), np.int32)
        return self.put(np.where(self.rng.integers(0, 101, found.shape, np.int8) == 0, -1, found))

    def entries(self, end: int, *shape: int) -> Any:
        return self.integers(end, *shape)

    def cached(self) -> Any:
        return self.put(self.step.seq_lens, np.int32)

    def slot_lists(self, queries: int, width: int, slots: int, block_size: int, ratio: int) -> tuple[Any, Any]:
        """The same lists for all queries of a request; full lists are any slots, without lengths."""
        size = self.size
        if not size.lengths:
            return self.integers(slots, size.requests, queries, width), None
        lens = self.step.seq_lens
        if ratio:
            rows = lens // ratio if ratio < WINDOW else np.minimum(lens // ratio, width)
            local = selected_rows(self.rng, rows, width)
            pages = self.rng.integers(
                0, slots // block_size, (size.requests, int(lens.max()) // ratio // block_size + 1)
            )
            first = np.take_along_axis(pages, np.maximum(local, 0) // block_size, axis=1) * block_size
            found = np.where(local < 0, -1, first + local % block_size)
        else:
            found = window_lists(self.rng, lens, width, slots, block_size)
        lists = np.repeat(found[:, None], queries, axis=1)
        return self.put(lists, np.int32), self.put((found >= 0).sum(axis=1), np.int32)

    def row_lists(self, windows: bool) -> tuple[Any, Any]:
        """Of a chunk at the end of a context: tokens see what is before them; full lists are any, without lengths."""
        size, window = self.size, self.size.window if windows else 0
        if not size.lengths:
            return self.integers(size.rows, size.tokens, size.topk + window), None
        new = min(size.tokens, size.rows // 2)  # rows of the chunk's own tokens are last
        last = size.rows - new + np.arange(size.tokens) * new // size.tokens
        visible = last + 1 if not window else np.maximum((last + 1) // 4, 1)
        listed = selected_rows(self.rng, visible, size.topk, neighbours=True)
        count = (listed >= 0).sum(axis=1)
        if window:
            rows = last[:, None] + 1 - window + np.arange(window)
            listed = np.concatenate([listed, np.full((size.tokens, window), -1, np.int32)], axis=1)
            np.put_along_axis(listed, count[:, None] + np.arange(window), np.maximum(rows, 0).astype(np.int32), axis=1)
        return self.put(listed, np.int32), self.put(count + window, np.int32)


@functools.lru_cache(maxsize=2)  # as many as a call attends to
def repeating_cache(backend: str, layout: CacheLayout, block_size: int, slots: int) -> RepeatingCache:
    rows = DEVICE_ROWS if backends.takes_device_arrays(backend) else HOST_ROWS
    rows *= KEYS_FOR_ROWS if layout.head_dim == INDEXER_FP8.head_dim else 1
    base_pages = min(slots, rows) // block_size
    x = Measured(backend, Size())
    array = layout.allocate(slots // block_size, block_size, x.xp)
    base = layout.allocate(base_pages, block_size, x.xp)
    k = x.rows(base_pages * block_size, layout.head_dim)
    if layout.quantized_dim:
        quantize_and_insert_k_cache(k, base, x.xp.arange(len(k)), block_size, layout=layout, backend=backend)
    else:
        base[...] = k.view(np.uint16).view(np.uint8).reshape(base.shape)
    for start in range(0, len(array), base_pages):
        chunk = array[start : start + base_pages]
        chunk[...] = base[: len(chunk)]
    on_host = layout.allocate(base_pages, block_size)
    on_host[...] = to_host(base)
    return RepeatingCache(array, on_host, float(abs(k[: 1 << 12].astype(np.float32)).max()))


def contexts(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """Lengths of requests, int32 [count], as traces have them: most are short, a few long, one below the window."""
    lens = np.exp(rng.uniform(np.log(min(256, longest)), np.log(longest), count)).astype(np.int32)
    if count > 1:
        lens[-1] = max(1, min(WINDOW, longest) // 3)
    return lens


def window_lists(rng: np.random.Generator, lens: np.ndarray, width: int, slots: int, block_size: int) -> np.ndarray:
    """int32 [len(lens), width]: slots of the last rows of a request of each length, in pages anywhere; then -1."""
    used = np.minimum(lens, width)[:, None]
    columns = np.arange(width)
    positions = np.maximum(lens[:, None] - used + columns, 0)
    pages = rng.integers(0, slots // block_size, (len(lens), width // block_size + 2))
    page = positions // block_size - (lens[:, None] - used) // block_size
    found = np.take_along_axis(pages, np.minimum(page, pages.shape[1] - 1), axis=1) * block_size
    return np.where(columns < used, found + positions % block_size, -1).astype(np.int32)


def selected_rows(rng: np.random.Generator, visible: np.ndarray, topk: int, neighbours: bool = False) -> np.ndarray:
    """int32 [len(visible), topk]: distinct rows of so many, ascending, as an indexer selects them; then -1.

    Args:
        neighbours: consecutive tokens share 90% of their lists; else any have nothing in common
    """
    columns, tokens = np.arange(topk), np.arange(len(visible))[:, None]
    times = (tokens + columns % STAYS) // STAYS if neighbours else np.broadcast_to(tokens, (len(visible), topk))
    place = rng.random((int(times.max(initial=0)) + 1, topk))[times, columns]
    rows = visible[visible > topk].min(initial=2**31 - 1) if neighbours else visible[:, None]
    chosen = np.where(visible[:, None] > topk, ((columns + place) * (rows // topk)).astype(np.int64), columns)
    return np.where(columns < visible[:, None], chosen, -1).astype(np.int32)
