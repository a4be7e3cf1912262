"""Gathers of dense rows and of index keys, copies of pages, and advance_step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.caches import LARGE, sample, token_bytes
from cumla.bench.problem import BLOCK, Problem, Sizes, by_backend, calls_of, picked, problem_of
from cumla.dispatch.call import BFLOAT16
from cumla.layout import DSV4_FP8, INDEXER_FP8, MLA_BF16, CacheLayout
from cumla.specs import sparse_cache


@dataclass(frozen=True)
class DenseGather:
    """Rows of a dense layer's cache, packed."""

    requests: int
    length: int

    op: ClassVar[str] = "gather_cache"

    def __str__(self) -> str:
        return f"bfloat16 {self.requests} x {self.length:,}"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, rows = sizes.inputs(), sizes.xp, self.requests * self.length
        columns, moved = -(-self.length // BLOCK), 2 * rows * MLA_BF16.row_bytes
        sets = sizes.sets(moved)
        caches = [arrays.rows(self.requests * columns, BLOCK, 576) for _ in range(sets)]
        table = xp.asarray(arrays.rng.permutation(self.requests * columns).reshape(self.requests, -1).astype(np.int32))
        outs = [xp.empty((rows, 576), BFLOAT16) for _ in range(sets)]
        starts = xp.arange(self.requests + 1, dtype=np.int32) * np.int32(self.length)

        def check(_: Any) -> float:
            want = caches[0][table].reshape(self.requests, -1, 576)[:, : self.length].reshape(-1, 576)
            assert (outs[0].view(np.uint16) == want.view(np.uint16)).all()
            return 0.0

        given = [(*x, table, starts, self.requests) for x in zip(caches, outs, strict=True)]
        return problem_of(
            self, sizes, by_backend(cumla.gather_cache, given), moved, check, lambda: outs[0].fill(7),
            copied=rows >= LARGE,
        )  # fmt: skip


@dataclass(frozen=True)
class KeyGather:
    """Keys of an indexer and their scales, packed."""

    requests: int
    length: int
    layout: CacheLayout = INDEXER_FP8

    op: ClassVar[str] = "cp_gather_indexer_k_quant_cache"

    def __str__(self) -> str:
        layout = "" if self.layout is INDEXER_FP8 else f"{self.layout.name} "
        return f"{layout}{self.requests} x {self.length:,}"

    def problem(self, sizes: Sizes) -> Problem:
        layout, rows, pages = self.layout, self.requests * self.length, sizes.slots // BLOCK
        moved = 2 * rows * layout.token_bytes
        x = sizes.inputs(requests=self.requests, context=self.length, lengths=False, pages=pages)
        cache = x.repeating(layout)
        sets = [sparse_cache.gather_keys(x, layout, as_e4m3=False) for _ in range(sizes.sets(moved))]
        keys, scales, table = (sets[0][name] for name in ("dst_k", "dst_scale", "block_table"))
        which = sample(rows)
        request, row = np.divmod(which, self.length)
        slots = to_host(table)[request, row // BLOCK].astype(np.int64) * BLOCK + row % BLOCK
        want = token_bytes(layout, cache.base, cache.in_base(slots))

        def check(_: Any) -> float:
            got = [picked(keys, which), picked(scales, which)]
            np.testing.assert_array_equal(np.concatenate(got, axis=1), want)
            return 0.0

        return problem_of(
            self, sizes, calls_of(cumla.cp_gather_indexer_k_quant_cache, sets), moved, check, lambda: keys.fill(7),
            copied=rows >= LARGE,
        )  # fmt: skip


@dataclass(frozen=True)
class CopyBlocks:
    pages: int

    op: ClassVar[str] = "copy_blocks"

    def __str__(self) -> str:
        return f"{self.pages} pages of DSV4_FP8"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, page_bytes = sizes.inputs(), BLOCK * DSV4_FP8.token_bytes
        moved = 2 * self.pages * page_bytes
        sets = sizes.sets(moved)
        pools = [arrays.rows(2 * self.pages, page_bytes // 2).view(np.uint8) for _ in range(sets)]
        pairs = sizes.xp.asarray(arrays.rng.permutation(2 * self.pages).reshape(-1, 2))

        def check(_: Any) -> float:
            assert (pools[0][pairs[:, 1]] == pools[0][pairs[:, 0]]).all()
            return 0.0

        calls = by_backend(cumla.copy_blocks, [([pool], pairs) for pool in pools])
        return problem_of(self, sizes, calls, moved, check, copied=True)


@dataclass(frozen=True)
class AdvanceStep:
    sequences: int

    op: ClassVar[str] = "advance_step"

    def __str__(self) -> str:
        return f"{self.sequences} sequences"

    def problem(self, sizes: Sizes) -> Problem:
        xp, arrays, count = sizes.xp, sizes.inputs(), self.sequences
        tokens, positions, slots = (xp.zeros(count, np.int64) for _ in range(3))
        sampled = xp.arange(count)[:, None]
        lens, tables = arrays.integers(8191, count) + np.int32(1), arrays.integers(10_000, count, 512)
        before = lens.copy()

        def check(_: Any) -> float:
            assert (positions == before).all()
            assert (tokens == sampled[:, 0]).all()
            blocks = tables[xp.arange(count), before // BLOCK].astype(np.int64)
            assert (slots == blocks * BLOCK + before % BLOCK).all()
            return 0.0

        def clear() -> None:
            lens[:] = before

        given = (count, count, BLOCK, tokens, sampled, positions, lens, slots, tables)
        return problem_of(self, sizes, by_backend(cumla.advance_step, [given]), 52 * count, check, clear)
