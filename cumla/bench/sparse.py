"""Sparse attention: decodes over paged caches, prefill over gathered rows; FlashMLA beside it.

Rows whose text ends in `lengths` are the calls that layers make: contexts of different lengths, one shorter than the
window, lists that end in -1, and their lengths. A prefill's tokens see what is before them, and neighbours select
nearly the same. `full lists` are random rows, as many for each token.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import DECODE_OUT, PREFILL_FP8_OUT, PREFILL_OUT
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT, V32_FP8, CacheLayout
from ..ops.sparse_attention import PARTNERS, workspace_bytes
from ..specs.measured import Measured, RepeatingCache, contexts, repeating_cache, selected_rows, window_lists
from . import peers
from .problem import (
    BLOCK,
    CHECKED,
    WINDOW,
    Calls,
    Peer,
    Problem,
    Sizes,
    by_backend,
    error_within,
    first,
    kind_of,
    problem_of,
)

SETS, PREFILL_SETS = 4, 2
CONTEXT = 1 << 17  # of the longest request
RECORDED_SLOTS = {"DSV4_FP8": 7 << 20, "V32_FP8": 6 << 20, "DSV41_FP8": 7 << 20, "MLA_BF16": 7 << 19}  # 4 GiB
WINDOWED = (DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT)  # formats whose first list is a window, with lengths and a sink


@dataclass(frozen=True)
class Decode:
    """Decodes of `batch` entries of s_q tokens; `extra` keys of a second cache, V4.1's with FP4 rows.

    lengths  as layers make them, or full lists
    ratio    positions of a row of the second cache, with lengths
    slots    of each cache; None: as many as the sizes have
    beside_portable  the portable kernel is measured as well
    beside_ordinary  the call that ends in an ordinary launch is measured as well
    """

    layout: CacheLayout
    heads: int
    batch: int
    s_q: int
    topk: int
    extra: int = 0
    block_size: int = BLOCK
    extra_block_size: int = BLOCK
    lengths: bool = False
    ratio: int = 4
    slots: int | None = None
    beside_portable: bool = False
    beside_ordinary: bool = False

    op: ClassVar[str] = "sparse_mla_decode"

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """The formats of the caches."""
        return (self.layout, PARTNERS.get(self.layout.name, self.layout))[: 2 if self.extra else 1]

    def __str__(self) -> str:
        keys = f"{self.topk}" + (f"+{self.extra}" if self.extra else "")
        return f"{self.layout.name} h{self.heads} b{self.batch} s{self.s_q} {keys}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        sets = [self.inputs(sizes, seed) for seed in range(SETS)]
        keys = sum(x.keys for x in sets) / SETS
        width = self.layout.head_dim + 512
        moved = sum(x.row_bytes for x in sets) / SETS + self.batch * self.s_q * self.heads * 2 * width
        one_of_each = [(x,) for x in sets]
        problem = problem_of(
            self, sizes, by_backend(DecodeInputs.cumla, one_of_each), moved, sets[0].check, sets[0].clear,
            flop=keys * 2 * self.heads * width,
            peer=None if self.layout not in (DSV4_FP8, V32_FP8)
            else Peer("flash_mla", peers.FLASH_MLA_DECODE, DecodeInputs.flash_mla, one_of_each),
        )  # fmt: skip
        if self.beside_portable and sizes.backend == "cuda":
            problem.impls["portable"] = "cupy", [x.portable for x in sets]
        if self.beside_ordinary and sizes.backend == "cuda":
            calls = [functools.partial(x.cumla, "cuda", early_release=False) for x in sets]
            problem.impls["early_release=False"] = "cupy", calls
        return problem

    def inputs(self, sizes: Sizes, seed: int) -> DecodeInputs:
        return DecodeInputs(self, sizes, seed)


class DecodeInputs:
    """One set of queries and lists."""

    def __init__(self, case: Decode, sizes: Sizes, seed: int) -> None:
        self.case, self.sizes = case, sizes
        arrays, xp = sizes.inputs(seed), sizes.xp
        slots = case.slots or sizes.slots
        blocks = (case.block_size, case.extra_block_size)[: 2 if case.extra else 1]
        self.caches: list[RepeatingCache] = [
            repeating_cache(sizes.backend, layout, b, slots) for layout, b in zip(case.layouts, blocks, strict=True)
        ]
        shape = (case.batch, case.s_q)
        self.q = arrays.rows(*shape, case.heads, case.layout.head_dim)
        self.sink = arrays.floats(case.heads)
        self.lens: list[Any] = [None, None]
        widths = (case.topk, case.extra)[: len(self.caches)]
        if case.lengths:
            lists, used = self._as_layers_make_them(arrays.rng)
            if case.layout in WINDOWED:  # FlashMLA takes lengths of V4's lists alone
                self.lens[: len(used)] = [xp.asarray(x) for x in used]
            counts = [int(x.sum()) * case.s_q for x in used]
        else:
            lists = [arrays.rng.integers(0, cache.slots, (*shape, width), np.int32)
                     for cache, width in zip(self.caches, widths, strict=True)]  # fmt: skip
            counts = [case.batch * case.s_q * width for width in widths]
        self.keys = sum(counts)
        self.row_bytes = sum(n * x.token_bytes for n, x in zip(counts, case.layouts, strict=True))
        self.lists = [xp.asarray(x) for x in lists]
        self.out = xp.empty((*shape, case.heads, 512), BFLOAT16)
        self.lse = xp.empty((case.batch, case.heads, case.s_q), np.float32)
        self.plans: dict[str, cumla.DecodePlan] = collections.defaultdict(cumla.DecodePlan)  # by backend

    def _as_layers_make_them(self, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Lists by cache, [b, s_q, width], and how many of each entry are in use."""
        case, lists, used = self.case, [], []
        lens = contexts(rng, case.batch, CONTEXT)
        for number, cache in enumerate(self.caches):
            if number == 0 and case.layout in WINDOWED:
                found = window_lists(rng, lens, case.topk, cache.slots, case.block_size)
            else:
                width, ratio = (case.extra, case.ratio) if number else (case.topk, 1)
                rows = lens // ratio
                local = selected_rows(rng, rows if ratio < WINDOW else np.minimum(rows, width), width)
                block = case.extra_block_size if number else case.block_size
                pages = rng.integers(0, cache.slots // block, (case.batch, CONTEXT // ratio // block + 1))
                of_row = np.take_along_axis(pages, np.maximum(local, 0) // block, axis=1) * block
                found = np.where(local < 0, -1, of_row + local % block)
            used.append((found >= 0).sum(axis=1).astype(np.int32))
            lists.append(np.repeat(found[:, None], case.s_q, axis=1).astype(np.int32))
        return lists, used

    def _given(self, *names: str) -> dict[str, Any]:
        """What a call takes beside the first list: its lengths, the second cache, its list, its lengths."""
        second = (self.caches[1].array, self.lists[1], self.lens[1]) if len(self.caches) > 1 else (None, None, None)
        return dict(zip(names, (self.lens[0], *second), strict=True))

    def second(self) -> dict[str, Any]:
        """What cumla takes beside the first list."""
        return self._given("topk_length", "extra_k_cache", "extra_indices", "extra_topk_length")

    def portable(self) -> Any:
        """By the kernel of other devices."""
        from ..kernels.cuda.sparse.kernels import forced

        with forced("portable"):
            return self.cumla("cuda", "portable")

    def cumla(self, backend: str, plan: str | None = None, early_release: bool = True) -> Any:
        cumla.sparse_mla_decode(
            self.q, self.caches[0].array, self.lists[0], layout=self.case.layout, attn_sink=self._sink(),
            **self.second(),
            plan=self.plans[plan or backend], early_release=early_release, out=self.out, lse=self.lse, backend=backend,
        )  # fmt: skip
        return self.out

    def _sink(self) -> Any:
        """V4's layers have one."""
        return self.sink if self.case.lengths and self.case.layout in WINDOWED else None

    def flash_mla(self) -> Any:
        return peers.flash_mla_decode(
            self.q, self.caches[0].array, self.lists[0], self.out, sink=self._sink(),
            **self._given("lens", "extra_k_cache", "extra_indices", "extra_lens"),
        )  # fmt: skip

    def clear(self) -> None:
        self.out[...] = 0

    def check(self, result: Any) -> float:
        """The largest error of some entries, the last of them, which is short, among them."""
        worst, last = 0.0, self.case.batch - 1
        # A query with few keys has results as large as their values, of which 16-bit weights are part of the error.
        bound = DECODE_OUT.of_values(max(cache.largest for cache in self.caches))
        for entry in sorted({0, last // 2, last}):
            one = slice(entry, entry + 1)
            lists = [cache.in_base(to_host(x[one])) for cache, x in zip(self.caches, self.lists, strict=True)]
            lens = [None if x is None else to_host(x[one]) for x in self.lens]
            more: dict[str, Any] = {}
            if len(self.caches) > 1:
                names = ("extra_k_cache", "extra_indices", "extra_topk_length", "extra_layout")
                more = dict(zip(names, (self.caches[1].base, lists[1], lens[1], self.case.layouts[1]), strict=True))
            sink = None if self._sink() is None else to_host(self.sink)
            want, _ = cumla.sparse_mla_decode(
                to_host(self.q[one]), self.caches[0].base, lists[0], layout=self.case.layout, topk_length=lens[0],
                attn_sink=sink, **more, backend="reference",
            )  # fmt: skip
            worst = max(worst, error_within(first(result[one]), want, bound))
        return worst


@dataclass(frozen=True)
class Prefill:
    """Prefill over `rows` gathered rows: with lengths and a sink, a chunk of a C4A layer at the end of a context.

    precision  as sparse_mla_prefill has it; FlashMLA's products are of bfloat16 values in any case
    """

    width: int
    heads: int
    topk: int
    rows: int
    tokens: int = 4096
    lengths: bool = False
    precision: str | None = None

    op: ClassVar[str] = "sparse_mla_prefill"

    def __str__(self) -> str:
        rows = f"{self.rows // 1024}K" if self.rows % 1024 == 0 else str(self.rows)
        tokens = "" if self.tokens == 4096 else f" T{self.tokens}"
        products = "" if self.precision is None else f", {self.precision} products"
        return f"d{self.width} h{self.heads} topk {self.topk} of {rows}{tokens}{products}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp = sizes.inputs(), sizes.xp
        kv = self.gathered(arrays)
        out = (
            xp.empty((self.tokens, self.heads, 512), BFLOAT16),
            *(xp.empty((self.tokens, self.heads), np.float32) for _ in range(2)),
        )
        size = workspace_bytes(self.precision, self.rows, self.heads, self.width, False)
        workspace = xp.empty(size, np.uint8) if size else None
        sets, keys = [], 0.0
        sink = arrays.floats(self.heads) if self.lengths else None
        for _ in range(PREFILL_SETS):
            lists, lens = self._lists(arrays.rng)
            keys += int((lists >= 0).sum()) / PREFILL_SETS
            given = arrays.rows(self.tokens, self.heads, self.width), kv, xp.asarray(lists)
            sets.append((*given, None if lens is None else xp.asarray(lens), sink))

        def ours(backend: str) -> Calls:
            call = functools.partial(
                cumla.sparse_mla_prefill, precision=self.precision, workspace=workspace, out=out, backend=backend
            )
            return [functools.partial(call, *x[:3], topk_length=x[3], attn_sink=x[4]) for x in sets]

        moved = self.rows * 2 * self.width + self.tokens * self.heads * 2 * (self.width + 512)
        return problem_of(
            self, sizes, ours, moved, functools.partial(self._check, sets[0]),
            lambda: out[0].fill(0), flop=2 * keys * self.heads * (self.width + 512),
            fp8=self.precision is not None,
            peer=Peer("flash_mla", peers.FLASH_MLA_PREFILL, peers.flash_mla_prefill, sets),
        )  # fmt: skip

    def gathered(self, arrays: Measured) -> Any:
        """The rows."""
        return arrays.rows(self.rows, self.width)

    def largest(self, rows: np.ndarray) -> float:
        """The magnitude of values in units of which errors are bounded."""
        return float(np.abs(rows[:, :512].astype(np.float32)).max())

    def _lists(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        if not self.lengths:
            return rng.integers(0, self.rows, (self.tokens, self.topk), np.int32), None
        window = min(WINDOW, self.topk // 2) if self.width == DSV4_FP8.head_dim else 0
        new = min(self.tokens, self.rows // 2)  # rows of the chunk's own tokens are last
        at = np.arange(self.tokens) * new // self.tokens
        before = self.rows - new
        visible = before + at + 1 if not window else np.maximum((before + at + 1) // 4, 1)
        listed = selected_rows(rng, visible, self.topk - window, neighbours=True)
        count = (listed >= 0).sum(axis=1).astype(np.int32)
        if window:
            last = before + at[:, None] + 1 - window + np.arange(window)
            columns = count[:, None] + np.arange(window)
            listed = np.concatenate([listed, np.full((self.tokens, window), -1, np.int32)], axis=1)
            np.put_along_axis(listed, columns, np.maximum(last, 0).astype(np.int32), axis=1)
        return listed, count + np.int32(window)

    def _check(self, given: tuple[Any, Any, Any, Any, Any], result: Any) -> float:
        """The largest error of some tokens."""
        q, kv, listed, lens, sink = given
        worst, rows = 0.0, to_host(kv)
        for token in np.linspace(0, len(q) - 1, CHECKED).astype(int):
            one = slice(token, token + 1)
            want, _, _ = cumla.sparse_mla_prefill(
                to_host(q[one]), rows, to_host(listed[one]), topk_length=None if lens is None else to_host(lens[one]),
                attn_sink=None if sink is None else to_host(sink), backend="reference",
            )  # fmt: skip
            got = first((result[0] if isinstance(result, (tuple, list)) else result)[one])
            largest = self.largest(rows[to_host(listed[one])[0]])
            bound = PREFILL_OUT if self.precision is None else PREFILL_FP8_OUT
            worst = max(worst, error_within(got, want, bound.of_values(largest)))
        return worst


def decode(sizes: Sizes) -> Iterator[Decode]:
    """Calls of layers first."""
    extra = sizes.extra if sizes.layout in WINDOWED else 0
    for lengths in (True, False):
        for batch in sizes.batch:
            yield Decode(sizes.layout, sizes.heads, batch, 1, sizes.topk, extra, lengths=lengths)


def prefill(sizes: Sizes) -> Iterator[Prefill]:
    topk = sizes.topk + (sizes.extra if sizes.layout in WINDOWED else 0)
    for lengths in (True, False):
        for tokens in sizes.tokens:
            yield Prefill(sizes.layout.head_dim, sizes.heads, topk, sizes.context, tokens, lengths)
