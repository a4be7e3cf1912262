"""Inputs of calls: random arrays, caches and batches of a size, in the memory that a backend takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.backends import array_module
from ..dispatch.call import BFLOAT16
from ..layout import CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache

TINY_HEADS = 3
UNWRITTEN = 165  # fills memory that an operation must not read, and that it need not write


@dataclass(frozen=True)
class Size:
    """How large a call is. A generator reads the fields that its operation has.

    Attributes:
        requests: of the step, the decodes first
        decodes: requests of one token
        tokens: of all requests of the step
        rows: rows of tokens: inserted, or keys of prompts
        keys: packed keys that queries of prompts score; columns of scores
        heads: query heads
        topk: entries of a list
        window: positions of a window
        context: positions of the longest request before the step
        block_size: tokens of a page
        pages: of a cache
        spare: rows of a workspace beside the gathered rows of a request; columns of lists beside topk
        lengths: requests of different lengths, as steps have them; False: each as long as the longest
        stagger: or longer by 0 to stagger - 1 positions, one after another
    """

    requests: int = 1
    decodes: int = 0
    tokens: int = 0
    rows: int = 0
    keys: int = 0
    heads: int = TINY_HEADS
    topk: int = 0
    window: int = 1
    context: int = 0
    block_size: int = 64
    pages: int = 1
    spare: int = 0
    lengths: bool = True
    stagger: int = 1

    @property
    def query_lens(self) -> np.ndarray:
        """int32 [requests]: a token of each decode; prefills share the others."""
        prefills, tokens = self.requests - self.decodes, max(self.tokens - self.decodes, 0)
        shares = np.bincount(np.arange(tokens) * prefills // max(tokens, 1), minlength=prefills)[:prefills]
        return np.append(np.ones(self.decodes), shares).astype(np.int32)


class Step(NamedTuple):
    """The requests of a step, on the host.

    Attributes:
        query_lens: new tokens of each
        seq_lens: tokens of each, the new ones included
        gather_lens: how many of its last rows a prefill gathers; None: all
    """

    query_lens: np.ndarray
    seq_lens: np.ndarray
    gather_lens: np.ndarray | None

    @property
    def gathered(self) -> np.ndarray:
        return self.seq_lens if self.gather_lens is None else self.gather_lens

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def requests(self) -> np.ndarray:
        """The request of each token."""
        return np.repeat(np.arange(len(self.query_lens)), self.query_lens)

    @property
    def positions(self) -> np.ndarray:
        """The position of each token in its request."""
        starts = np.cumsum(self.query_lens) - self.query_lens
        first = self.seq_lens - self.query_lens - starts
        return np.arange(self.query_lens.sum()) + first[self.requests]


TINY = Size(3, 2, tokens=7, rows=9, keys=70, topk=8, window=8, context=20, block_size=5, pages=7, spare=2)
TINY_STEP = Step(np.array([1, 1, 5]), np.array([12, 2, 20]), np.array([8, 2, 12]))
PACKED = Step(np.array([3, 0, 70, 5]), np.array([9, 4, 140, 2]), None)


def tiny(heads: int) -> Size:
    return replace(TINY, heads=heads)


class Inputs:
    """Few values, of every kind: for self-tests, tests of safety, the emulator and compute-sanitizer.

    Values depend on the seed and not on the backend.
    """

    def __init__(self, backend: str, size: Size = TINY, seed: int = 0) -> None:
        self.backend, self.size = backend, size
        self.xp: Any = array_module(backend)
        self.rng = np.random.default_rng(seed)

    def put(self, array: Any, dtype: Any = None) -> Any:
        return self.xp.asarray(np.asarray(array, dtype))

    def choose(self, usual: Any, *others: Any) -> Any:
        """The first of values that an operation takes; fuzz gives any of them."""
        return usual

    # ---- arrays

    def numbers(self, *shape: int) -> np.ndarray:
        """Heavy-tailed, on the host."""
        return self.rng.standard_normal(shape) * np.exp(self.rng.standard_normal(shape) / 2)

    def rows(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        """Activations."""
        return self.put(self.numbers(*shape).astype(dtype))

    def floats(self, *shape: int) -> Any:
        """float32 activations, or parameters."""
        return self.rows(*shape, dtype=np.float32)

    def queries(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        """Queries of attention, the last axes heads and values."""
        return self.rows(*shape, dtype=dtype)

    def keys(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        """Keys and values of attention, whose bounds are for values up to 1."""
        return self.put((0.1 * self.rng.standard_normal(shape)).astype(dtype))

    def logs(self, *shape: int) -> Any:
        """float32 logarithms of sums of weights, some of them of no weights."""
        values = self.numbers(*shape)
        values[self.rng.random(shape) < 0.2] = np.inf
        return self.put(values, np.float32)

    def states(self, *shape: int) -> Any:
        """float32 that a call reads and writes."""
        return self.floats(*shape)

    def integers(self, end: int, *shape: int) -> Any:
        """int32 from 0 to end - 1."""
        return self.put(self.rng.integers(0, end, shape), np.int32)

    def rotation(self, positions: int) -> Any:
        """float32 [positions, 64]: cosines and sines of RoPE."""
        angles = np.arange(positions)[:, None] * 10_000.0 ** (-np.arange(32) / 32)
        return self.put(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), np.float32)

    def positions(self, count: int) -> Any:
        """int64 [count]: positions before the longest context's end."""
        return self.put(self.rng.integers(0, self.size.context, count))

    def newest(self, end: int, *shape: int) -> np.ndarray:
        """Positions of queries below `end`, -1 for padding, on the host."""
        return np.asarray(self.rng.integers(-1, end, shape))

    def weights(self, *shape: int) -> Any:
        """Bytes of e4m3: any finite number."""
        codes = self.rng.integers(0, 256, shape).astype(np.uint8)
        return self.put(np.where(codes % 128 == 127, 0, codes), np.uint8)

    def e4m3(self, *shape: int, end: int = 0x7F) -> Any:
        """Bytes of numbers from 0 on, below the one of byte `end`."""
        return self.put(self.rng.integers(0, end, shape), np.uint8)

    def unwritten(self, *shape: int, dtype: Any = BFLOAT16) -> Any:
        """An array for a call to write."""
        return self.put(np.full(shape, UNWRITTEN, dtype))

    # ---- the indexer

    def index_values(self, *shape: int) -> Any:
        """Bytes of queries or keys, which are e4m3 of at most 1 or pairs of e2m1."""
        return self.e4m3(*shape, end=0x39)

    def index_weights(self, rows: int, heads: int) -> Any:
        """float32 [rows, heads], which contain the factors of the heads and of the products."""
        return self.put(self.numbers(rows, heads) / np.sqrt(heads * 128), np.float32)

    def scales(self, *shape: int) -> Any:
        """float32, positive."""
        return self.put(abs(self.numbers(*shape)), np.float32)

    def scores(self, rows: int, columns: int) -> Any:
        """float32 [rows, columns], many of them equal."""
        return self.put(self.rng.integers(-20, 20, (rows, columns)), np.float32)

    def ranges(self, rows: int, columns: int) -> tuple[Any, Any]:
        """int32 [rows] each: the first column that a row sees, and the end; some are empty or not in the row."""
        return self.entries(columns - 10, rows), self.entries(columns + 5, rows)

    def context_lens(self, requests: int, next_n: int) -> Any:
        """int32 [requests], or [requests, next_n]: rows that the last query of a request sees, or each."""
        return self.put(np.resize((13, 2, 0), requests), np.int32)

    def blocks(self, rows: int, count: int, end: int) -> Any:
        """int32 [rows, count]: different candidate blocks below `end`, ascending; then -1."""
        columns = np.arange(count)
        return self.put(np.tile(np.where(columns < count - 1, 2 * columns, -1), (rows, 1)), np.int32)

    # ---- caches

    def new_cache(self, layout: CacheLayout) -> Any:
        """A cache to write: raw pages; of a format without scales, its values."""
        pages, block_size = self.size.pages, self.size.block_size
        if not layout.num_scales:
            return self.unwritten(pages, block_size, layout.head_dim)
        return self.unwritten(pages, layout.page_bytes(block_size), dtype=np.uint8)

    def cache(self, layout: CacheLayout, block_size: int | None = None) -> Any:
        """A cache of random rows in random order, of pages of another size if `block_size` is given."""
        pages, block_size = self.size.pages, block_size or self.size.block_size
        raw = np.zeros((pages, layout.page_bytes(block_size)), np.uint8)
        cache = layout.view(raw, block_size)
        rows = self.numbers(pages * block_size, layout.head_dim).astype(BFLOAT16)
        if layout.quantized_dim:
            slots = self.rng.permutation(len(rows))
            quantize_and_insert_k_cache(rows, cache, slots, block_size, layout=layout, backend="reference")
        else:
            cache[...] = rows.view(np.uint8).reshape(cache.shape)
        return layout.view(self.put(raw), block_size)

    def slots(self, count: int, dtype: Any = np.int64) -> Any:
        """Slots of `count` rows to insert, some of them absent."""
        slots = self.rng.permutation(self.size.pages * self.size.block_size)[:count]
        slots[::4] = -1
        return self.put(slots, dtype)

    def new_slots(self, count: int) -> np.ndarray:
        """Different slots of a cache, on the host."""
        return self.rng.permutation(self.size.pages * self.size.block_size)[:count]

    def table(self, requests: int, positions: int) -> Any:
        """int32 [requests, columns]: the pages of each request's positions."""
        columns = -(-positions // self.size.block_size)
        return self.put(self.rng.permutation(requests * columns).reshape(requests, columns) % self.size.pages, np.int32)

    def pairs(self, pages: int) -> Any:
        """int64 [n, 2]: pages to copy and where to, none of them read and written; some do not exist."""
        return self.put([[0, 3], [1, 5], [pages, 2], [4, -1]], np.int64)

    # ---- steps

    @functools.cached_property
    def step(self) -> Step:
        return TINY_STEP

    @property
    def packed(self) -> Step:
        """The sequences of a call that attends to keys of their own; some have no queries, some more than keys."""
        return PACKED if self.step is TINY_STEP else self.step

    def cached(self) -> Any:
        """int32 [requests]: tokens of each in a cache."""
        return self.used(self.size.context, self.size.requests)

    def longest(self, lens: np.ndarray) -> int:
        """Rows of a workspace for requests of these lengths."""
        return int(lens.max(initial=0))

    def starts(self, lens: Sequence[int] | np.ndarray) -> Any:
        """int32: the start of each of consecutive ranges of these lengths, and the end of the last."""
        return self.put(np.cumsum([0, *lens]), np.int32)

    def valid(self, tokens: int) -> Any:
        """bool [tokens]: which are no padding."""
        return self.put(np.arange(tokens) != 1)

    def selected(self, visible: np.ndarray, columns: int) -> Any:
        """int32 [len(visible), columns]: rows that tokens select, each among those it sees; some do not exist."""
        end = int(visible.max(initial=0))
        return self.put(self.rng.integers(-2, end + 2, (len(visible), columns)), np.int32)

    def entries(self, end: int, *shape: int) -> Any:
        """int32 from -2 to end, absent ones included."""
        return self.put(self.rng.integers(-2, end + 1, shape), np.int32)

    def used(self, most: int, *shape: int) -> Any:
        """int32: how many of up to `most` entries are in use; all of the first, none of the last."""
        lens = self.rng.integers(0, most + 1, shape)
        lens.flat[:1], lens.flat[-1:] = most, 0
        return self.put(lens, np.int32)

    def slot_lists(self, queries: int, width: int, slots: int, block_size: int, ratio: int) -> tuple[Any, Any]:
        """int32 [requests, queries, width]: slots of a cache; and how many are in use, if lists have lengths.

        Args:
            ratio: positions of a row that is selected; 0: lists are windows, with a length for each request
        """
        axes = (self.size.requests, queries)
        return self.entries(slots, *axes, width), self.used(width, *axes[: 2 if ratio else 1])

    def row_lists(self, windows: bool) -> tuple[Any, Any]:
        """int32 [tokens, columns]: rows of a workspace; and how many are in use, if lists have lengths.

        Args:
            windows: a window comes after the selected rows
        """
        size = self.size
        width = size.topk + (size.window if windows else 0)
        return self.entries(size.rows, size.tokens, width), self.used(width, size.tokens)
