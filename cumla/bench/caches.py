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
        theirs = Peer("vllm", peers.vllm_gather_name(), peers.vllm_gather, [(*x, BLOCK) for x in given])
        return problem_of(
            self, sizes, by_backend(cumla.dequantize_and_gather_k_cache, given, layout=layout), moved, check,
            lambda: outs[0].fill(7), peer=theirs if layout is DSV4_FP8 else None, copied=int(count.sum()) >= LARGE,
        )  # fmt: skip


def insert(sizes: Sizes) -> Iterator[Insert | QueryNormInsert]:
    for tokens in sizes.tokens:
        if sizes.layout is DSV4_FP8:
            yield QueryNormInsert(tokens, sizes.heads)
        yield Insert(tokens, sizes.layout)


def gather(sizes: Sizes) -> Iterator[Gather]:
    for lengths in (True, False):
        for tokens in sizes.tokens:
            yield Gather(4 if lengths else 1, tokens, sizes.layout, lengths)
