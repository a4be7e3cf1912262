"""A layer's other operations: the compressor, inverse RoPE, the merge of partial attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla import specs
from cumla.arrays.memory import to_host
from cumla.bench.caches import QueryNormInsert, sample
from cumla.bench.problem import BLOCK, Problem, Sizes, calls_of, error_within, on_host, picked, problem_of
from cumla.bounds import ROUNDED
from cumla.dispatch.call import BFLOAT16
from cumla.layout import DSV4_FP8, INDEXER_FP8
from cumla.metadata.slots import ring_capacity
from cumla.models.step import STATE_BLOCK_SIZES

HEAD_DIM, ROPE_DIM, POSITIONS, CONTEXT = 512, 64, 8192, 4096


@dataclass(frozen=True)
class Compress:
    """Decodes, of which one in `ratio` completes a row, or a prompt.

    States are saved of the tokens that a later step reads: all of a decode, the last ones of a prompt.
    """

    ratio: int
    tokens: int
    prompt: bool = False

    op: ClassVar[str] = "compress_and_insert"

    def __str__(self) -> str:
        return f"ratio {self.ratio}, {self.tokens:,} tokens, {'a prompt' if self.prompt else 'decodes'}"

    def problem(self, sizes: Sizes) -> Problem:
        tokens, ratio = self.tokens, self.ratio
        requests, pages = 1 if self.prompt else tokens, -(-tokens // BLOCK)
        x = sizes.inputs(
            requests=requests, tokens=tokens, context=0 if self.prompt else CONTEXT, pages=pages, lengths=False,
            stagger=ratio,
        )  # fmt: skip
        arguments = specs.compressor.compress(x, DSV4_FP8, ratio=ratio)
        saved, slots = (to_host(arguments[name]) >= 0 for name in ("state_slot_mapping", "slot_mapping"))
        completed, width = np.flatnonzero(slots), arguments["kv_score"].shape[1]
        moved = 4 * width * (tokens + int(saved.sum())) + len(completed) * DSV4_FP8.token_bytes
        if not self.prompt:
            moved += len(completed) * (width // (2 * HEAD_DIM) * ratio - 1) * 4 * 2 * HEAD_DIM
        sets = [arguments, *(specs.compressor.compress(x, DSV4_FP8, ratio=ratio) for _ in range(sizes.sets(moved) - 1))]
        state, cache = arguments["state_cache"], arguments["k_cache"]
        before = state.copy()
        host = {**on_host(arguments), "k_cache": DSV4_FP8.allocate(len(cache), BLOCK)}
        cumla.compress_and_insert(**host, backend="cpu")

        def check(_: Any) -> float:
            np.testing.assert_allclose(to_host(state), host["state_cache"], rtol=1e-6)
            got, want = (_first_rows(x, tokens)[completed] for x in (to_host(cache), host["k_cache"]))
            error = float(np.abs(got - want).max(initial=0.0))
            assert error <= np.abs(want).max(initial=0.0) / 8, error  # a step of e4m3: it rounds once, in some order
            return error

        def clear() -> None:
            cache.fill(0)
            state[...] = before

        calls = calls_of(cumla.compress_and_insert, sets)
        return problem_of(self, sizes, calls, moved, check, clear, copied=moved > 1 << 24)


@dataclass(frozen=True)
class CompressLatents:
    """V4.1's compressor: decodes of `each` tokens with rings, every other position at an odd one, or a prompt."""

    ratio: int
    tokens: int
    each: int = 1
    prompt: bool = False

    op: ClassVar[str] = "compress_latents"

    def __str__(self) -> str:
        what = "a prompt" if self.prompt else "decodes" if self.each == 1 else f"decodes of {self.each} tokens"
        return f"ratio {self.ratio}, {self.tokens:,} tokens, {what}"

    def problem(self, sizes: Sizes) -> Problem:
        tokens, ratio = self.tokens, self.ratio
        each = tokens if self.prompt else self.each
        requests, capacity = tokens // each, ring_capacity(each - 1 if each < 8 else 0)
        x = sizes.inputs(
            requests=requests, tokens=tokens, context=0 if self.prompt else CONTEXT, lengths=False, stagger=2
        )  # fmt: skip
        completed = np.flatnonzero((x.step.positions + 1) % ratio == 0)
        saved = requests * min(each, capacity) if ratio == 2 else 0
        pooled = len(completed) * ratio * 4 * HEAD_DIM * ratio
        moved = pooled + len(completed) * 2 * HEAD_DIM + saved * 2 * 4 * 2 * HEAD_DIM
        sets = [specs.latents.compress(x, ratio, BFLOAT16, capacity, restart=False) for _ in range(sizes.sets(moved))]
        out, state = sets[0]["latents"], sets[0].get("state_cache")
        before = None if state is None else state.copy()
        host = on_host(sets[0])
        cumla.compress_latents(**host, backend="cpu")

        def check(_: Any) -> float:
            if state is not None:
                np.testing.assert_array_equal(to_host(state), host["state_cache"])
            got, want = (x[completed].astype(np.float32) for x in (to_host(out), host["latents"]))
            return error_within(got, want, ROUNDED)

        def clear() -> None:
            out.fill(0)
            if state is not None:
                state[...] = before

        calls = calls_of(cumla.compress_latents, sets)
        return problem_of(self, sizes, calls, moved, check, clear, copied=moved > 1 << 21)


