"""The indexer on the CPU: BLAS computes the scores of several queries at a time."""

import numpy as np

from ...layout import INDEXER_MXFP4
from ..numba_common.compiled import compiled
from ..numba_common.numbers import (
    bfloat16_bits,
    bfloat16_value,
    e2m1_quantized,
    e2m1_scale,
    e2m1_value,
    e4m3_byte,
    float32_bits,
    flushed,
    power_of_two,
    quantized,
    scale_exponent,
)
from ..reference.indexer import (
    MXFP4_SHIFT,
    keys_and_scales,
    keys_of,
    packed_keys_and_scales,
    paged_mqa_logits_metadata,
    row_lens,
)
from ..reference.rows import flush_subnormals
from ..types.indexer import IndexQueries, PackedScores, PagedScores
from ..types.segments import Pages
from .norm_rope import NO_FACTORS, NO_TABLE, hadamard, head_factor
from .rows import E4M3_VALUES, largest_finite, lookup_slot
from .sparse_cache import TO_QUANTIZE
from .threads import parallel_for

__all__ = [
    "fused_indexer_q_rope_quant",
    "gather_keys",
    "insert_keys",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_mqa_logits_metadata",
]

ROPE_DIM, TILE = 64, INDEXER_MXFP4.scale_tile
MXFP4_GONE = 30  # a tile whose scale is 2^-30 of its head's scale or less is 0 in e4m3
PRODUCTS_AT_ONCE = 4 << 20  # 16 MiB of float32


# ---- queries


def fused_indexer_q_rope_quant(queries: IndexQueries) -> None:
    positions, index_q, table, index_weights, scale, rope_first, is_neox, least, q_format, *_, q_out, weights = queries
    with np.errstate(invalid="ignore"):  # signalling NaN
        q = index_q.astype(np.float32)
    first = 0 if rope_first else q.shape[2] - ROPE_DIM
    weights[:] = index_weights.astype(np.float32)
    quantize = q_out.dtype == np.uint8
    stored = q_out if quantize else np.empty((0, 0, 0), np.uint8)
    parallel_for(
        len(q), q[:1].size * TO_QUANTIZE, _rotate_and_quantize,
        positions, q, NO_TABLE if table is None else table.astype(np.float32), np.float32(scale), first, is_neox, least,
        q_format != "fp8", queries.hadamard, q_out.dtype != np.float32, *(queries.ssmax or NO_FACTORS), stored, weights,
    )  # fmt: skip
    if not quantize:
        q_out[:] = q


@compiled(nogil=True)
def _rotate_and_quantize(
    first_token, end_token, positions, q, table, scale, first, is_neox, least_exponent, is_mxfp4, rotates, rounded,
    scales, biases, q_out, weights,
):  # fmt: skip
    half = ROPE_DIM // 2
    for token in range(first_token, end_token):
        position = np.int64(positions[token])
        for head in range(q.shape[1]):
            x = q[token, head]
            if len(scales) > 0:
                factor = head_factor(scales[head], biases[head], position)
                for i in range(len(x)):
                    x[i] *= factor
            for i in range(half if 0 <= position < len(table) else 0):
                low = first + (i if is_neox else 2 * i)
                high = low + (half if is_neox else 1)
                cosine, sine = table[position, i], table[position, half + i]
                a, b = x[low], x[high]
                x[low], x[high] = a * cosine - b * sine, b * cosine + a * sine
            if rotates:
                hadamard(x, rounded)
            q_scale = np.float32(1)
            if len(q_out):
                for i in range(len(x)):
                    x[i] = bfloat16_value(bfloat16_bits(x[i]))
                if is_mxfp4:
                    q_scale = _to_mxfp4(x, q_out[token, head], least_exponent)
                else:
                    q_scale = power_of_two(scale_exponent(largest_finite(x, False), least_exponent))
                    for i in range(len(x)):
                        q_out[token, head, i] = quantized(x[i], q_scale)
            weights[token, head] = flushed(flushed(flushed(weights[token, head]) * q_scale) * flushed(scale))


