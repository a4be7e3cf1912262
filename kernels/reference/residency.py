"""Rows of a cache in host memory, the hot ones of them in device memory."""

import numpy as np

from ..types.residency import Fetch, Selection
from ..types.segments import Pages


def resolve_resident(args: Selection) -> None:
    tokens, starts = len(args.topk_indices), args.query_start_loc.tolist()
    args.slots[:] = -1
    args.misses[:] = -1
    for r, lane in enumerate(args.lanes.tolist()):
        start = min(max(starts[r], 0), tokens)
        end = min(max(starts[r + 1], start), tokens)
        if 0 <= lane < len(args.clock):
            _resolve(args, r, lane, start, end)


def _resolve(args: Selection, r: int, lane: int, start: int, end: int) -> None:
    slot_of_row, row_of_slot, last_use = args.slot_of_row[lane], args.row_of_slot[lane], args.last_use[lane]
    rows, hot = len(slot_of_row), len(row_of_slot)
    args.clock[lane] = now = args.clock[lane] + 1
    seq_len = int(args.seq_lens[r])
    for row in range(max(seq_len - (end - start), 0) // args.compress_ratio, min(seq_len // args.compress_ratio, rows)):
        slot = slot_of_row[row]  # of a row that this step has written
        if 0 <= slot < hot:
            row_of_slot[slot], last_use[slot] = -1, 0
        slot_of_row[row] = -1
    selected = args.topk_indices[start:end].ravel()
    present = np.flatnonzero((selected >= 0) & (selected < rows))
    firsts = present[np.sort(np.unique(selected[present], return_index=True)[1])]  # the first entry of each row
    distinct = selected[firsts]
    found = slot_of_row[distinct]
    hit = (found >= 0) & (found < hot)
    last_use[found[hit]] = now
    missing = firsts[~hit]
    idle = np.flatnonzero(last_use != now)
    victims = np.sort(idle[np.argsort(last_use[idle], kind="stable")][: len(missing)])
    slots, misses = (np.full(len(selected), -1, np.int32) for _ in range(2))
    for entry, slot in zip(missing.tolist(), victims.tolist(), strict=False):
        row, old = selected[entry], row_of_slot[slot]
        if 0 <= old < rows:
            slot_of_row[old] = -1
        row_of_slot[slot], slot_of_row[row], last_use[slot] = row, slot, now
        misses[entry] = row
    found = slot_of_row[selected[present]]
    slots[present] = np.where((found >= 0) & (found < hot), lane * hot + found, -1)
    args.slots[start:end] = slots.reshape(args.slots[start:end].shape)
    args.misses[start:end] = misses.reshape(args.slots[start:end].shape)


def fetch_resident(args: Fetch) -> None:
    source, target = args.source, args.target
    tokens, starts = len(args.misses), args.query_start_loc.tolist()
    for r, table in enumerate(args.block_table.tolist()):
        start = min(max(starts[r], 0), tokens)
        misses, slots = (x[start : max(starts[r + 1], start)] for x in (args.misses, args.slots))
        for row, slot in zip(misses[misses >= 0].tolist(), slots[misses >= 0].tolist(), strict=True):
            column = row // source.block_size
            page = table[column] if column < len(table) else -1
            if 0 <= page < len(source.bytes) and 0 <= slot < target.num_slots:
                for ours, theirs in zip(
                    parts_of(target, slot // target.block_size, slot % target.block_size, args.tail_bytes),
                    parts_of(source, page, row % source.block_size, args.tail_bytes), strict=True,
                ):  # fmt: skip
                    ours[:] = theirs


def fetch_resident_across(args: Fetch) -> None:
    """Rows of pages in host memory to device memory; here all pages are in host memory."""
    fetch_resident(args)


def parts_of(pages: Pages, page: int, row: int, tail_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a row, and its bytes at the page's end."""
    row_bytes = pages.layout.row_bytes
    tail = pages.block_size * row_bytes + row * tail_bytes
    bytes_of_page = pages.bytes[page]
    return bytes_of_page[row * row_bytes : (row + 1) * row_bytes], bytes_of_page[tail : tail + tail_bytes]