@dataclass(frozen=True)
class PooledKeys:
    """GLM-5.3-Flash's index keys of four tokens: decodes, of which every fourth completes a key, or a prompt."""

    tokens: int
    prompt: bool = False

    op: ClassVar[str] = "indexer_kpool_and_insert"

    def __str__(self) -> str:
        return f"pools of 4, {self.tokens:,} tokens, {'a prompt' if self.prompt else 'decodes'}"

    def problem(self, sizes: Sizes) -> Problem:
        tokens, pool, width = self.tokens, 4, 2 * 2 * INDEXER_FP8.head_dim
        requests, capacity = 1 if self.prompt else tokens, ring_capacity(0, pool)
        x = sizes.inputs(
            requests=requests, tokens=tokens, context=0 if self.prompt else CONTEXT, pages=-(-tokens // BLOCK),
            lengths=False, stagger=pool,
        )  # fmt: skip
        completed = int(((x.step.positions + 1) % pool == 0).sum())
        moved = width * (tokens + requests * min(tokens // requests, capacity)) + completed * INDEXER_FP8.token_bytes
        if not self.prompt:
            moved += completed * (pool - 1) * width  # from rings
        sets = [
            specs.key_pools.pooled_keys(x, INDEXER_FP8, pool, capacity, BFLOAT16, restart=False)
            for _ in range(sizes.sets(moved))
        ]
        cache, state = sets[0]["k_cache"], sets[0]["state_cache"]
        before, host = state.copy(), on_host(sets[0])
        cumla.indexer_kpool_and_insert(**host, backend="cpu")

        def check(_: Any) -> float:
            got, want = (x.astype(np.float32) for x in (to_host(state), host["state_cache"]))
            error = error_within(got, want, ROUNDED)
            same = to_host(cache) == host["k_cache"]
            assert same.mean() > 0.99, same.mean()  # a sum that rounds otherwise is another code
            return error

        def clear() -> None:
            cache.fill(0)
            state[...] = before

        calls = calls_of(cumla.indexer_kpool_and_insert, sets)
        return problem_of(self, sizes, calls, moved, check, clear, copied=moved > 1 << 21)


def _first_rows(cache: np.ndarray, tokens: int) -> np.ndarray:
    """The first rows of a cache on the host, dequantised."""
    pages, out = DSV4_FP8.allocate(len(cache), BLOCK), np.empty((1, tokens, HEAD_DIM), np.float32)
    pages[...] = cache
    lens, table = np.array([tokens], np.int32), np.arange(len(pages), dtype=np.int32)[None]
    cumla.dequantize_and_gather_k_cache(out, pages, lens, None, table, BLOCK, 0)
    return out[0]


@dataclass(frozen=True)
class InverseRope:
    """RoPE of the output undone in place."""

    tokens: int
    heads: int

    op: ClassVar[str] = "apply_rope"

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.heads} heads, in place"

    def problem(self, sizes: Sizes) -> Problem:
        which, moved = sample(self.tokens), 4 * self.tokens * self.heads * HEAD_DIM
        x = sizes.inputs(rows=self.tokens, heads=self.heads, context=POSITIONS)
        sets = [specs.norm_rope.rope(x, inverse=True, dim=HEAD_DIM) for _ in range(sizes.sets(moved // 2, 3))]
        outs = [arguments["x"] for arguments in sets]
        before, host = outs[0].copy(), on_host(sets[0])
        want = cumla.apply_rope(
            host["x"][which], host["positions"][which], host["cos_sin_cache"], inverse=True, backend="reference"
        )

        def clear() -> None:
            outs[0].view(np.uint16)[...] = before.view(np.uint16)

        return problem_of(
            self, sizes, calls_of(cumla.apply_rope, sets, outs), 4 * self.tokens * self.heads * ROPE_DIM,
            lambda result: error_within(picked(result, which), want, ROUNDED), clear,
        )  # fmt: skip


@dataclass(frozen=True)
class Merge:
    """Attention over two sets of keys."""

    tokens: int
    heads: int
    width: int = HEAD_DIM

    op: ClassVar[str] = "merge_attn_states"

    def __str__(self) -> str:
        return f"T {self.tokens} h{self.heads}" + ("" if self.width == HEAD_DIM else f" d{self.width}")

    def problem(self, sizes: Sizes) -> Problem:
        x, which = sizes.inputs(tokens=self.tokens, heads=self.heads), sample(self.tokens)
        moved = 3 * self.tokens * self.heads * (2 * self.width + 4)
        sets = [specs.sparse_attention.merge(x, self.width, BFLOAT16) for _ in range(sizes.sets(moved))]
        out, host = sets[0]["output"], on_host(sets[0])
        sampled = {name: array[which] if array.ndim == 3 else array[:, which] for name, array in host.items()}
        sampled = {name: np.ascontiguousarray(array) for name, array in sampled.items()}
        cumla.merge_attn_states(**sampled, backend="reference")
        return problem_of(
            self, sizes, calls_of(cumla.merge_attn_states, sets), moved,
            lambda _: error_within(picked(out, which), sampled["output"], ROUNDED), lambda: out.fill(0),
        )  # fmt: skip


def compressor(sizes: Sizes) -> Iterator[Compress | CompressLatents | PooledKeys]:
    for ratio in STATE_BLOCK_SIZES:
        yield from (Compress(ratio, batch) for batch in sizes.batch)
    yield from (CompressLatents(2, batch) for batch in sizes.batch)
    yield from (PooledKeys(batch) for batch in sizes.batch)


def norms(sizes: Sizes) -> Iterator[QueryNormInsert | InverseRope]:
    for tokens in sizes.batch:
        yield QueryNormInsert(tokens, sizes.heads)
        yield InverseRope(tokens, sizes.heads)


def merges(sizes: Sizes) -> Iterator[Merge]:
    """Parts of a dense layer's prefill."""
    yield from (Merge(tokens, sizes.heads, 128) for tokens in sizes.tokens)