@compiled
def _to_mxfp4(x, out, least_exponent):
    """Round x, float32 [128], to MXFP4: a row of codes and scales, or e4m3 bytes. Returns the scale of e4m3 bytes."""
    head = np.int64(least_exponent)
    for first in range(0, len(x), TILE):
        scale = e2m1_scale(largest_finite(x[first : first + TILE], True), True, least_exponent, 0.0)
        if scale == scale:
            head = max(head, (float32_bits(scale) >> 23) - 127 - MXFP4_SHIFT)
    for first in range(0, len(x), TILE):
        scale = e2m1_scale(largest_finite(x[first : first + TILE], True), True, least_exponent, 0.0)
        if len(out) != len(x):
            out[len(x) // 2 + first // TILE] = float32_bits(scale) >> 23
            for i in range(first, first + TILE, 2):
                out[i // 2] = e2m1_quantized(x[i], scale) | (e2m1_quantized(x[i + 1], scale) << 4)
        else:
            exponent = max((float32_bits(scale) >> 23) - 127 - head, -MXFP4_GONE)
            factor = scale if scale != scale else power_of_two(exponent)
            for i in range(first, first + TILE):
                out[i] = e4m3_byte(e2m1_value(e2m1_quantized(x[i], scale)) * factor)
    return power_of_two(head) if len(out) == len(x) else np.float32(1)


# ---- keys without scales


def insert_keys(k: np.ndarray, pages: Pages, slot_mapping: np.ndarray) -> None:
    inserted = np.flatnonzero((slot_mapping >= 0) & (slot_mapping < pages.num_slots))
    page, row = np.divmod(slot_mapping[inserted].astype(np.int64), pages.block_size)
    with np.errstate(invalid="ignore"):  # signalling NaN
        keys_of(pages)[page, row] = k[inserted].astype(keys_of(pages).dtype)


def gather_keys(pages: Pages, dst_k: np.ndarray, block_table: np.ndarray, cu_seq_lens: np.ndarray) -> None:
    for request in range(len(cu_seq_lens) - 1):
        first, end = max(int(cu_seq_lens[request]), 0), min(int(cu_seq_lens[request + 1]), len(dst_k))
        if end > first:
            start = first - int(cu_seq_lens[request])
            page, row, present = _slots(block_table, request, start, start + end - first, pages)
            dst_k[first:end] = 0
            dst_k[first:end][present] = keys_of(pages)[page[present], row[present]]


def _slots(
    block_table: np.ndarray, request: int, start: int, end: int, pages: Pages
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Page and row of a request's positions [start, end), and a mask of positions that the table has."""
    slots = np.empty(end - start, np.int64)
    _look_up(block_table, request, start, pages.block_size, slots)
    present = (slots >= 0) & (slots < pages.num_slots)
    return *np.divmod(slots, pages.block_size), present


@compiled
def _look_up(block_table, request, start, block_size, slots):
    for i in range(len(slots)):
        slots[i] = lookup_slot(block_table, request, np.int64(start + i), block_size)


# ---- scores


def mqa_logits(args: PackedScores) -> None:
    q, k, scales, weights, starts, ends, compressed, clean, logits = args
    firsts = np.clip(starts.astype(np.int64), 0, len(k))
    lasts = np.clip(ends.astype(np.int64), firsts, len(k))
    if scales is not None and scales.dtype == np.uint8:
        values, scales = packed_keys_and_scales(k, scales)
        keys, scales = values.astype(np.float32), None
    else:
        keys = _float32(k)
    step = max(1, PRODUCTS_AT_ONCE // max(q.shape[1] * len(k), 1))
    for begin in range(0, len(q), step):
        rows = slice(begin, begin + step)
        first, last = int(firsts[rows].min()), int(lasts[rows].max())
        found = _scores(q[rows], keys[first:last], None if scales is None else scales[first:last], weights[rows])
        for m in range(begin, min(begin + step, len(q))):
            start, end = int(firsts[m]), int(lasts[m])
            shift = start if compressed else 0
            end = min(end, shift + logits.shape[1])
            if clean:
                logits[m] = -np.inf
            logits[m, start - shift : end - shift] = found[m - begin, start - first : end - first]


def paged_mqa_logits(args: PagedScores) -> None:
    q, pages, weights, context_lens, block_table, clean, logits = args
    batch, next_n = q.shape[:2]
    lens = np.clip(row_lens(context_lens, next_n).astype(np.int64), 0, logits.shape[1]).reshape(batch, next_n)
    for request in range(batch):
        longest = int(lens[request].max())
        page, row, present = _slots(block_table, request, 0, longest, pages)
        keys, scales = _keys_and_scales(pages, page[present] * pages.block_size + row[present])
        rows = slice(request * next_n, (request + 1) * next_n)
        found = np.full((next_n, longest), -np.inf, np.float32)
        found[:, present] = _scores(q[request], keys, scales, weights[rows])
        for j in range(next_n):
            out = logits[request * next_n + j]
            if clean:
                out[:] = -np.inf
            out[: lens[request, j]] = found[j, : lens[request, j]]


def _keys_and_scales(pages: Pages, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys float32 [n, D] and the scale of each; None if keys are stored without one or have several."""
    keys, scales = keys_and_scales(pages, slots)
    return _float32(keys), scales if pages.layout.num_scales == 1 else None


def _float32(array: np.ndarray) -> np.ndarray:
    """Queries or keys in float32; bytes are e4m3."""
    if array.dtype.itemsize == 1:
        return E4M3_VALUES[array.view(np.uint8)]
    return array.astype(np.float32, copy=False)


def _scores(q: np.ndarray, keys: np.ndarray, scales: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
    """Scores [m, n] of keys [n, D] for queries [m, H, D]."""
    m, heads, dims = q.shape
    with np.errstate(all="ignore"):
        products = np.matmul(_float32(q).reshape(m * heads, dims), keys.T)
        np.maximum(products, 0, out=products)
        found = np.matmul(flush_subnormals(weights)[:, None], products.reshape(m, heads, len(keys)))[:, 0]
        return found if scales is None else found * flush_subnormals(scales)
