"""The indexer: a thread takes a head or a score."""

from typing import Any

import numpy as np

from ...layout import INDEXER_MXFP4
from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import (
    FLOAT32,
    KINDS,
    bfloat16_bits,
    bfloat16_value,
    dequantized,
    e2m1_quantized,
    e2m1_scale,
    e2m1_value,
    e4m3_byte,
    float32_bits,
    float32_value,
    flushed,
    from_float32,
    power_of_two,
    quantized,
    scale_exponent,
    to_float32,
    ue8m0_value,
)
from ..reference.indexer import MXFP4_SHIFT
from ..types.indexer import IndexQueries, PackedScores, PagedScores
from ..types.segments import Pages
from .compiler import cuda
from .launch import MAX_BLOCKS, NO_PARTS, NO_SCALE, NO_VECTOR, kind_of, launch
from .norm_rope import HADAMARD_SCALE, head_factor
from .rows import find_request, load, lookup_slot, store

THREADS = 128
DIM, ROPE_DIM, TILE = 128, 64, INDEXER_MXFP4.scale_tile
MXFP4_GONE = 30  # a tile whose scale is 2^-30 of its head's scale or less is 0 in e4m3
E4M3 = -1  # instead of a floating-point kind
PLAIN_KEYS, E4M3_KEYS, E2M1_KEYS = 0, 1, 2


def fused_indexer_q_rope_quant(queries: IndexQueries) -> None:
    positions, index_q, table, index_weights, scale, rope_first, is_neox, least, q_format, *_, q_out, weights = queries
    is_mxfp4, table = q_format != "fp8", NO_PARTS if table is None else table
    scales, biases = queries.ssmax or (NO_VECTOR, NO_VECTOR)
    launch(
        mxfp4_queries_kernel if is_mxfp4 else queries_kernel, min(weights.size, MAX_BLOCKS), 32,
        positions, index_q, kind_of(index_q), table, kind_of(table), index_weights, kind_of(index_weights),
        np.float32(scale), 0 if rope_first else index_q.shape[2] - ROPE_DIM, is_neox, scales, biases, queries.hadamard,
        least, q_out, E4M3 if q_out.dtype == np.uint8 else kind_of(q_out), weights,
    )  # fmt: skip


