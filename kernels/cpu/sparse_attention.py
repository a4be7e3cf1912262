"""Sparse MLA on the CPU: Numba gathers rows, BLAS multiplies.

Each thread takes one query token at a time: it gathers the token's rows, dequantised and without gaps, into a buffer
that stays in the core's cache, multiplies there, and takes the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..numba_common.compiled import compiled
from ..types.segments import V_DIM, Pages, SparseDecode, SparsePrefill
from .rows import Geometry, copy_row, flat, float32_of_bfloat16, geometry_of, read_row, round_to_bfloat16
from .softmax import LEAST_FLOAT32, LEAST_FLOAT64, exponential, exponentials
from .threads import for_each

PRECISE_SCORE = 1024.0  # larger scores leave too few digits of float32 for their differences
LARGE_VALUE = np.float32(2.0**100)  # below it, weights that are flushed to 0 are negligible
Gather = Callable[[int, np.ndarray], int]  # fills the rows of a token and returns their number


def sparse_mla_decode(args: SparseDecode) -> None:
    """The plan is not used: every token is computed on its own."""
    q, segments, attn_sink, softmax_scale, out, lse, _, _ = args
    s_q = q.shape[1]
    caches = [(*flat(x.pages), x.indices, x.lengths, geometry_of(x.pages)) for x in segments]

    def gather(token: int, rows: np.ndarray) -> int:
        b, s = divmod(token, s_q)
        count = 0
        for memory, page_stride, num_slots, indices, lengths, geometry in caches:
            listed = indices.shape[2] if lengths is None else int(lengths[b, s])
            count = _gather_slots(rows, count, memory, page_stride, num_slots, indices[b, s], listed, geometry)
        return count

    _attend(q, sum(x.indices.shape[2] for x in segments), gather, attn_sink, softmax_scale, out, None, lse)


def sparse_mla_prefill(args: SparsePrefill) -> None:
    """Multiplies float32 values, also where the arguments allow e4m3."""
    q, kv, indices, topk_length, attn_sink, softmax_scale, out, max_logits, lse, _, _ = args
    width, append = indices.shape[1], _appending(kv)

    def gather(token: int, rows: np.ndarray) -> int:
        return append(rows, indices[token], width if topk_length is None else int(topk_length[token]))

    # As a batch of tokens with one query each.
    _attend(q[:, None], width, gather, attn_sink, softmax_scale, out[:, None], max_logits[..., None], lse[..., None])


def _appending(kv: np.ndarray | Pages) -> Callable[[np.ndarray, np.ndarray, int], int]:
    """A function (buffer, indices, number of indices in use) that fills the buffer and returns its number of rows."""
    if isinstance(kv, Pages):
        memory, geometry = flat(kv), geometry_of(kv)
        return lambda rows, indices, listed: _gather_slots(rows, 0, *memory, indices, listed, geometry)
    if kv.dtype == np.float32:
        return lambda rows, indices, listed: _gather_float32_rows(rows, kv, indices, listed)
    bits = kv.view(np.uint16)
    return lambda rows, indices, listed: _gather_rows(rows, bits, indices, listed)


def _attend(
    q: np.ndarray,
    width: int,
    gather: Gather,
    attn_sink: np.ndarray | None,
    softmax_scale: float,
    out: np.ndarray,
    max_logits: np.ndarray | None,
    lse: np.ndarray,
) -> None:
    """Attention of every token of q [b, s_q, h, d] over at most `width` rows; max_logits and lse [b, h, s_q]."""
    batch, s_q, heads, head_dim = q.shape
    if q.dtype != np.float32:  # Numba has no bfloat16
        q, out = q.view(np.uint16), out.view(np.uint16)
    sink = np.full(heads, -np.inf, np.float32) if attn_sink is None else attn_sink

    def work(tokens: Iterator[int]) -> None:
        buffers = _Buffers(heads, width, head_dim, np.float32)
        for token in tokens:
            b, s = divmod(token, s_q)
            fits = buffers.attend(token, q[b, s], gather, softmax_scale, sink, out[b, s])
            used = buffers
            if not fits:  # this token's values may exceed float32's range, or its scores need more digits
                used = _Buffers(heads, width, head_dim, np.float64)
                used.attend(token, q[b, s], gather, softmax_scale, sink, out[b, s])
            lse[b, :, s] = used.lse
            if max_logits is not None:
                max_logits[b, :, s] = used.max_logits

    for_each(batch * s_q, work)


class _Buffers:
    """Scratch memory of one thread for one token, in float32 or float64."""

    def __init__(self, heads: int, width: int, head_dim: int, dtype: Any) -> None:
        self.queries = np.empty((heads, head_dim), dtype)
        self.rows = np.empty((width, head_dim), dtype)
        self.scores = np.empty(heads * width, dtype)
        self.result = np.empty((heads, V_DIM), dtype)
        self.inv_sum = np.empty(heads, dtype)
        self.max_logits = np.empty(heads, dtype)
        self.lse = np.empty(heads, dtype)

    def attend(
        self,
        token: int,
        q: np.ndarray,
        gather: Gather,
        softmax_scale: float,
        sink: np.ndarray,
        out: np.ndarray,
    ) -> bool:
        """Write the token's output in q's type, float32 or bfloat16 viewed as uint16; max_logits and lse stay here.

        Returns whether the buffers' precision was sufficient.
        """
        count = gather(token, self.rows)
        if count == 0:
            out[...] = 0
            self.max_logits[:], self.lse[:] = -np.inf, np.inf
            return True
        rows, scores = self.rows[:count], self.scores[: len(self.queries) * count].reshape(-1, count)
        # In float64 the scores are scaled, not q: products of unscaled values are exact there. Scores that share one
        # huge product are then equal, as in the reference, and do not differ by a rounding.
        precise = rows.dtype == np.float64
        factor = 1.0 if precise else softmax_scale
        if q.dtype == np.float32:
            np.multiply(q, factor, out=self.queries)
        else:
            _scaled(self.queries, q, factor)
        np.matmul(self.queries, rows.T, out=scores)
        if precise:
            scores *= softmax_scale
        fits = _softmax(scores, rows, sink, self.max_logits, self.lse, self.inv_sum)
        np.matmul(scores, rows[:, :V_DIM], out=self.result)
        if out.dtype == np.float32:
            np.multiply(self.result, self.inv_sum[:, None], out=out, casting="same_kind")
            return fits and bool(np.isfinite(out).all())
        return bool(_store(out, self.result, self.inv_sum) and fits)


@compiled(nogil=True)
def _gather_slots(
    rows: np.ndarray,
    count: int,
    memory: np.ndarray,
    page_stride: int,
    num_slots: int,
    indices: np.ndarray,
    listed: int,
    g: Geometry,
) -> int:
    """Append the rows of the first `listed` slots, if they are in the cache, after the first `count` rows."""
    for j in range(min(listed, len(indices))):
        slot = np.int64(indices[j])
        if 0 <= slot < num_slots:
            read_row(memory[slot // g.block_size * page_stride :], slot % g.block_size, rows[count], g)
            count += 1
    return count


@compiled(nogil=True)
def _gather_rows(rows: np.ndarray, kv_bits: np.ndarray, indices: np.ndarray, listed: int) -> int:
    """Like _gather_slots, for rows of a dense workspace, bfloat16 viewed as uint16."""
    count = 0
    for j in range(min(listed, len(indices))):
        index = np.int64(indices[j])
        if 0 <= index < len(kv_bits):
            row = rows[count]
            bits = kv_bits[index]
            for d in range(len(bits)):
                row[d] = float32_of_bfloat16(bits[d])
            count += 1
    return count


@compiled(nogil=True)
def _gather_float32_rows(rows: np.ndarray, kv: np.ndarray, indices: np.ndarray, listed: int) -> int:
    """Like _gather_rows, for float32 rows."""
    count = 0
    for j in range(min(listed, len(indices))):
        index = np.int64(indices[j])
        if 0 <= index < len(kv):
            copy_row(rows[count], kv[index])
            count += 1
    return count


@compiled(nogil=True)
def _scaled(queries: np.ndarray, q_bits: np.ndarray, softmax_scale: float) -> None:
    scale = queries.dtype.type(softmax_scale)
    for head in range(len(queries)):
        row, bits = queries[head], q_bits[head]
        for d in range(len(row)):
            row[d] = float32_of_bfloat16(bits[d]) * scale


@compiled(nogil=True)
def _softmax(
    scores: np.ndarray, rows: np.ndarray, sink: np.ndarray, max_logits: np.ndarray, lse: np.ndarray, inv_sum: np.ndarray
) -> bool:
    """Replaces scores by weights; `inv_sum` is the factor of the final weighted sum.

    Returns whether all scores were finite, the differences between relevant scores fit float32's precision, and
    weights that are flushed to 0 are negligible.
    """
    fits, all_normal = True, True
    least = scores.dtype.type(LEAST_FLOAT32 if scores.itemsize == 4 else LEAST_FLOAT64)
    for head in range(len(scores)):
        row = scores[head]
        top, low = row[0], row[0]
        check = row[0] - row[0]  # 0, or NaN after a score that is not finite
        for j in range(len(row)):
            top, low = max(top, row[j]), min(low, row[j])
            check += row[j] - row[j]
        if check != 0:
            fits = False
            for j in range(len(row)):
                top = top if row[j] == row[j] else row[j]
        total = 0.0
        for j in range(len(row)):
            row[j] = exponential(row[j] - top, least)
            total += row[j]
        fits = fits and abs(top) < PRECISE_SCORE
        all_normal = all_normal and low - top >= least
        log_sum = top + np.log(total)
        max_logits[head], lse[head] = top, log_sum
        inv_sum[head] = 1.0 / (total * (1.0 + np.exp(np.float64(sink[head]) - log_sum)))
    return fits and (all_normal or not _has_large_values(rows))


@compiled(nogil=True)
def _has_large_values(rows: np.ndarray) -> bool:
    for j in range(len(rows)):  # "for row in rows" with an early exit would not be vectorised
        row, found = rows[j], False
        for d in range(V_DIM):
            found |= abs(row[d]) >= LARGE_VALUE
        if found:
            return True
    return False


@compiled(nogil=True)
def _store(out_bits: np.ndarray, result: np.ndarray, inv_sum: np.ndarray) -> bool:
    """Write result times inv_sum, rounded to bfloat16; returns whether all values are finite."""
    check = np.float32(0)
    for head in range(len(result)):
        row, bits = result[head], out_bits[head]
        for d in range(len(row)):
            x = np.float32(row[d] * inv_sum[head])
            check += x - x
            bits[d] = round_to_bfloat16(x)
    return check == 0


def merge_attn_states(
    output: np.ndarray,
    prefix_output: np.ndarray,
    prefix_lse: np.ndarray,
    suffix_output: np.ndarray,
    suffix_lse: np.ndarray,
    output_lse: np.ndarray | None,
) -> None:
    lse = np.stack([prefix_lse, suffix_lse]).astype(np.float32)
    lse[np.isposinf(lse)] = -np.inf  # +inf means that no key was attended
    top = lse.max(axis=0)
    empty = np.isneginf(top)
    weights = exponentials(lse - np.where(empty, np.float32(0), top))
    total = np.where(empty, np.float32(1), weights.sum(axis=0))
    inv_sum = (weights / total).transpose(0, 2, 1)[..., None]
    merged = np.zeros(output.shape, np.float32)
    for part, weight in zip((prefix_output, suffix_output), inv_sum, strict=True):
        # An empty part may hold any value; a NaN lse must propagate.
        merged += np.where(weight == 0, np.float32(0), weight * part.astype(np.float32))
    output[:] = merged
    if output_lse is not None:
        output_lse[:] = np.where(empty, np.float32(np.inf), top + np.log(total))
