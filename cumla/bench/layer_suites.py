"""A layer's other operations: the compressor, inverse RoPE, the merge of partial attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..bounds import ROUNDED
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8
from ..metadata.slots import ring_capacity
from .caches import QueryNormInsert, sample
from .problem import BLOCK, Problem, Sizes, by_backend, error_within, picked, problem_of

HEAD_DIM, ROPE_DIM, POSITIONS, CONTEXT = 512, 64, 8192, 4096
STATE_BLOCK = {4: 4, 128: 8}  # tokens of a page of states, by ratio


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
        arrays, xp, tokens, ratio = sizes.inputs(), sizes.xp, self.tokens, self.ratio
        state_block, overlap = STATE_BLOCK[ratio], 2 if ratio == 4 else 1
        requests, window, width = 1 if self.prompt else tokens, overlap * ratio, 2 * overlap * HEAD_DIM
        each = np.arange(tokens)
        positions, request_of = (each, each * 0) if self.prompt else (CONTEXT + each % ratio, each)
        columns, pages = int(positions.max()) // state_block + 1, -(-window // state_block) + 1
        table = np.full((requests, columns), -1, np.int32)  # of each request, the last pages
        last = min(pages, columns)
        table[:, columns - last :] = pages * np.arange(requests)[:, None] + np.arange(last)
        page = table[request_of, positions // state_block].astype(np.int64)
        state_slots = np.where(page < 0, -1, page * state_block + positions % state_block)
        slots = np.where((positions + 1) % ratio == 0, each, -1)
        completed = np.flatnonzero(slots >= 0)
        moved = 4 * width * (tokens + int((state_slots >= 0).sum())) + len(completed) * DSV4_FP8.token_bytes
        if not self.prompt:
            moved += len(completed) * (window - 1) * 4 * 2 * HEAD_DIM
        weights = arrays.floats(ratio, overlap * HEAD_DIM), arrays.floats(HEAD_DIM)
        where = [xp.asarray(x) for x in (state_slots, table, slots, positions, request_of.astype(np.int32))]
        starts = np.array([0, tokens], np.int32) if self.prompt else np.arange(tokens + 1, dtype=np.int32)
        score, state = arrays.floats(tokens, width), arrays.floats(requests * pages, state_block, width)
        given = []
        for _ in range(sizes.sets(moved)):
            cache = DSV4_FP8.allocate(-(-tokens // BLOCK), BLOCK, xp)
            given.append((
                score.copy(), *weights, state.copy(), where[0], where[1], cache, where[2], where[3], where[4],
                xp.asarray(starts), _rotation(sizes),
            ))  # fmt: skip
        states, cache = given[0][3], given[0][6]
        on_host = [to_host(x) for x in given[0]]
        on_host[6] = DSV4_FP8.allocate(len(cache), BLOCK)
        cumla.compress_and_insert(*on_host, compress_ratio=ratio, backend="cpu")

        def check(_: Any) -> float:
            np.testing.assert_allclose(to_host(states), on_host[3], rtol=1e-6)
            got, want = (_first_rows(x, tokens)[completed] for x in (to_host(cache), on_host[6]))
            error = float(np.abs(got - want).max(initial=0.0))
            assert error <= np.abs(want).max(initial=0.0) / 8, error  # a step of e4m3: it rounds once, in some order
            return error

        def clear() -> None:
            cache.fill(0)
            states[...] = state

        calls = by_backend(cumla.compress_and_insert, given, compress_ratio=ratio)
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
        arrays, xp, tokens, ratio = sizes.inputs(), sizes.xp, self.tokens, self.ratio
        each = tokens if self.prompt else self.each
        requests, capacity = tokens // each, ring_capacity(each - 1 if each < 8 else 0)
        first = np.zeros(requests, np.int64) if self.prompt else CONTEXT + np.arange(requests)
        positions = (first[:, None] + np.arange(each)).ravel()
        slots = np.repeat(np.arange(requests), each) * capacity + positions % capacity
        completed = np.flatnonzero((positions + 1) % ratio == 0)
        saved = requests * min(each, capacity) if ratio == 2 else 0
        pooled = len(completed) * ratio * 4 * HEAD_DIM * ratio
        moved = pooled + len(completed) * 2 * HEAD_DIM + saved * 2 * 4 * 2 * HEAD_DIM
        weight, score = arrays.rows(HEAD_DIM), arrays.floats(tokens, ratio * HEAD_DIM)
        state = arrays.floats(requests, capacity, 2 * HEAD_DIM)
        starts = xp.asarray(np.arange(0, tokens + 1, each, dtype=np.int32))
        where, of_tokens = xp.asarray(slots), xp.asarray(positions)
        given = []
        for _ in range(sizes.sets(moved)):
            rings = (of_tokens, starts, state.copy()) if ratio == 2 else (None, None, None)
            given.append((score.copy(), weight, where, xp.zeros((tokens, HEAD_DIM), BFLOAT16), *rings))
        out: Any = given[0][3]
        on_host: list[Any] = [x if x is None else to_host(x).copy() for x in given[0]]
        _compress_latents(*on_host, ratio=ratio, backend="cpu")

        def check(_: Any) -> float:
            if ratio == 2:
                np.testing.assert_array_equal(to_host(given[0][6]), on_host[6])
            got, want = (x[completed].astype(np.float32) for x in (to_host(out), on_host[3]))
            return error_within(got, want, ROUNDED)

        def clear() -> None:
            out.fill(0)
            if ratio == 2:
                given[0][6][...] = state

        calls = by_backend(_compress_latents, given, ratio=ratio)
        return problem_of(self, sizes, calls, moved, check, clear, copied=moved > 1 << 21)


def _compress_latents(
    score: Any, weight: Any, slots: Any, out: Any, positions: Any, starts: Any, state: Any, *, ratio: int, backend: str
) -> None:
    cumla.compress_latents(
        score, weight, slots, out, compress_ratio=ratio, positions=positions, query_start_loc=starts, state_cache=state,
        backend=backend,
    )  # fmt: skip


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
        arrays, which = sizes.inputs(), sample(self.tokens)
        shape = self.tokens, self.heads, HEAD_DIM
        outs = [arrays.rows(*shape) for _ in range(sizes.sets(2 * int(np.prod(shape)), 3))]
        before, positions, table = outs[0].copy(), sizes.xp.arange(self.tokens), _rotation(sizes)
        want = cumla.apply_rope(
            picked(before, which), which, to_host(table), inverse=True, backend="reference"
        )  # fmt: skip

        def clear() -> None:
            outs[0].view(np.uint16)[...] = before.view(np.uint16)

        return problem_of(
            self, sizes, by_backend(cumla.apply_rope, [(o, positions, table) for o in outs], outs, inverse=True),
            4 * self.tokens * self.heads * ROPE_DIM,
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
        arrays, xp, which = sizes.inputs(), sizes.xp, sample(self.tokens)
        shape, sums = (self.tokens, self.heads, self.width), (self.heads, self.tokens)
        moved, given = 3 * self.tokens * self.heads * (2 * self.width + 4), []
        for _ in range(sizes.sets(moved)):
            parts = [(arrays.rows(*shape), arrays.floats(*sums)) for _ in range(2)]
            given.append((xp.empty(shape, BFLOAT16), *parts[0], *parts[1], xp.empty(sums, np.float32)))
        out = given[0][0]
        want = np.empty((len(which), *shape[1:]), BFLOAT16)
        on_host = [picked(x, which) if x.ndim == 3 else np.ascontiguousarray(to_host(x)[:, which]) for x in given[0]]
        cumla.merge_attn_states(want, *on_host[1:], backend="reference")
        return problem_of(
            self, sizes, by_backend(cumla.merge_attn_states, given), moved,
            lambda _: error_within(picked(out, which), want, ROUNDED), lambda: out.fill(0),
        )  # fmt: skip


def _rotation(sizes: Sizes) -> Any:
    """cos and sin of one angle: rotated repeatedly in place, values stay as large as they are."""
    return sizes.xp.full((POSITIONS, ROPE_DIM), 0.5**0.5, np.float32)


def compressor(sizes: Sizes) -> Iterator[Compress | CompressLatents]:
    for ratio in STATE_BLOCK:
        yield from (Compress(ratio, batch) for batch in sizes.batch)
    yield from (CompressLatents(2, batch) for batch in sizes.batch)


def norms(sizes: Sizes) -> Iterator[QueryNormInsert | InverseRope]:
    for tokens in sizes.batch:
        yield QueryNormInsert(tokens, sizes.heads)
        yield InverseRope(tokens, sizes.heads)


def merge(sizes: Sizes) -> Iterator[Merge]:
    """Parts of a dense layer's prefill."""
    yield from (Merge(tokens, sizes.heads, 128) for tokens in sizes.tokens)
