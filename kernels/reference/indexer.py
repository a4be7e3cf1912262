"""The indexer, query by query in float64."""

import ml_dtypes
import numpy as np

from ...layout import INDEXER_MXFP4
from ..types.indexer import IndexQueries, PackedScores, PagedScores
from ..types.segments import Pages
from . import rows as token_rows
from .norm_rope import hadamard_rotated, head_factors
from .rows import (
    flush_subnormals,
    lookup_slot,
    quantize_tiles,
    quantized_values,
    read_tokens,
    scale_bytes,
    scale_exponent,
    to_e4m3,
)

ROPE_DIM = 64
MXFP4_SHIFT = 6  # 6 * 2^6 is below 448; 0.5 * 2^6 * 2^-14 is the smallest number of e4m3


def fused_indexer_q_rope_quant(queries: IndexQueries) -> None:
    positions, index_q, table, index_weights, scale, rope_first, is_neox, least, q_format, *_, q_out, weights = queries
    q = index_q.astype(np.float32)
    if queries.ssmax is not None:
        q *= head_factors(queries.ssmax, positions).astype(np.float32)[:, :, None]
    if table is not None:
        part = q[..., :ROPE_DIM] if rope_first else q[..., -ROPE_DIM:]
        rotate(part, positions, table.astype(np.float32), is_neox)
    if queries.hadamard:
        if q_out.dtype != np.float32:
            q = q.astype(ml_dtypes.bfloat16)
        q = hadamard_rotated(q.astype(np.float64)).astype(np.float32)
    head_weights, factor = flush_subnormals(index_weights.astype(np.float32)), flush_subnormals(np.float32(scale))
    if q_out.dtype != np.uint8:
        q_out[:], weights[:] = q, flush_subnormals(head_weights * factor)
        return
    q = q.astype(ml_dtypes.bfloat16).astype(np.float32)
    for token, head in np.ndindex(weights.shape):
        if q_format == "fp8":
            q_out[token, head], q_scale = e4m3_query(q[token, head], least)
        else:
            codes, scales = mxfp4_query(q[token, head])
            if q_format == "mxfp4_rows":
                q_out[token, head], q_scale = np.append(codes, scale_bytes(scales, INDEXER_MXFP4.scale_type)), 1.0
            else:
                q_out[token, head], q_scale = mxfp4_in_e4m3(codes, scales, least)
        weights[token, head] = flush_subnormals(
            flush_subnormals(head_weights[token, head] * np.float32(q_scale)) * factor
        )


def e4m3_query(x: np.ndarray, least_exponent: int) -> tuple[np.ndarray, float]:
    """float32 [128] as e4m3 bytes, and their scale."""
    finite = np.where(np.isfinite(x), np.abs(x), np.float32(0))
    scale = np.ldexp(1.0, scale_exponent(finite.max(), least_exponent))
    with np.errstate(invalid="ignore"):  # signalling NaN
        return to_e4m3(x / np.float32(scale)), float(scale)


