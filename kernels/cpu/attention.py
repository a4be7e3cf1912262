"""Sparse MLA on the CPU: rows are gathered by Numba, products are BLAS's.

Work goes in chunks of query tokens so that the gathered rows stay within a few dozen megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit, prange

from ..segments import Segment
from .rows import Geometry, geometry_of, read_row

V_DIM = 512
CHUNK_VALUES = 8 << 20  # gathered values in flight: 32 MB of float32
# Products of larger values could leave float32: such a chunk is computed in float64.
FLOAT32_SAFE = 1e30


def sparse_mla_decode(
    q: np.ndarray,
    segments: Sequence[Segment],
    attn_sink: np.ndarray | None,
    softmax_scale: float,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    batch, s_q, heads, head_dim = q.shape
    width = sum(x.indices.shape[2] for x in segments)
    tokens = batch * s_q
    q_rows = q.reshape(tokens, heads, head_dim)
    lists = [_flatten(x, tokens) for x in segments]

    def gather(chunk: slice, rows: np.ndarray, present: np.ndarray) -> None:
        column = 0
        for segment, (indices, lengths) in zip(segments, lists, strict=True):
            _gather_slots(
                rows, present, column, segment.pages.bytes, indices[chunk], lengths[chunk], geometry_of(segment.pages)
            )
            column += indices.shape[1]

    for chunk, result, _, log_sum in _attend(q_rows, width, gather, attn_sink, softmax_scale):
        where = np.unravel_index(np.arange(chunk.start, chunk.stop), (batch, s_q))
        out[where] = result
        lse[where[0], :, where[1]] = log_sum


def sparse_mla_prefill(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    topk_length: np.ndarray | None,
    attn_sink: np.ndarray | None,
    softmax_scale: float,
    out: np.ndarray,
    max_logits: np.ndarray,
    lse: np.ndarray,
) -> None:
    tokens, width = indices.shape
    lengths = np.full(tokens, width, np.int64) if topk_length is None else topk_length.astype(np.int64)
    bits = np.ascontiguousarray(kv).view(np.uint16)

    def gather(chunk: slice, rows: np.ndarray, present: np.ndarray) -> None:
        _gather_rows(rows, present, bits, np.ascontiguousarray(indices[chunk]), lengths[chunk])

    for chunk, result, top, log_sum in _attend(q, width, gather, attn_sink, softmax_scale):
        out[chunk], max_logits[chunk], lse[chunk] = result, top, log_sum


def _flatten(segment: Segment, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A segment's indices [tokens, topk] and lengths [tokens]."""
    indices = np.ascontiguousarray(segment.indices).reshape(tokens, -1)
    if segment.lengths is None:
        return indices, np.full(tokens, indices.shape[1], np.int64)
    return indices, segment.lengths.reshape(tokens).astype(np.int64)


