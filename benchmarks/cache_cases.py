"""Gathers of dense rows and of index keys, copies of pages, and advance_step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.arrays.memory import to_host
from cumla.bench.caches import LARGE, sample, token_bytes
from cumla.bench.problem import BLOCK, Problem, Sizes, calls_of, picked, problem_of
from cumla.layout import DSV4_FP8, INDEXER_FP8, MLA_BF16, CacheLayout
from cumla.specs import advance, blocks, dense_cache, sparse_cache


@dataclass(frozen=True)
class DenseGather:
    """Gathers rows of a dense layer's cache into packed rows."""

    requests: int
    length: int

    op: ClassVar[str] = "gather_cache"

    def __str__(self) -> str:
        return f"bfloat16 {self.requests} x {self.length:,}"

    def problem(self, sizes: Sizes) -> Problem:
        rows, pages = self.requests * self.length, self.requests * -(-self.length // BLOCK)
        moved = 2 * rows * MLA_BF16.row_bytes
        x = sizes.inputs(requests=self.requests, context=self.length, lengths=False, pages=pages)
        sets = [dense_cache.gather(x) for _ in range(sizes.sets(moved))]
        cache, out, table = (sets[0][name] for name in ("src_cache", "dst", "block_table"))

        def check(_: Any) -> float:
            want = cache[table].reshape(self.requests, -1, 576)[:, : self.length].reshape(-1, 576)
            assert (out.view(np.uint16) == want.view(np.uint16)).all()
            return 0.0

        return problem_of(
            self, sizes, calls_of(cumla.gather_cache, sets), moved, check, lambda: out.fill(7), copied=rows >= LARGE
        )


@dataclass(frozen=True)
class KeyGather:
    """Gathers an indexer's keys and their scales into packed arrays."""

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
        moved = 2 * self.pages * BLOCK * DSV4_FP8.token_bytes
        x = sizes.inputs(pages=2 * self.pages)
        sets = [blocks.copy(x, of_values=False) for _ in range(sizes.sets(moved))]
        (pool,), pairs = sets[0]["kv_caches"], sets[0]["src_to_dsts"]

        def check(_: Any) -> float:
            assert (pool[pairs[:, 1]] == pool[pairs[:, 0]]).all()
            return 0.0

        return problem_of(self, sizes, calls_of(cumla.copy_blocks, sets), moved, check, copied=True)


@dataclass(frozen=True)
class AdvanceStep:
    sequences: int

    op: ClassVar[str] = "advance_step"

    def __str__(self) -> str:
        return f"{self.sequences} sequences"

    def problem(self, sizes: Sizes) -> Problem:
        count = self.sequences
        arguments = advance.advance(sizes.inputs(requests=count, context=512 * BLOCK - 1, pages=10_000))
        arrays = [arguments[name] for name in ("input_tokens", "input_positions", "slot_mapping")]
        lens, before = arguments["seq_lens"], arguments["seq_lens"].copy()
        wanted = [arguments["sampled_token_ids"], before, None]
        blocks_of = arguments["block_tables"][sizes.xp.arange(count), before // BLOCK].astype(np.int64)
        wanted[2] = blocks_of * BLOCK + before % BLOCK

        def check(_: Any) -> float:
            assert all((got == want).all() for got, want in zip(arrays, wanted, strict=True))
            return 0.0

        def clear() -> None:
            lens[:] = before

        return problem_of(self, sizes, calls_of(cumla.advance_step, [arguments]), 52 * count, check, clear)
