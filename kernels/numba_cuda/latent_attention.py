"""The kernel of all attention over latent rows: sparse decode and prefill, and dense decode.

A thread block takes a few heads of one query token and all of its keys, or a part of the keys. Each part then
stores a partial result, and merge_parts_kernel combines the parts.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ...layout import CacheLayout
from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import float32_bits, float32_value, from_float32
from ..types.plan import DecodePlan, DenseDecodePlan, Workspace
from ..types.segments import Pages
from .attention_tile import Tile, attention_of
from .compiler import cuda, float32, int32, uint32
from .intrinsics import exponential, load4, multiply_bfloat16, store4
from .latent_rows import latent_rows_of
from .launch import (
    NO_PARTS,
    NO_SCALE,
    NO_TABLE,
    SIMULATED,
    device_function,
    is_aligned,
    kind_of,
    launch,
    multiprocessors,
)
from .log_sums import MINUS_INFINITY, bits_of_log_sum, larger, rest_of_sink, summary
from .plain_rows import LANES, ROWS_AT_A_TIME, plain_rows_of
from .products import GROUP, THREADS, stride_of
from .rows import lookup_slot

V_DIM = 512
ROWS, KEYS = (8, 16) if SIMULATED else (32, 32)  # of a tile
BLOCKS_AT_A_TIME = 2  # thread blocks per SM
MAX_PARTS = 64
NO_SEGMENT = np.empty((0, 0, 0), np.int32)
NO_LOGITS = NO_SUMS = np.empty((0, 0, 0), np.float32)
# A part's values for each head: its largest product, the sum of its weights, and the divisor of its query.
TOP, TOTAL, SCALE = 0, 1, 2


class KeyList(NamedTuple):
    """Keys of one cache.

    Attributes:
        slots: int32 [b, s_q, n]; or a block table, int32 [b, B]
        lengths: int32 [b, s_q], entries of `slots` in use, or None; with a block table int32 [b], tokens of each
            request
    """

    pages: Pages
    slots: Any
    lengths: Any


class Results(NamedTuple):
    """out [b, s_q, h, 512], max_logits and lse float32 [b, h, s_q]; max_logits may be None."""

    out: Any
    max_logits: Any
    lse: Any


def attend(
    q: Any,
    lists: list[KeyList],
    most_keys: int,
    attn_sink: Any | None,
    softmax_scale: float,
    results: Results,
    plan: DecodePlan | DenseDecodePlan | None,
    may_split: bool,
    causal: bool = False,
    scale: tuple[Any, np.float32] = (NO_SCALE, np.float32(1)),
) -> None:
    """Attention of q [b, s_q, h, d] over one or two lists of keys; their layouts may differ if both have fine scales.

    Args:
        most_keys: largest number of keys of a token
        causal: for a block table: whether a query sees only tokens up to its own
        scale: scale of plain e4m3 rows: (float32 [1] or empty, number for an empty array)
    """
    (batch, s_q, heads, _), layout = q.shape, lists[0].pages.layout
    formats = layout, lists[-1].pages.layout
    caches = [x.pages.bytes for x in lists]
    groups, float16 = -(-layout.head_dim // GROUP), q.dtype == np.float16
    weighted = layout.num_scales > 0 and not layout.has_fine_scales
    tile = Tile(ROWS, KEYS, groups, V_DIM // GROUP, False, weighted, float16, scaled=not float16)
    blocks = batch * s_q * -(-heads // ROWS)
    parts = part_count(blocks, -(-most_keys // KEYS), multiprocessors()) if may_split else 1
    part_out, part_sums = NO_PARTS, NO_SUMS
    if parts > 1:
        workspace, rows = plan.workspace if plan is not None else Workspace(), batch * s_q * parts
        part_out = workspace.shaped("part_out", (rows * heads, V_DIM), np.float32, q)
        part_sums = workspace.shaped("part_sums", (rows, heads, 3), np.float32, q)
    listed = lists[0].slots.ndim == 3
    second = lists[1] if len(lists) > 1 else lists[0]._replace(slots=NO_SEGMENT if listed else NO_TABLE)
    kernel = attend_kernel_of(tile, formats, listed, is_aligned(q, *caches))
    sink = NO_SCALE if attn_sink is None else attn_sink
    max_logits = NO_LOGITS if results.max_logits is None else results.max_logits
    launch(
        kernel, blocks * parts, THREADS,
        q, *list_arguments(lists[0]), *list_arguments(second), causal, *scale, sink, np.float32(softmax_scale),
        results.out, kind_of(results.out), max_logits, results.lse, part_out, part_sums, parts,
        shared_bytes=tile.shared_bytes, at_a_time=BLOCKS_AT_A_TIME,
    )  # fmt: skip
    if parts > 1:
        launch(
            merge_parts_kernel, batch * s_q * heads, MERGE_THREADS,
            part_out, part_sums, parts, attention_of(tile).growing, sink, results.out, kind_of(results.out),
            results.lse,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def part_count(blocks: int, key_tiles: int, sms: int) -> int:
    """Number of parts of each token's keys that fills the device once with thread blocks."""
    return max(1, min(BLOCKS_AT_A_TIME * sms // blocks, key_tiles, MAX_PARTS))


def list_arguments(keys: KeyList) -> tuple[Any, ...]:
    lengths = NO_TABLE if keys.lengths is None else keys.lengths
    return keys.pages.bytes, keys.pages.block_size, geometry_of(keys.pages).scale_start, keys.slots, lengths


@functools.cache
def attend_kernel_of(tile: Tile, formats: tuple[CacheLayout, CacheLayout], listed: bool, aligned: bool) -> Any:
    """The kernel for two lists' layouts. `listed`: keys come as lists of slots, otherwise as a block table."""
    rows, keys = tile.rows, tile.keys
    growing, count, stride, memory, score, weigh, mix, finish = attention_of(tile)
    word_count, scale_count, prepare, load, store = latent_rows_of(tile, formats, aligned)
    copy_queries = plain_rows_of(rows, formats[0].head_dim, tile.groups, aligned)
    scale_queries = scaled_queries(tile, formats[0].head_dim)
    length_of, slot_of = (listed_length, listed_slot) if listed else (table_length, table_slot)

    @device_function
    def find(m, first, b, s, n, pages, block_size, slots, extra_n, extra_pages, extra_block_size, extra_slots):
        """Page and token of the keys from number `first` on; the second list's keys follow the first list's."""
        for key in range(cuda.threadIdx.x, keys, THREADS):
            i, slot, size = first + key, np.int64(-1), block_size
            if i < n:
                slot = slot_of(slots, b, s, i, block_size, pages.shape[0])
            elif i < n + extra_n:
                slot = slot_of(extra_slots, b, s, i - n, extra_block_size, extra_pages.shape[0])
                size = extra_block_size
            present = slot >= 0
            slot, size = np.uint32(max(slot, 0)), np.uint32(size)  # 32 bits: the division is faster
            m.pages[key] = slot // size if present else -1
            m.tokens[key] = slot % size

    def attend_kernel(
        q, pages, block_size, scale_start, slots, lengths, extra_pages, extra_block_size, extra_scale_start,
        extra_slots, extra_lengths, causal, scale, scale_value, attn_sink, softmax_scale, out, kind, max_logits, lse,
        part_out, part_sums, parts,
    ):  # fmt: skip
        """A thread block takes `rows` heads of a token over one part of its keys."""
        m = memory(cuda.shared.array(0, uint32), cuda.shared.array(0, float32), cuda.shared.array(0, int32))
        sums = cuda.local.array(count, np.float32)
        words, scales = cuda.local.array(word_count, np.uint32), cuda.local.array(scale_count, np.float32)
        s_q, heads = q.shape[1], q.shape[2]
        head_tiles = (heads + rows - 1) // rows
        head, block = cuda.blockIdx.x % head_tiles * rows, cuda.blockIdx.x // head_tiles
        part, token = block % parts, block // parts
        b, s = token // s_q, token % s_q
        n = length_of(slots, lengths, b, s, s_q, causal, block_size)
        extra_n = length_of(extra_slots, extra_lengths, b, s, s_q, causal, extra_block_size)
        tiles = (n + extra_n + keys - 1) // keys
        start, end = tiles * part // parts * keys, tiles * (part + 1) // parts * keys
        if len(scale):
            scale_value = float32_value(scale[0])

        for i in range(count):
            sums[i] = 0
        for row in range(cuda.threadIdx.x, rows, THREADS):
            m.limits[row] = 1 if head + row < heads else 0
        prepare(m)
        copy_queries(q[b, s], head, heads - head, m.q)
        scale_queries(m)
        find(m, start, b, s, n, pages, block_size, slots, extra_n, extra_pages, extra_block_size, extra_slots)
        top, total = MINUS_INFINITY, np.float32(0)
        for first in range(start, end, keys):
            cuda.syncthreads()
            load(m, words, scales, pages, scale_start, extra_pages, extra_scale_start, n - first)
            store(m, words, scales)
            cuda.syncthreads()
            after = first + keys
            find(m, after, b, s, n, pages, block_size, slots, extra_n, extra_pages, extra_block_size, extra_slots)
            score(m, softmax_scale * scale_value)
            cuda.syncthreads()
            top, total = weigh(m, top, total)
            cuda.syncthreads()
            mix(m, sums)
        finish(m, sums, top, total)

        for row in range(cuda.threadIdx.x, rows, THREADS):
            if head + row < heads:
                divided_by = m.scales[row]
                log_sum, inv_sum = summary(m.tops[row], m.totals[row], divided_by)
                inv_sum *= scale_value
                if parts > 1:
                    sums_of_part = part_sums[token * parts + part, head + row]
                    sums_of_part[TOP], sums_of_part[TOTAL] = float32_bits(m.tops[row]), float32_bits(m.totals[row])
                    sums_of_part[SCALE] = float32_bits(divided_by)
                else:
                    inv_sum *= rest_of_sink(attn_sink, head + row, log_sum, divided_by) * growing
                    lse[b, head + row, s] = bits_of_log_sum(log_sum, divided_by)
                    if len(max_logits):
                        max_logits[b, head + row, s] = float32_bits(m.tops[row] * divided_by)
                m.factors[row] = inv_sum
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, rows * V_DIM, THREADS):
            row, dim = i // V_DIM, i % V_DIM
            if head + row < heads:
                value = m.result[row * stride + dim] * m.factors[row]
                if parts > 1:
                    part_out[(token * parts + part) * heads + head + row, dim] = float32_bits(value)
                else:
                    out[b, s, head + row, dim] = from_float32(value, kind)

    return attend_kernel


# Exponents of two. Queries are scaled below 2^LARGEST_QUERY, so that no product with keys up to 2^136 overflows; for
# exponents up to MOST_DIVIDED the power and its inverse are normal numbers.
LARGEST_QUERY, MOST_DIVIDED = -20, 126
EXPONENT = 0x7F800000  # exponent bits of a float32, and of the upper bfloat16 of a word


@functools.cache
def scaled_queries(tile: Tile, dim: int) -> Any:
    """A thread's function that divides each query in shared memory by a power of two, m.scales; the result is exact.

    Products beyond float32 would be infinite: -inf would mask a key. A thread divides the words that it has copied
    (plain_rows_of).
    """
    rows, parts, stride, chunks, scaled = tile.rows, tile.parts, stride_of(tile.groups), dim // 8, tile.scaled
    steps = -(-chunks // parts)
    assert (parts, rows) == (LANES, ROWS_AT_A_TIME)

    @device_function
    def scale_queries(m):
        row, part = cuda.threadIdx.x // parts, cuda.threadIdx.x % parts
        if not scaled:
            for i in range(cuda.threadIdx.x, rows, THREADS):
                m.scales[i] = np.float32(1)
            return
        largest = np.int32(0)  # exponent bits, at their place in a float32
        for i in range(steps):
            if part + parts * i < chunks:
                four = load4(m.q, row * stride + 4 * (part + parts * i))
                for j in range(4):
                    high, low = np.int32(four[j] & EXPONENT), np.int32((four[j] << 16) & EXPONENT)
                    largest = max(largest, high, low)
        m.parts[row * parts + part] = float32_value(largest)
        cuda.syncthreads()
        top = m.parts[row * parts]
        for i in range(1, parts):
            top = max(top, m.parts[row * parts + i])
        divided = min(max((float32_bits(top) >> 23) - 126 - LARGEST_QUERY, 0), MOST_DIVIDED)
        inverse = np.uint32(((127 - divided) << 7) * 0x00010001)
        for i in range(steps):
            if part + parts * i < chunks:
                at = row * stride + 4 * (part + parts * i)
                four = load4(m.q, at)
                first, second = multiply_bfloat16(four[0], inverse), multiply_bfloat16(four[1], inverse)
                third, fourth = multiply_bfloat16(four[2], inverse), multiply_bfloat16(four[3], inverse)
                store4(m.q, at, (first, second, third, fourth))
        if part == 0:
            m.scales[row] = float32_value((127 + divided) << 23)

    return scale_queries


@device_function
def listed_length(slots, lengths, b, s, s_q, causal, block_size):
    """Number of entries in use of a list of slots."""
    if len(lengths):
        return min(max(np.int64(lengths[b, s]), 0), slots.shape[2])
    return np.int64(slots.shape[2])


@device_function
def listed_slot(slots, b, s, i, block_size, num_pages):
    """Entry i of a list of slots, or -1 if it is outside the cache."""
    slot = np.int64(slots[b, s, i])
    return slot if slot >= 0 and slot < num_pages * block_size else np.int64(-1)


@device_function
def table_length(table, lengths, b, s, s_q, causal, block_size):
    """Tokens of request b that its query s sees, within the block table."""
    if not len(table):
        return np.int64(0)
    seen = np.int64(lengths[b])
    if causal:
        seen -= s_q - 1 - s
    return min(max(seen, 0), table.shape[1] * block_size)


@device_function
def table_slot(table, b, s, i, block_size, num_pages):
    """The slot of token i of request b, or -1 if it is outside the cache."""
    slot = np.int64(lookup_slot(table, b, i, block_size))
    return slot if slot < num_pages * block_size else np.int64(-1)


MERGE_THREADS = 128


def merge_parts_kernel(part_out, part_sums, parts, growing, attn_sink, out, kind, lse):
    """A thread block takes one head of a token, a thread every blockDim.x-th value of its output."""
    weights = cuda.shared.array(MAX_PARTS, np.float32)
    s_q, heads = out.shape[1], out.shape[2]
    token, head = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
    b, s = token // s_q, token % s_q
    top = MINUS_INFINITY
    for part in range(parts):
        top = larger(top, float32_value(part_sums[token * parts + part, head, TOP]))
    shift, scale = np.float32(0) if top == MINUS_INFINITY else top, float32_value(part_sums[token * parts, head, SCALE])
    for part in range(cuda.threadIdx.x, parts, cuda.blockDim.x):
        part_top, part_total = part_sums[token * parts + part, head, TOP], part_sums[token * parts + part, head, TOTAL]
        weights[part] = exponential((float32_value(part_top) - shift) * scale) * float32_value(part_total)
    cuda.syncthreads()
    total = np.float32(0)
    for part in range(parts):
        total += weights[part]
    log_sum, inv_sum = summary(top, total, scale)
    inv_sum *= rest_of_sink(attn_sink, head, log_sum, scale) * growing
    for dim in range(cuda.threadIdx.x, V_DIM, cuda.blockDim.x):
        value = np.float32(0)
        for part in range(parts):
            value += weights[part] * float32_value(part_out[(token * parts + part) * heads + head, dim])
        out[b, s, head, dim] = from_float32(value * inv_sum, kind)
    if cuda.threadIdx.x == 0:
        lse[b, head, s] = bits_of_log_sum(log_sum, scale)
