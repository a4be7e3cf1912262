"""What is measured of a layer's other operations: compressor, norms with RoPE, the merge of parts of attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import cumla

from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8
from .measure import sets_for
from .problem import BLOCK, Arrays, Problem, Sizes

HEAD_DIM, ROPE_DIM, POSITIONS = 512, 64, 8192
STATE_BLOCK = {4: 4, 128: 8}  # tokens of a page of states, by ratio


def compressor(sizes: Sizes) -> Iterator[Problem]:
    """A step of decodes, of which one in `ratio` completes a row, C4A's and C128A's."""
    for ratio, overlap in ((4, 2), (128, 1)):
        for batch in sizes.batch:
            yield _compress(sizes, ratio, overlap, batch)


def _compress(sizes: Sizes, ratio: int, overlap: int, batch: int) -> Problem:
    xp, arrays, width = sizes.xp, Arrays(sizes), 2 * overlap * HEAD_DIM
    state_block, window = STATE_BLOCK[ratio], overlap * ratio
    positions = POSITIONS // 2 + np.arange(batch) % ratio
    columns, pages = int(positions.max()) // state_block + 1, window // state_block + 1
    table = np.full((batch, columns), -1, np.int32)
    table[:, max(0, columns - pages) :] = np.arange(batch * min(pages, columns)).reshape(batch, -1)
    state_slots = table[np.arange(batch), positions // state_block].astype(np.int64) * state_block
    slots = np.where((positions + 1) % ratio == 0, np.arange(batch), -1)
    completed = int((slots >= 0).sum())
    moved = 4 * width * (2 * batch + completed * (window - 1)) + completed * DSV4_FP8.token_bytes
    where = [xp.asarray(x) for x in (state_slots + positions % state_block, table, slots, positions)]
    requests, starts = (xp.arange(n, dtype=np.int32) for n in (batch, batch + 1))
    weights = _floats(arrays, ratio, overlap * HEAD_DIM), _floats(arrays, HEAD_DIM)
    turns = _turns(sizes)
    calls = []
    for _ in range(sets_for(moved) if sizes.on_device else 2):
        state = _floats(arrays, int(table.max()) + 1, state_block, width)
        cache = DSV4_FP8.allocate(-(-batch // BLOCK), BLOCK, xp)
        calls.append(
            functools.partial(
                cumla.compress_and_insert, _floats(arrays, batch, width), *weights, state, where[0], where[1], cache,
                where[2], where[3], requests, starts, turns, compress_ratio=ratio, backend=sizes.backend,
            )
        )  # fmt: skip
    return Problem("compressor", f"ratio {ratio} b{batch}", {"cumla": ("cupy", calls)}, moved)


def norms(sizes: Sizes) -> Iterator[Problem]:
    """Queries normed and turned while window rows are written; the output turned back in place."""
    xp, arrays = sizes.xp, Arrays(sizes)
    turns = _turns(sizes)
    for tokens in sizes.batch:
        shape, slots = (tokens, sizes.heads, HEAD_DIM), xp.arange(tokens)
        moved = 4 * tokens * sizes.heads * HEAD_DIM + tokens * (2 * HEAD_DIM + DSV4_FP8.token_bytes)
        calls, back = [], []
        for _ in range(sets_for(moved) if sizes.on_device else 2):
            q, cache = arrays.rows(*shape), DSV4_FP8.allocate(-(-tokens // BLOCK), BLOCK, xp)
            calls.append(
                functools.partial(
                    cumla.qnorm_rope_and_insert, q, arrays.rows(tokens, HEAD_DIM), cache, slots, slots, turns,
                    out=xp.empty(shape, BFLOAT16), backend=sizes.backend,
                )
            )  # fmt: skip
            o = arrays.rows(*shape)
            back.append(
                functools.partial(cumla.apply_rope, o, slots, turns, inverse=True, out=o, backend=sizes.backend)
            )
        config = f"h{sizes.heads} T{tokens}"
        yield Problem("q-norm and insert", config, {"cumla": ("cupy", calls)}, moved)
        yield Problem("inverse RoPE", config, {"cumla": ("cupy", back)}, 4 * tokens * sizes.heads * ROPE_DIM)


def merge(sizes: Sizes) -> Iterator[Problem]:
    xp, arrays = sizes.xp, Arrays(sizes)
    for tokens in sizes.tokens:
        shape = (tokens, sizes.heads, 128)
        moved = 3 * 2 * tokens * sizes.heads * 128 + 2 * 4 * tokens * sizes.heads
        calls = []
        for _ in range(sets_for(moved) if sizes.on_device else 2):
            parts = [(arrays.rows(*shape), _floats(arrays, sizes.heads, tokens)) for _ in range(2)]
            out = xp.empty(shape, BFLOAT16)
            calls.append(functools.partial(cumla.merge_attn_states, out, *parts[0], *parts[1], backend=sizes.backend))
        yield Problem("merge", f"h{sizes.heads} T{tokens}", {"cumla": ("cupy", calls)}, moved)


def _turns(sizes: Sizes) -> Any:
    """cos and sin of one angle: turned ever again in place, values stay as large as they are."""
    return sizes.xp.full((POSITIONS, ROPE_DIM), 0.5**0.5, np.float32)


def _floats(arrays: Arrays, *shape: int) -> Any:
    return arrays.xp.asarray(arrays.rng.standard_normal(shape, np.float32))
