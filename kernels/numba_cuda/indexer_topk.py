"""The indexer's top-k: a thread block takes a row."""

from typing import Any

import numpy as np

from ..types.indexer import Rows, Slots
from ..types.indices import TopkSlots
from .compiler import cuda
from .indexer import length_of, two_axes
from .indices import map_compact
from .launch import NO_TABLE, NO_VECTOR, launch

THREADS = 128


def top_k_per_row(logits: Any, rows: Rows, indices: Any, slots: Slots | None = None) -> None:
    has_lens = rows.lens is not None
    launch(
        select_kernel, len(logits), THREADS,
        logits, NO_VECTOR if rows.starts is None else rows.starts, NO_VECTOR if rows.ends is None else rows.ends,
        two_axes(rows.lens) if has_lens else NO_TABLE, rows.next_n, -1 if rows.num_keys is None else rows.num_keys,
        indices,
    )  # fmt: skip
    if slots is not None:
        table = slots.block_table, slots.block_size
        map_compact(
            TopkSlots(
                indices, None, *table, slots.is_valid, slots.positions, slots.pool, slots.indices, slots.lens, True,
                slots.pool,
            ),
            rows.next_n,
        )  # fmt: skip


@cuda.jit(device=True)
def order_of(bits):
    """An integer, at least 1, that increases with the float32 of these bits; 0 for NaN. -0 and 0 have one integer."""
    magnitude = bits & np.int64(0x7FFFFFFF)
    if magnitude > 0x7F800000:
        return np.int64(0)
    if magnitude == 0:
        return np.int64(0x80000000)
    return bits ^ np.int64(0xFFFFFFFF) if bits >> 31 else bits | np.int64(0x80000000)


def select_kernel(logits, starts, ends, lens, next_n, num_keys, indices):
    """A thread block takes a row: it finds the k-th largest order bit by bit, then each thread writes a piece."""
    found = cuda.shared.array(1, np.int32)
    above = cuda.shared.array(THREADS, np.int32)  # number of larger columns in each thread's piece
    equal = cuda.shared.array(THREADS, np.int32)
    m, topk, width = cuda.blockIdx.x, indices.shape[1], np.int64(logits.shape[1])
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    first, end = np.int64(0), width
    if lens.shape[0]:
        end = min(max(length_of(lens, m // next_n, m % next_n, next_n), 0), width)
    else:
        keys = width if num_keys < 0 else num_keys
        first = min(max(np.int64(starts[m]), 0), keys) if len(starts) else np.int64(0)
        end = min(max(np.int64(ends[m]), first), keys) if len(ends) else keys
        if num_keys >= 0:
            end = min(end - first, width)
            first = np.int64(0)
    threshold = np.int64(0)
    for bit in range(32):
        candidate = threshold | (np.int64(1) << (31 - bit))
        if thread == 0:
            found[0] = 0
        cuda.syncthreads()
        count = 0
        for i in range(first + thread, end, threads):
            count += order_of(np.int64(logits[m, i])) >= candidate
        if count:
            cuda.atomic.add(found, 0, count)
        cuda.syncthreads()
        if found[0] >= topk:
            threshold = candidate
        cuda.syncthreads()
    piece = (end - first + threads - 1) // threads
    begin = first + thread * piece
    stop = min(begin + piece, end)
    above[thread] = 0
    equal[thread] = 0
    for i in range(begin, stop):
        order = order_of(np.int64(logits[m, i]))
        above[thread] += order > threshold
        equal[thread] += order == threshold and order > 0
    cuda.syncthreads()
    total_above, above_before, equal_before, total_equal = 0, 0, 0, 0
    for other in range(threads):
        total_above += above[other]
        total_equal += equal[other]
        if other < thread:
            above_before += above[other]
            equal_before += equal[other]
    needed = min(topk - total_above, total_equal)
    to = above_before + min(equal_before, needed)
    for i in range(begin, stop):
        order = order_of(np.int64(logits[m, i]))
        taken = order > threshold
        if order == threshold and order > 0:
            taken = equal_before < needed
            equal_before += 1
        if taken:
            indices[m, to] = i - first
            to += 1
    for i in range(total_above + needed + thread, topk, threads):
        indices[m, i] = -1