@cuda.jit(device=True)
def prepare(x, q, kind, table, table_kind, position, first, is_neox, scales, biases, head, rotates, rounded):
    """Write a head, times SSMax's factor, after RoPE and Hadamard rotation, into `x`, of this thread.

    Args:
        rounded: whether values are rounded to bfloat16 before the Hadamard rotation
    """
    half, factor = ROPE_DIM // 2, np.float32(1)
    if len(scales):
        factor = head_factor(scales[head], biases[head], position)
    for i in range(len(q)):
        x[i] = to_float32(np.int64(q[i]), kind)
        if len(scales):
            x[i] = x[i] * factor
    for i in range(half if position >= 0 and position < len(table) else 0):
        low = first + (i if is_neox else 2 * i)
        high = low + (half if is_neox else 1)
        cosine = to_float32(np.int64(table[position, i]), table_kind)
        sine = to_float32(np.int64(table[position, half + i]), table_kind)
        a, b = x[low], x[high]
        x[low], x[high] = a * cosine - b * sine, b * cosine + a * sine
    if not rotates:
        return
    for i in range(len(q) if rounded else 0):
        x[i] = bfloat16_value(bfloat16_bits(x[i]))
    step = 1
    while step < len(q):
        for pair in range(len(q) // 2):
            i = pair // step * 2 * step + pair % step
            a, b = x[i], x[i + step]
            x[i], x[i + step] = a + b, a - b
        step *= 2
    for i in range(len(q)):
        x[i] = x[i] * HADAMARD_SCALE


def queries_kernel(
    positions, q, kind, table, table_kind, index_weights, weight_kind, scale, first, is_neox, scales, biases, rotates,
    least_exponent, q_out, out_kind, weights,
):  # fmt: skip
    """A thread takes a head: it finds the largest value, then writes the output."""
    values = cuda.local.array(DIM, np.float32)
    for number in range(cuda.grid(1), weights.shape[0] * weights.shape[1], cuda.gridsize(1)):
        token, head = number // weights.shape[1], number % weights.shape[1]
        prepare(
            values, q[token, head], kind, table, table_kind, np.int64(positions[token]), first, is_neox, scales, biases,
            head, rotates, out_kind != FLOAT32,
        )  # fmt: skip
        q_scale, amax = np.float32(1), np.float32(0)
        if out_kind == E4M3:
            for i in range(q.shape[2]):
                values[i] = bfloat16_value(bfloat16_bits(values[i]))
                if abs(values[i]) > amax and abs(values[i]) < np.inf:
                    amax = np.float32(abs(values[i]))
            q_scale = power_of_two(scale_exponent(amax, least_exponent))
        for i in range(q.shape[2]):
            x = values[i]
            q_out[token, head, i] = quantized(x, q_scale) if out_kind == E4M3 else from_float32(x, out_kind)
        weight = flushed(to_float32(np.int64(index_weights[token, head]), weight_kind))
        weights[token, head] = float32_bits(flushed(flushed(weight * q_scale) * flushed(scale)))


def mxfp4_queries_kernel(
    positions, q, kind, table, table_kind, index_weights, weight_kind, scale, first, is_neox, scales, biases, rotates,
    least_exponent, q_out, out_kind, weights,
):  # fmt: skip
    """A thread takes a head. For e4m3 bytes it first finds the largest scale of its tiles."""
    values = cuda.local.array(DIM, np.float32)
    dims = q.shape[2]
    rows = q_out.shape[2] != dims
    for number in range(cuda.grid(1), weights.shape[0] * weights.shape[1], cuda.gridsize(1)):
        token, head = number // weights.shape[1], number % weights.shape[1]
        prepare(
            values, q[token, head], kind, table, table_kind, np.int64(positions[token]), first, is_neox, scales, biases,
            head, rotates, True,
        )  # fmt: skip
        for i in range(dims):
            values[i] = bfloat16_value(bfloat16_bits(values[i]))
        largest = np.int64(least_exponent)
        for writes in range(rows, 2):
            for tile in range(dims // TILE):
                amax = np.float32(0)
                for i in range(tile * TILE, (tile + 1) * TILE):
                    x = values[i]
                    if x != x or (abs(x) > amax and abs(x) < np.inf):
                        amax = np.float32(abs(x))
                tile_scale = e2m1_scale(amax, True, least_exponent, np.float32(0))
                exponent = (float32_bits(tile_scale) >> 23) - 127
                is_nan = tile_scale != tile_scale
                if not writes:
                    if not is_nan:
                        largest = max(largest, exponent - MXFP4_SHIFT)
                    continue
                factor = tile_scale if is_nan else power_of_two(max(exponent - largest, -MXFP4_GONE))
                if rows:
                    q_out[token, head, dims // 2 + tile] = exponent + 127
                low = np.int64(0)
                for i in range(tile * TILE, (tile + 1) * TILE):
                    code = e2m1_quantized(values[i], tile_scale)
                    if not rows:
                        q_out[token, head, i] = e4m3_byte(e2m1_value(code) * factor)
                    elif i % 2:
                        q_out[token, head, i // 2] = low | (code << 4)
                    low = code
        weight = flushed(to_float32(np.int64(index_weights[token, head]), weight_kind))
        q_scale = np.float32(1) if rows else power_of_two(largest)
        weights[token, head] = float32_bits(flushed(flushed(weight * q_scale) * flushed(scale)))


# ---- keys without scales


def insert_keys(k: Any, pages: Pages, slot_mapping: Any) -> None:
    launch(
        insert_kernel, min(len(slot_mapping), MAX_BLOCKS), THREADS,
        k, kind_of(k), slot_mapping, pages.bytes, pages.block_size, KINDS[pages.layout.value_type],
        pages.layout.row_bytes // pages.layout.head_dim,
    )  # fmt: skip


def insert_kernel(k, kind, slots, pages, block_size, stored_kind, size):
    """A thread block takes a token, a thread every blockDim.x-th value of its row."""
    for token in range(cuda.blockIdx.x, len(slots), cuda.gridDim.x):
        slot = np.int64(slots[token])
        if slot < 0 or slot >= pages.shape[0] * block_size:
            continue
        page, start = pages[slot // block_size], slot % block_size * size * k.shape[1]
        for i in range(cuda.threadIdx.x, k.shape[1], cuda.blockDim.x):
            bits = np.int64(k[token, i])
            if kind != stored_kind:
                bits = from_float32(to_float32(bits, kind), stored_kind)
            store(page, start + size * i, size, bits)


def gather_keys(pages: Pages, dst_k: Any, block_table: Any, cu_seq_lens: Any) -> None:
    launch(
        gather_kernel, min(len(dst_k), MAX_BLOCKS), THREADS,
        pages.bytes, pages.block_size, dst_k, pages.layout.row_bytes // pages.layout.head_dim, block_table, cu_seq_lens,
    )  # fmt: skip


def gather_kernel(pages, block_size, dst_k, size, block_table, cu_seq_lens):
    """A thread block takes a row, a thread every blockDim.x-th value of it."""
    for row in range(cuda.blockIdx.x, len(dst_k), cuda.gridDim.x):
        request = find_request(cu_seq_lens, row)
        if request < 0:
            continue
        slot = lookup_slot(block_table, request, np.int64(row) - cu_seq_lens[request], block_size)
        present = slot >= 0 and slot < pages.shape[0] * block_size
        for i in range(cuda.threadIdx.x, dst_k.shape[1], cuda.blockDim.x):
            bits = np.int64(0)
            if present:
                bits = load(pages[slot // block_size], (slot % block_size * dst_k.shape[1] + i) * size, size)
            dst_k[row, i] = bits


# ---- scores


def mqa_logits(args: PackedScores) -> None:
    q, k, scales, weights, starts, ends, compressed, clean, logits = args
    is_e2m1 = scales is not None and scales.dtype == np.uint8
    keys = PLAIN_KEYS if scales is None else E2M1_KEYS if is_e2m1 else E4M3_KEYS
    launch(
        logits_kernel, min(-(-logits.size // THREADS), MAX_BLOCKS), THREADS,
        q, element_kind(q), k, keys, NO_SCALE if scales is None else scales.reshape(-1), weights, starts, ends,
        compressed, clean, logits,
    )  # fmt: skip


def element_kind(array: Any) -> int:
    return E4M3 if array.dtype == np.uint8 else kind_of(array)


@cuda.jit(device=True)
def element(bits, kind):
    if kind == E4M3:
        return dequantized(bits, np.float32(1))
    return to_float32(np.int64(bits), kind)


@cuda.jit(device=True)
def e2m1_element(byte, i, scale):
    """Value i of an e2m1 key times its UE8M0 scale; `byte` has two values."""
    return e2m1_value(np.int64(byte) >> (4 * (i % 2)) & 0xF) * ue8m0_value(np.int64(scale))


def logits_kernel(q, kind, k, key_kind, scales, weights, starts, ends, compressed, clean, logits):
    """A thread takes a column of a query."""
    keys = np.int64(len(k))
    for number in range(cuda.grid(1), logits.shape[0] * logits.shape[1], cuda.gridsize(1)):
        m, column = number // logits.shape[1], number % logits.shape[1]
        start = min(max(np.int64(starts[m]), 0), keys)
        end = min(max(np.int64(ends[m]), 0), keys)
        n = start + column if compressed else column
        if n < start or n >= end:
            if clean:
                logits[m, column] = float32_bits(np.float32(-np.inf))
            continue
        score = np.float32(0)
        for head in range(q.shape[1]):
            product = np.float32(0)
            for i in range(q.shape[2]):
                if key_kind == E2M1_KEYS:
                    key = e2m1_element(k[n, i // 2], i, scales[n * 4 + i // 32])
                else:
                    key = element(k[n, i], kind)
                product += element(q[m, head, i], kind) * key
            product = np.float32(0) if product < 0 else product
            score += product * flushed(float32_value(np.int64(weights[m, head])))
        if key_kind == E4M3_KEYS:
            score *= flushed(float32_value(np.int64(scales[n])))
        logits[m, column] = float32_bits(score)


@cuda.jit(device=True)
def length_of(lens, entry, j, next_n):
    """Columns that query j of next_n sees: `lens` is [B] or [B, next_n], viewed as two-dimensional."""
    if lens.shape[1] > 1:
        return np.int64(lens[entry, j])
    return np.int64(lens[entry, 0]) - (next_n - 1 - j)


def two_axes(lens: Any) -> Any:
    return lens.reshape(-1, 1) if lens.ndim == 1 else lens


def keys_kind(pages: Pages) -> int:
    return {"e4m3": E4M3_KEYS, "e2m1": E2M1_KEYS}.get(pages.layout.value_type, PLAIN_KEYS)


@cuda.jit(device=True)
def page_element(page, g, token, i, key_kind, size, kind):
    """Value i of a key in a page; e2m1 values are scaled."""
    if key_kind == E2M1_KEYS:
        scale = page[g.scale_start + token * g.scale_stride + i // g.scale_tile]
        return e2m1_element(page[token * g.row_bytes + i // 2], i, scale)
    return element(load(page, token * g.row_bytes + size * i, size), kind)


@cuda.jit(device=True)
def page_score(queries, weights, pages, slot, g, key_kind, size, kind):
    """The score of the key in a slot for queries [heads, width] and their weights; -inf if there is no such slot."""
    if slot < 0 or slot >= pages.shape[0] * g.block_size:
        return np.float32(-np.inf)
    page, token = pages[slot // g.block_size], slot % g.block_size
    score = np.float32(0)
    for head in range(queries.shape[0]):
        product = np.float32(0)
        for i in range(queries.shape[1]):
            product += element(queries[head, i], kind) * page_element(page, g, token, i, key_kind, size, kind)
        product = np.float32(0) if product < 0 else product
        score += product * flushed(float32_value(np.int64(weights[head])))
    if key_kind == E4M3_KEYS:
        score *= flushed(float32_value(load(page, g.scale_start + token * g.scale_stride, 4)))
    return score


def paged_mqa_logits(args: PagedScores) -> None:
    q, pages, weights, context_lens, block_table, clean, logits = args
    layout = pages.layout
    launch(
        paged_logits_kernel, min(-(-logits.size // THREADS), MAX_BLOCKS), THREADS,
        q, element_kind(q), pages.bytes, geometry_of(pages), keys_kind(pages), layout.row_bytes // layout.head_dim,
        weights, two_axes(context_lens), block_table, clean, logits,
    )  # fmt: skip


def paged_logits_kernel(q, kind, pages, g, key_kind, size, weights, lens, block_table, clean, logits):
    """A thread takes a column of a query."""
    next_n = q.shape[1]
    for number in range(cuda.grid(1), logits.shape[0] * logits.shape[1], cuda.gridsize(1)):
        row, n = number // logits.shape[1], number % logits.shape[1]
        entry, j = row // next_n, row % next_n
        if n >= length_of(lens, entry, j, next_n):
            if clean:
                logits[row, n] = float32_bits(np.float32(-np.inf))
            continue
        slot = lookup_slot(block_table, entry, np.int64(n), g.block_size)
        logits[row, n] = float32_bits(page_score(q[entry, j], weights[row], pages, slot, g, key_kind, size, kind))


def paged_mqa_logits_metadata(lens: Any, split: int, schedule: Any) -> None:
    launch(schedule_kernel, 1, THREADS, lens, split, schedule)


def schedule_kernel(lens, split, schedule):
    """One thread block; a thread searches for the starts of its SMs' ranges among the splits of all entries."""
    num_sms = len(schedule) - 1
    total = np.int64(0)
    for entry in range(len(lens)):
        total += (max(np.int64(lens[entry]), 0) + split - 1) // split
    for sm in range(cuda.threadIdx.x, num_sms + 1, cuda.blockDim.x):
        left = sm * (total // num_sms) + min(np.int64(sm), total % num_sms)
        entry = 0
        while entry < len(lens):
            here = (max(np.int64(lens[entry]), 0) + split - 1) // split
            if left < here:
                break
            left -= here
            entry += 1
        schedule[sm, 0] = entry
        schedule[sm, 1] = left
