"""The paged caches: insert, gather, copies of pages. `copy` is a kernel that only moves as many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import ROUNDED
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8, INDEXER_FP8, INDEXER_MXFP4, MLA_BF16, CacheLayout
from . import peers
from .problem import (
    BLOCK,
    WINDOW,
    Arrays,
    Peer,
    Problem,
    Sizes,
    by_backend,
    contexts,
    error_within,
    kind_of,
    picked,
    problem_of,
    repeating_cache,
)

SAMPLE = 100  # rows that are compared with the reference
LARGE = 4096  # from so many tokens a copy is measured as well, and pages are filled in order, as prompts fill them
POSITIONS = 8192


def slots_of(arrays: Arrays, tokens: int, blocks: int) -> Any:
    """int64 [tokens]: of decodes, each in a page anywhere, or of prompts, which fill pages."""
    if tokens < LARGE:
        return arrays.xp.asarray(arrays.rng.permutation(blocks * BLOCK)[:tokens])
    pages = arrays.rng.permutation(blocks)[:, None] * BLOCK
    return arrays.xp.asarray((pages + np.arange(BLOCK)).reshape(-1)[:tokens])


def sample(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, SAMPLE).astype(int))


def token_bytes(layout: CacheLayout, cache: Any, slots: np.ndarray) -> np.ndarray:
    """Rows and scales of slots of a cache, side by side."""
    block = cache.shape[1]
    page, row = np.divmod(slots, block)
    there, page = np.unique(page, return_inverse=True)
    pages = picked(cache, there).reshape(len(there), -1).view(np.uint8)
    scales = layout.scale_start(block) + row * layout.scale_stride
    rows = pages[page[:, None], (row * layout.row_bytes)[:, None] + np.arange(layout.row_bytes)]
    return np.concatenate([rows, pages[page[:, None], scales[:, None] + np.arange(layout.scale_bytes)]], axis=1)


@dataclass(frozen=True)
class Insert:
    """Rows inserted, quantised or as they are. vLLM inserts V4's rows with the queries' norm: QueryNormInsert."""

    tokens: int
    layout: CacheLayout = DSV4_FP8

    @property
    def op(self) -> str:
        keys = "indexer_k_quant_and_cache"
        ops = {INDEXER_FP8: keys, INDEXER_MXFP4: keys, MLA_BF16: "concat_and_cache_mla"}
        return ops.get(self.layout, "quantize_and_insert_k_cache")

    def __str__(self) -> str:
        return f"{'bfloat16' if self.layout is MLA_BF16 else self.layout.name} T={self.tokens}"

    def problem(self, sizes: Sizes) -> Problem:
        layout, arrays, call = self.layout, Arrays(sizes), getattr(cumla, self.op)
        moved = self.tokens * (2 * layout.head_dim + layout.token_bytes + 8)
        sets, blocks = sizes.sets(moved), -(-self.tokens // BLOCK) + 8
        widths = (512, 64) if layout is MLA_BF16 else (layout.head_dim,)
        rows = [[arrays.rows(self.tokens, width) for width in widths] for _ in range(sets)]
        caches = [_allocated(layout, blocks, sizes.xp) for _ in range(sets)]
        slots = [slots_of(arrays, self.tokens, blocks) for _ in range(sets)]
        options: dict[str, Any] = {"layout": layout} if self.op == "quantize_and_insert_k_cache" else {}
        if layout is INDEXER_MXFP4:
            options["quant_block_size"] = layout.scale_tile
        which = sample(self.tokens)
        cache = _allocated(layout, -(-len(which) // BLOCK), np)
        call(*(to_host(x)[which] for x in rows[0]), cache, np.arange(len(which)), **options, backend="reference")
        want = token_bytes(layout, cache, np.arange(len(which)))

        def check(_: Any) -> float:
            np.testing.assert_array_equal(token_bytes(layout, caches[0], to_host(slots[0])[which]), want)
            return 0.0

        given = [(*x, *more) for x, *more in zip(rows, caches, slots, strict=True)]
        theirs = {
            INDEXER_FP8: Peer("vllm", peers.VLLM_KEYS, peers.vllm_insert_keys, given),
            MLA_BF16: Peer("vllm", peers.VLLM_CONCAT, peers.vllm_concat, given),
        }
        return problem_of(
            self, sizes, by_backend(call, given, **options), moved, check, lambda: caches[0].fill(0xA5),
            peer=theirs.get(layout), copied=self.tokens >= LARGE,
        )  # fmt: skip


def _allocated(layout: CacheLayout, blocks: int, xp: Any) -> Any:
    """A cache as calls take it."""
    cache = layout.allocate(blocks, BLOCK, xp)
    return cache.view(BFLOAT16) if layout is MLA_BF16 else cache


@dataclass(frozen=True)
class QueryNormInsert:
    """Fused q-norm, RoPE and K insert of a V4 layer."""

    tokens: int
    heads: int = 64

    op: ClassVar[str] = "qnorm_rope_and_insert"

    def __str__(self) -> str:
        return f"h{self.heads} T={self.tokens}"

    def problem(self, sizes: Sizes) -> Problem:
        xp, arrays, layout = sizes.xp, Arrays(sizes), DSV4_FP8
        moved = self.tokens * (4 * self.heads * 512 + 2 * 512 + layout.token_bytes + 16)
        sets, blocks = sizes.sets(moved), -(-self.tokens // BLOCK) + 8
        q = [arrays.rows(self.tokens, self.heads, 512) for _ in range(sets)]
        kv = [arrays.rows(self.tokens, 512) for _ in range(sets)]
        caches = [layout.allocate(blocks, BLOCK, xp) for _ in range(sets)]
        slots = [slots_of(arrays, self.tokens, blocks) for _ in range(sets)]
        positions = xp.asarray(arrays.rng.integers(0, POSITIONS, self.tokens))
        angles = np.arange(POSITIONS)[:, None] * 10000.0 ** (-np.arange(32) / 32)
        table = xp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
        outs = [xp.empty((self.tokens, self.heads, 512), BFLOAT16) for _ in range(sets)]
        which = sample(self.tokens)
        page = layout.allocate(-(-len(which) // BLOCK), BLOCK)
        want = cumla.qnorm_rope_and_insert(
            to_host(q[0])[which], to_host(kv[0])[which], page, np.arange(len(which)), to_host(positions)[which],
            to_host(table), backend="reference",
        )  # fmt: skip
        rows = token_bytes(layout, page, np.arange(len(which)))

        def check(result: Any) -> float:
            got = token_bytes(layout, caches[0], to_host(slots[0])[which])
            differ = float((got != rows).mean())
            assert differ < 1e-3, f"{differ:.2%} of the bytes of rows differ"  # RoPE rounds once, in some order
            return error_within(picked(result, which), want, ROUNDED)

        given = [(*x, positions, table) for x in zip(q, kv, caches, slots, strict=True)]
        return problem_of(
            self, sizes, by_backend(cumla.qnorm_rope_and_insert, given, outs), moved, check,
            lambda: caches[0].fill(0xA5),
            peer=Peer("vllm", peers.VLLM_INSERT, peers.vllm_qnorm_rope_insert, [(*x, BLOCK) for x in given]),
        )  # fmt: skip


@dataclass(frozen=True)
class Gather:
    """Rows of requests gathered and dequantised. lengths: the window rows of a chunk, else whole contexts."""

    requests: int
    length: int
    layout: CacheLayout = DSV4_FP8
    lengths: bool = False

    op: ClassVar[str] = "dequantize_and_gather_k_cache"

    def __str__(self) -> str:
        layout = "" if self.layout is DSV4_FP8 else f"{self.layout.name} "
        return f"{layout}{self.requests} x {self.length:,}, {kind_of(self.lengths)}"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, layout = Arrays(sizes), sizes.xp, self.layout
        lens = np.full(self.requests, self.length, np.int32)
        gather_lens = None
        if self.lengths:
            lens = contexts(arrays.rng, self.requests, self.length)
            gather_lens = np.minimum(lens, lens // 4 + WINDOW - 1)
        count = lens if gather_lens is None else gather_lens
        moved = int(count.sum()) * (2 * layout.head_dim + layout.token_bytes)
        cache = repeating_cache(sizes.backend, layout, BLOCK, sizes.slots)
        columns, sets = -(-self.length // BLOCK), sizes.sets(moved)
        tables = [arrays.integers(len(cache.array), self.requests, columns) for _ in range(sets)]
        outs = [xp.empty((self.requests, int(count.max()), layout.head_dim), BFLOAT16) for _ in range(sets)]
        put = xp.asarray(lens), None if gather_lens is None else xp.asarray(gather_lens)
        tail = np.minimum(count, 16)
        want = np.zeros((self.requests, 16, layout.head_dim), BFLOAT16)
        cumla.dequantize_and_gather_k_cache(
            want, cache.base, lens, tail, to_host(tables[0]) % len(cache.base), BLOCK, 0, layout=layout,
            backend="reference",
        )  # fmt: skip

        def check(_: Any) -> float:
            for request, (end, rows) in enumerate(zip(count, tail, strict=True)):
                np.testing.assert_array_equal(to_host(outs[0][request, end - rows : end]), want[request, :rows])
            return 0.0

        given = [(out, cache.array, *put, table) for out, table in zip(outs, tables, strict=True)]
        theirs = Peer("vllm", peers.VLLM_GATHER, peers.vllm_gather, [(*x, BLOCK) for x in given])
        return problem_of(
            self, sizes, by_backend(cumla.dequantize_and_gather_k_cache, given, layout=layout), moved, check,
            lambda: outs[0].fill(7), peer=theirs if layout is DSV4_FP8 else None, copied=int(count.sum()) >= LARGE,
        )  # fmt: skip


@dataclass(frozen=True)
class DenseGather:
    """Rows of a dense layer's cache, packed."""

    requests: int
    length: int

    op: ClassVar[str] = "gather_cache"

    def __str__(self) -> str:
        return f"bfloat16 {self.requests} x {self.length:,}"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, xp, rows = Arrays(sizes), sizes.xp, self.requests * self.length
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
        arrays, xp, layout, rows = Arrays(sizes), sizes.xp, self.layout, self.requests * self.length
        moved = 2 * rows * layout.token_bytes
        cache, sets = repeating_cache(sizes.backend, layout, BLOCK, sizes.slots), sizes.sets(moved)
        tables = [arrays.integers(len(cache.array), self.requests, -(-self.length // BLOCK)) for _ in range(sets)]
        keys = [xp.empty((rows, layout.quantized_bytes), np.uint8) for _ in range(sets)]
        scales = [xp.empty((rows, layout.scale_bytes), np.uint8) for _ in range(sets)]
        starts = xp.arange(self.requests + 1, dtype=np.int32) * np.int32(self.length)
        which = sample(rows)
        request, row = np.divmod(which, self.length)
        slots = to_host(tables[0])[request, row // BLOCK].astype(np.int64) * BLOCK + row % BLOCK
        want = token_bytes(layout, cache.base, cache.in_base(slots))

        def check(_: Any) -> float:
            got = [picked(keys[0], which), picked(scales[0], which)]
            np.testing.assert_array_equal(np.concatenate(got, axis=1), want)
            return 0.0

        given = [(cache.array, *x, starts) for x in zip(keys, scales, tables, strict=True)]
        return problem_of(
            self, sizes, by_backend(cumla.cp_gather_indexer_k_quant_cache, given), moved, check,
            lambda: keys[0].fill(7), copied=rows >= LARGE,
        )  # fmt: skip


@dataclass(frozen=True)
class CopyBlocks:
    pages: int

    op: ClassVar[str] = "copy_blocks"

    def __str__(self) -> str:
        return f"{self.pages} pages of DSV4_FP8"

    def problem(self, sizes: Sizes) -> Problem:
        arrays, page_bytes = Arrays(sizes), BLOCK * DSV4_FP8.token_bytes
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
        xp, arrays, count = sizes.xp, Arrays(sizes), self.sequences
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


def insert(sizes: Sizes) -> Iterator[Insert | QueryNormInsert]:
    for tokens in sizes.tokens:
        if sizes.layout is DSV4_FP8:
            yield QueryNormInsert(tokens, sizes.heads)
        yield Insert(tokens, sizes.layout)


def gather(sizes: Sizes) -> Iterator[Gather]:
    for lengths in (True, False):
        for tokens in sizes.tokens:
            yield Gather(4 if lengths else 1, tokens, sizes.layout, lengths)


def recorded() -> list[Any]:
    return [
        *(QueryNormInsert(tokens, heads) for heads in (64, 128, 16) for tokens in (1, 32, 128, 512, 4096)),
        *(Insert(tokens) for tokens in (1, 32, 512, 4096, 32768)),
        *(Gather(*shape, lengths=True) for shape in ((4, 8192), (4, 65536))),
        *(Gather(*shape) for shape in ((1, 512), (4, 8192), (16, 8192), (4, 65536))),
        *(Insert(tokens, MLA_BF16) for tokens in (512, 4096, 32768)),
        DenseGather(4, 8192),
        KeyGather(4, 8192),
        CopyBlocks(512),
        *(AdvanceStep(sequences) for sequences in (128, 1024)),
    ]
