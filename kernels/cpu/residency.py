"""Rows of a cache in host memory, the hot ones of them in device memory: a core takes a request."""

import numpy as np

from ..numba_common.compiled import compiled
from ..types.residency import Fetch, Selection
from .threads import parallel_for

TO_RESOLVE, TO_FETCH = 5, 20  # approximate nanoseconds of an entry


def resolve_resident(args: Selection) -> None:
    tokens, topk = args.topk_indices.shape
    args.slots[:] = -1
    args.misses[:] = -1
    requests = len(args.lanes)
    parallel_for(requests, TO_RESOLVE * (tokens * topk // max(requests, 1) + args.row_of_slot.shape[1]), _resolve, args)


@compiled(nogil=True)
def _resolve(first_request, end_request, args):
    topk, slots = args.topk_indices, args.slots
    tokens, rows, hot = len(topk), args.slot_of_row.shape[1], args.row_of_slot.shape[1]
    for r in range(first_request, end_request):
        lane = np.int64(args.lanes[r])
        if lane < 0 or lane >= len(args.clock):
            continue
        start = clamp(args.query_start_loc[r], 0, tokens)
        end = clamp(args.query_start_loc[r + 1], start, tokens)
        slot_of_row, row_of_slot, last_use = args.slot_of_row[lane], args.row_of_slot[lane], args.last_use[lane]
        now = args.clock[lane] + 1
        args.clock[lane] = now
        seq_len = np.int64(args.seq_lens[r])
        first = max(seq_len - (end - start), 0) // args.compress_ratio
        for row in range(first, min(seq_len // args.compress_ratio, rows)):
            slot = slot_of_row[row]
            if 0 <= slot < hot:
                row_of_slot[slot] = -1
                last_use[slot] = 0
            slot_of_row[row] = -1
        count = 0  # of misses; a row that misses has -2 - its number in slot_of_row
        for t in range(start, end):
            for j in range(topk.shape[1]):
                row = topk[t, j]
                if 0 <= row < rows:
                    slot = slot_of_row[row]
                    if 0 <= slot < hot:
                        last_use[slot] = now
                    elif slot == -1:
                        slot_of_row[row] = -2 - count
                        count += 1
        if count:
            _replace(topk, start, end, slot_of_row, row_of_slot, last_use, now, count, args.misses)
        for t in range(start, end):
            for j in range(topk.shape[1]):
                row = topk[t, j]
                if 0 <= row < rows:
                    slot = slot_of_row[row]
                    slots[t, j] = lane * hot + slot if 0 <= slot < hot else -1


@compiled
def clamp(value, least, most):
    return np.int64(min(max(np.int64(value), least), most))


@compiled
def _replace(topk, start, end, slot_of_row, row_of_slot, last_use, now, count, misses):
    """Give the rows that miss the slots of least recent use, in order of their first entries."""
    hot, rows = len(row_of_slot), len(slot_of_row)
    oldest, below = threshold(last_use, now, count)
    equal, slot = count - below, -1
    for t in range(start, end):
        for j in range(topk.shape[1]):
            row = topk[t, j]
            if row < 0 or row >= rows or slot_of_row[row] >= -1:
                continue
            slot += 1
            while slot < hot:  # the next victim
                if last_use[slot] != now and last_use[slot] < oldest:
                    break
                if last_use[slot] != now and last_use[slot] == oldest and equal > 0:
                    equal -= 1
                    break
                slot += 1
            if slot >= hot:
                slot_of_row[row] = -1
                continue
            old = row_of_slot[slot]
            if 0 <= old < rows:
                slot_of_row[old] = -1
            row_of_slot[slot], slot_of_row[row], misses[t, j] = row, slot, row
            last_use[slot] = now


@compiled
def threshold(last_use, now, count):
    """The last use of the count-th of the slots by last use, of which none is now; and how many were used before it."""
    low, high = np.int64(0), np.int64(now)
    while low < high:
        middle = (low + high) // 2
        found = 0
        for i in range(len(last_use)):
            found += last_use[i] != now and last_use[i] <= middle
        if found >= count:
            high = middle
        else:
            low = middle + 1
    below = 0
    for i in range(len(last_use)):
        below += last_use[i] != now and last_use[i] < low
    return low, below


def fetch_resident(args: Fetch) -> None:
    tokens, topk = args.misses.shape
    requests, source, target = len(args.block_table), args.source, args.target
    parallel_for(
        requests, TO_FETCH * (tokens * topk // requests), _fetch, args.misses, args.slots, args.query_start_loc,
        args.block_table, source.bytes, source.block_size, target.bytes, target.block_size, source.layout.row_bytes,
        args.tail_bytes,
    )  # fmt: skip


def fetch_resident_across(args: Fetch) -> None:
    """Rows of pages in host memory to device memory; here all pages are in host memory."""
    fetch_resident(args)


@compiled(nogil=True)
def _fetch(
    first_request, end_request, misses, slots, query_start_loc, block_table, source, source_size, target, target_size,
    row_bytes, tail_bytes,
):  # fmt: skip
    tokens = len(misses)
    for r in range(first_request, end_request):
        start = clamp(query_start_loc[r], 0, tokens)
        for t in range(start, clamp(query_start_loc[r + 1], start, tokens)):
            for j in range(misses.shape[1]):
                row, slot = misses[t, j], slots[t, j]
                column, to_page = row // source_size, slot // target_size
                if row < 0 or slot < 0 or column >= block_table.shape[1] or to_page >= len(target):
                    continue
                page = block_table[r, column]
                if page < 0 or page >= len(source):
                    continue
                first, to = row % source_size * row_bytes, slot % target_size * row_bytes
                for i in range(row_bytes):
                    target[to_page, to + i] = source[page, first + i]
                first = source_size * row_bytes + row % source_size * tail_bytes
                to = target_size * row_bytes + slot % target_size * tail_bytes
                for i in range(tail_bytes):
                    target[to_page, to + i] = source[page, first + i]