def mxfp4_query(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [128] as bytes of two codes [64], and a scale for each tile, float32 [4]."""
    codes, scales = quantize_tiles(x.reshape(INDEXER_MXFP4.num_scales, -1), INDEXER_MXFP4, True)
    return codes.reshape(-1), scales


def mxfp4_in_e4m3(codes: np.ndarray, scales: np.ndarray, least_exponent: int) -> tuple[np.ndarray, float]:
    """The same values as e4m3 bytes with one scale, the largest scale times 2^-6."""
    exponents = np.where(scales > 0, np.frexp(scales)[1] - 1, least_exponent)  # NaN's too
    head = max(int(exponents.max()) - MXFP4_SHIFT, least_exponent)
    tiles = np.repeat(scales.astype(np.float64), INDEXER_MXFP4.scale_tile) * np.ldexp(1.0, -head)
    return to_e4m3(quantized_values(codes[None], INDEXER_MXFP4)[0] * tiles), float(np.ldexp(1.0, head))


def rotate(x: np.ndarray, positions: np.ndarray, table: np.ndarray, is_neox: bool) -> None:
    """RoPE of x, float32 [T, H, 64], in place; positions outside the table, [P, 64], are not rotated."""
    for token, position in enumerate(positions):
        if not 0 <= position < len(table):
            continue
        cosines, sines = table[position, : ROPE_DIM // 2], table[position, ROPE_DIM // 2 :]
        first = x[token, :, : ROPE_DIM // 2] if is_neox else x[token, :, 0::2]
        second = x[token, :, ROPE_DIM // 2 :] if is_neox else x[token, :, 1::2]
        first[:], second[:] = first * cosines - second * sines, second * cosines + first * sines


def insert_keys(k: np.ndarray, pages: Pages, slot_mapping: np.ndarray) -> None:
    """Write rows, without quantisation, into the slots of a cache without scales."""
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < pages.num_slots:
            page, row = divmod(int(slot), pages.block_size)
            keys_of(pages)[page, row] = k[token]


def gather_keys(pages: Pages, dst_k: np.ndarray, block_table: np.ndarray, cu_seq_lens: np.ndarray) -> None:
    """Packed rows of whole sequences from a cache without scales; absent rows are zeros."""
    for request in range(len(cu_seq_lens) - 1):
        first, end = int(cu_seq_lens[request]), int(cu_seq_lens[request + 1])
        for row in range(max(first, 0), min(end, len(dst_k))):
            slot = lookup_slot(block_table, request, row - first, pages.block_size)
            present = 0 <= slot < pages.num_slots
            dst_k[row] = keys_of(pages)[divmod(slot, pages.block_size)] if present else 0


def keys_of(pages: Pages) -> np.ndarray:
    """The keys of a cache, [blocks, block_size, head_dim], in their stored type."""
    layout = pages.layout
    blocks = len(pages.bytes)
    rows = pages.bytes[:, : pages.block_size * layout.row_bytes]
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16}.get(layout.value_type, np.float32)
    return rows.view(kind).reshape(blocks, pages.block_size, layout.head_dim)


def scales_of(pages: Pages) -> np.ndarray:
    """The scales of a cache, float32 [blocks, block_size]."""
    layout = pages.layout
    if not layout.num_scales:
        return np.ones((len(pages.bytes), pages.block_size), np.float32)
    start = layout.scale_start(pages.block_size)
    return np.ascontiguousarray(pages.bytes[:, start : start + pages.block_size * layout.scale_bytes]).view(np.float32)


def keys_and_scales(pages: Pages, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys [n, D] and the scale of each; e2m1 keys are multiplied by their scales and get a scale of 1."""
    if pages.layout.value_type == "e2m1":
        return read_tokens(pages, slots), np.ones(len(slots), np.float32)
    where = np.divmod(slots, pages.block_size)
    return keys_of(pages)[where], scales_of(pages)[where]


def packed_keys_and_scales(k: np.ndarray, scales: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The same for packed keys; e2m1 keys have uint8 scales."""
    if scales is None:
        return k, np.ones(len(k), np.float32)
    if scales.dtype != np.uint8:
        return k, scales
    tiles = np.repeat(token_rows.scales_of(scales, INDEXER_MXFP4.scale_type), INDEXER_MXFP4.scale_tile, axis=1)
    return quantized_values(k, INDEXER_MXFP4) * tiles, np.ones(len(k), np.float32)


def values(array: np.ndarray) -> np.ndarray:
    """Queries or keys in float64; bytes are e4m3."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (array.view(ml_dtypes.float8_e4m3fn) if array.dtype == np.uint8 else array).astype(np.float64)


def scores(q: np.ndarray, k: np.ndarray, scales: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """One query's scores of some keys: q [H, D], k [n, D], scales [n], weights [H]; float64 [n]."""
    with np.errstate(all="ignore"):
        products = np.maximum(values(q) @ values(k).T, 0.0)
        return (flush_subnormals(weights).astype(np.float64) @ products) * flush_subnormals(scales).astype(np.float64)


def mqa_logits(args: PackedScores) -> None:
    q, k, scales, weights, starts, ends, compressed, clean, logits = args
    k, scales = packed_keys_and_scales(k, scales)
    for m in range(len(q)):
        start, end = np.clip((int(starts[m]), int(ends[m])), 0, len(k))
        if clean:
            logits[m] = -np.inf
        shift = start if compressed else 0
        end = min(end, shift + logits.shape[1])
        if end > start:
            with np.errstate(over="ignore"):
                logits[m, start - shift : end - shift] = scores(q[m], k[start:end], scales[start:end], weights[m])


def row_lens(lens: np.ndarray, next_n: int) -> np.ndarray:
    """Lengths of each row, [B * next_n], from lengths [B] or [B, next_n]."""
    if lens.ndim == 1:
        lens = lens.astype(np.int64)[:, None] - (next_n - 1) + np.arange(next_n)
    return lens.reshape(-1)


def paged_mqa_logits(args: PagedScores) -> None:
    q, pages, weights, context_lens, block_table, clean, logits = args
    next_n, width = q.shape[1], logits.shape[1]
    for row, length in enumerate(row_lens(context_lens, next_n)):
        request, j = divmod(row, next_n)
        if clean:
            logits[row] = -np.inf
        length = min(max(int(length), 0), width)
        slots = np.array([lookup_slot(block_table, request, i, pages.block_size) for i in range(length)], np.int64)
        present = (slots >= 0) & (slots < pages.num_slots)
        logits[row, :length] = -np.inf
        keys, scales = keys_and_scales(pages, slots[present])
        with np.errstate(over="ignore"):
            logits[row, :length][present] = scores(q[request, j], keys, scales, weights[row])


def paged_mqa_logits_metadata(lens: np.ndarray, split: int, schedule: np.ndarray) -> None:
    """Assign the splits of all entries to SMs in contiguous ranges of equal size, or larger by one at the front."""
    counts = [-(-max(int(n), 0) // split) for n in lens]
    ends = np.cumsum([0, *counts])
    size, larger = divmod(int(ends[-1]), len(schedule) - 1)
    for sm in range(len(schedule)):
        start = sm * size + min(sm, larger)
        entry = int(np.searchsorted(ends[1:], start, "right"))
        schedule[sm] = (entry, start - ends[entry]) if entry < len(counts) else (len(counts), 0)
