"""Rows of a cache in host memory, the hot ones of them in device memory: a thread block takes a request."""

import numpy as np

from ..cuda.residency import fetch_resident_across
from ..types.residency import Fetch, Selection
from .compiler import cuda
from .launch import device_function, launch

__all__ = ["fetch_resident", "fetch_resident_across", "resolve_resident"]

THREADS = 128


def resolve_resident(args: Selection) -> None:
    launch(resolve_kernel, max(len(args.lanes), 1), THREADS, args)


@device_function
def is_in(value, end):
    return value >= 0 and value < end


@device_function
def clamp(value, least, most):
    return np.int64(min(max(np.int64(value), least), most))


def resolve_kernel(args):
    shared = cuda.shared.array(4, np.int32)  # misses; idle slots below and at a last use; the next victim
    thread, threads, r = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.x
    tokens, topk = np.int64(args.topk_indices.shape[0]), np.int64(args.topk_indices.shape[1])
    rows, hot = np.int64(args.slot_of_row.shape[1]), np.int64(args.row_of_slot.shape[1])
    start = clamp(args.query_start_loc[r], np.int64(0), tokens)
    end, lane = start, np.int64(-1)
    if r < len(args.lanes):
        end, lane = clamp(args.query_start_loc[r + 1], start, tokens), np.int64(args.lanes[r])
    for i in range(thread, tokens * topk, threads):
        t = i // topk
        mine = t >= start and t < end
        if mine or (r == 0 and t < start) or (r == cuda.gridDim.x - 1 and t >= end):
            args.slots[t, i % topk] = -1
            args.misses[t, i % topk] = -1
    if r >= len(args.lanes):
        return
    if not is_in(lane, len(args.clock)):
        return
    now = np.int64(args.clock[lane]) + 1
    seq_len = np.int64(args.seq_lens[r])
    first = max(seq_len - (end - start), 0) // args.compress_ratio
    for row in range(first + thread, min(seq_len // args.compress_ratio, rows), threads):
        slot = args.slot_of_row[lane, row]
        if is_in(slot, hot):
            args.row_of_slot[lane, slot] = -1
            args.last_use[lane, slot] = 0
        args.slot_of_row[lane, row] = -1
    if thread == 0:
        shared[0] = 0
    cuda.syncthreads()  # also: all have read the clock
    if thread == 0:
        args.clock[lane] = now
    entries = (end - start) * topk
    # The first entry of a row that misses leaves its number - entries - 1 in slot_of_row.
    for i in range(thread, entries, threads):
        row = args.topk_indices[start + i // topk, i % topk]
        if is_in(row, rows):
            slot = args.slot_of_row[lane, row]
            if is_in(slot, hot):
                args.last_use[lane, slot] = now
            else:
                cuda.atomic.min(args.slot_of_row, (lane, np.int64(row)), np.int32(i - entries - 1))
    cuda.syncthreads()
    for i in range(thread, entries, threads):
        row = args.topk_indices[start + i // topk, i % topk]
        if is_in(row, rows) and args.slot_of_row[lane, row] == i - entries - 1:
            cuda.atomic.add(shared, 0, 1)
    cuda.syncthreads()
    count = shared[0]
    if count:
        low, high = np.int64(0), now
        while low < high:
            middle = (low + high) // 2
            if count_idle(args.last_use, lane, hot, now, middle, shared) >= count:
                high = middle
            else:
                low = middle + 1
        below = count_idle(args.last_use, lane, hot, now, low - 1, shared)
        if thread == 0:
            give_slots(args, lane, start, entries, now, low, count - below)
        cuda.syncthreads()
    for i in range(thread, entries, threads):
        row = args.topk_indices[start + i // topk, i % topk]
        if is_in(row, rows):
            slot = args.slot_of_row[lane, row]
            if is_in(slot, hot):
                args.slots[start + i // topk, i % topk] = lane * hot + slot


@device_function
def count_idle(last_use, lane, hot, now, oldest, shared):
    """Slots that were last used at `oldest` or before. All threads call it."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        shared[1] = 0
    cuda.syncthreads()
    count = 0
    for slot in range(cuda.threadIdx.x, hot, cuda.blockDim.x):
        used = last_use[lane, slot]
        if used != now and used <= oldest:
            count += 1
    if count:
        cuda.atomic.add(shared, 1, count)
    cuda.syncthreads()
    return shared[1]


@device_function
def give_slots(args, lane, start, entries, now, oldest, equal):
    """Give the rows that miss, in order of their first entries, the slots of least recent use, in order of slots."""
    topk, rows, hot = args.topk_indices.shape[1], args.slot_of_row.shape[1], args.row_of_slot.shape[1]
    slot = np.int64(-1)
    for i in range(entries):
        row = args.topk_indices[start + i // topk, i % topk]
        if not is_in(row, rows) or args.slot_of_row[lane, row] != i - entries - 1:
            continue
        slot += 1
        while slot < hot:
            used = args.last_use[lane, slot]
            if used != now and used < oldest:
                break
            if used != now and used == oldest and equal > 0:
                equal -= 1
                break
            slot += 1
        if slot >= hot:
            args.slot_of_row[lane, row] = -1
            continue
        old = args.row_of_slot[lane, slot]
        if is_in(old, rows):
            args.slot_of_row[lane, old] = -1
        args.row_of_slot[lane, slot] = row
        args.slot_of_row[lane, row] = slot
        args.last_use[lane, slot] = now
        args.misses[start + i // topk, i % topk] = row


def fetch_resident(args: Fetch) -> None:
    source, target = args.source, args.target
    launch(
        fetch_kernel, args.misses.size, min(THREADS, 64), args.misses, args.slots, args.query_start_loc,
        args.block_table, source.bytes, source.block_size, target.bytes, target.block_size, source.layout.row_bytes,
        args.tail_bytes,
    )  # fmt: skip


def fetch_kernel(
    misses, slots, query_start_loc, block_table, source, source_size, target, target_size, row_bytes, tail_bytes
):  # fmt: skip
    """A thread block takes an entry of a token."""
    topk = np.int64(misses.shape[1])
    t, j = cuda.blockIdx.x // topk, cuda.blockIdx.x % topk
    row, slot = np.int64(misses[t, j]), np.int64(slots[t, j])
    column, to_page = row // source_size, slot // target_size
    if row < 0 or slot < 0 or column >= block_table.shape[1] or to_page >= target.shape[0]:
        return
    r = request_of(query_start_loc, t, np.int64(misses.shape[0]))
    if r < 0:
        return
    page = np.int64(block_table[r, column])
    if page < 0 or page >= source.shape[0]:
        return
    first, to_first = row % source_size * row_bytes, slot % target_size * row_bytes
    for i in range(cuda.threadIdx.x, row_bytes, cuda.blockDim.x):
        target[to_page, to_first + i] = source[page, first + i]
    first = source_size * row_bytes + row % source_size * tail_bytes
    to_first = target_size * row_bytes + slot % target_size * tail_bytes
    for i in range(cuda.threadIdx.x, tail_bytes, cuda.blockDim.x):
        target[to_page, to_first + i] = source[page, first + i]


@device_function
def request_of(query_start_loc, token, tokens):
    """The request of a token; -1 for padding."""
    for r in range(query_start_loc.shape[0] - 1):
        start = clamp(query_start_loc[r], np.int64(0), tokens)
        if token >= start and token < clamp(query_start_loc[r + 1], start, tokens):
            return r
    return -1