def _attend(q: np.ndarray, width: int, gather: Any, attn_sink: np.ndarray | None, softmax_scale: float) -> Any:
    """Yield (chunk of tokens, out, max_logits, lse) until every token of q [tokens, heads, head_dim] is done."""
    tokens, heads, head_dim = q.shape
    step = max(1, CHUNK_VALUES // max(1, width * head_dim))
    sink = np.full(heads, -np.inf, np.float32) if attn_sink is None else attn_sink
    for start in range(0, tokens, step):
        chunk = slice(start, min(start + step, tokens))
        size = chunk.stop - start
        queries = q[chunk].astype(np.float32)
        rows = np.empty((size, width, head_dim), np.float32)
        present = np.empty((size, width), np.bool_)
        gather(chunk, rows, present)
        if _largest(queries) * _largest(rows) * head_dim * max(1.0, abs(softmax_scale)) > FLOAT32_SAFE:
            queries, rows = queries.astype(np.float64), np.empty(rows.shape, np.float64)
            gather(chunk, rows, present)
        scores = np.matmul(queries * queries.dtype.type(softmax_scale), rows.transpose(0, 2, 1))
        max_logits = np.empty((size, heads), np.float32)
        lse = np.empty((size, heads), np.float32)
        share = np.empty((size, heads), scores.dtype)
        _softmax(scores, present, sink, max_logits, lse, share)
        out = np.matmul(scores, rows[:, :, :V_DIM])
        out *= share[:, :, None]
        yield chunk, out, max_logits, lse


def _largest(x: np.ndarray) -> float:
    """Largest magnitude, infinity included, NaN left out."""
    if x.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        return float(np.fmax(np.fmax.reduce(x, axis=None), -np.fmin.reduce(x, axis=None)))


@njit(parallel=True, cache=True)
def _gather_slots(
    rows: np.ndarray,
    present: np.ndarray,
    column: int,
    pages: np.ndarray,
    indices: np.ndarray,
    lengths: np.ndarray,
    g: Geometry,
) -> None:
    num_slots = pages.shape[0] * g.block_size
    tokens, topk = indices.shape
    for i in prange(tokens * topk):
        token, j = i // topk, i % topk
        slot = np.int64(indices[token, j])
        found = j < lengths[token] and 0 <= slot < num_slots
        present[token, column + j] = found
        if found:
            read_row(pages[slot // g.block_size], slot % g.block_size, rows[token, column + j], g)
        else:
            rows[token, column + j] = 0


@njit(parallel=True, cache=True)
def _gather_rows(
    rows: np.ndarray, present: np.ndarray, kv_bits: np.ndarray, indices: np.ndarray, lengths: np.ndarray
) -> None:
    tokens, topk = indices.shape
    for i in prange(tokens * topk):
        token, j = i // topk, i % topk
        index = indices[token, j]
        found = j < lengths[token] and 0 <= index < kv_bits.shape[0]
        present[token, j] = found
        if found:
            for d in range(kv_bits.shape[1]):
                bits = np.uint32(kv_bits[index, d]) << np.uint32(16)
                rows[token, j, d] = np.uint32(bits).view(np.float32)
        else:
            rows[token, j] = 0


@njit(parallel=True, cache=True)
def _softmax(
    scores: np.ndarray,
    present: np.ndarray,
    sink: np.ndarray,
    max_logits: np.ndarray,
    lse: np.ndarray,
    share: np.ndarray,
) -> None:
    """Scores become weights in place; `share` is what the weighted sum is multiplied by at the end."""
    size, heads, width = scores.shape
    for i in prange(size * heads):
        token, head = i // heads, i % heads
        row = scores[token, head]
        top = -np.inf
        poisoned = False
        for j in range(width):
            if present[token, j]:
                poisoned = poisoned or row[j] != row[j]
                top = max(top, np.float64(row[j]))
        if top == -np.inf and not poisoned:
            row[:] = 0
            max_logits[token, head], lse[token, head], share[token, head] = -np.inf, np.inf, 0
            continue
        if poisoned:
            top = np.nan
        total = 0.0
        for j in range(width):
            weight = np.exp(row[j] - top) if present[token, j] else 0.0
            row[j] = weight
            total += weight
        log_sum = top + np.log(total)
        max_logits[token, head] = top
        lse[token, head] = log_sum
        share[token, head] = 1.0 / (total * (1.0 + np.exp(np.float64(sink[head]) - log_sum)))


def merge_attn_states(
    output: np.ndarray,
    prefix_output: np.ndarray,
    prefix_lse: np.ndarray,
    suffix_output: np.ndarray,
    suffix_lse: np.ndarray,
    output_lse: np.ndarray | None,
) -> None:
    lse = np.stack([prefix_lse, suffix_lse]).astype(np.float32)
    lse[np.isposinf(lse)] = -np.inf  # +inf says that nothing was attended
    top = lse.max(axis=0)
    empty = np.isneginf(top)
    weights = np.exp(lse - np.where(empty, np.float32(0), top))
    total = np.where(empty, np.float32(1), weights.sum(axis=0))
    share = (weights / total).transpose(0, 2, 1)[..., None]
    merged = np.zeros(output.shape, np.float32)
    for part, weight in zip((prefix_output, suffix_output), share, strict=True):
        # An empty part may hold anything; a NaN lse must show.
        merged += np.where(weight == 0, np.float32(0), weight * part.astype(np.float32))
    output[:] = merged
    if output_lse is not None:
        output_lse[:] = np.where(empty, np.float32(np.inf), top + np.log(total))
