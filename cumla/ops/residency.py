"""Long contexts: compressed rows in host memory, and the rows that recent steps selected in device memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..dispatch.call import INT32, Call
from ..dispatch.formats import cache_layout, cache_pages
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_integers, check_optional_size
from ..kernels.types.residency import Fetch, Selection
from ..layout import CacheLayout
from .indices import INT32_MAX, pair

MOST_HOT_ROWS = 16384  # of a lane: kernels list its slots in shared memory
MOST_ENTRIES = 1 << 30


@launch_cached
def resolve_resident(
    topk_indices: Array,
    query_start_loc: Array,
    seq_lens: Array,
    lanes: Array,
    slot_of_row: Array,
    row_of_slot: Array,
    last_use: Array,
    clock: Array,
    *,
    compress_ratio: int = 1,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Device slots of the rows that a step selects; rows that are not in device memory get slots of least recent use.

    Args:
        topk_indices: [T, K] int32, rows of the token's request; others than 0 to L - 1 are absent
        query_start_loc: [R + 1] int32, first token of each request, ascending
        seq_lens: [R] int32, tokens of each request, these included. The rows whose last position is one of this step's
            tokens were written in this step, perhaps again after a rejected draft: their slots are given up first
        lanes: [R] int32, the lane of each request, all different; others than 0 to N - 1: the request has no slots
        slot_of_row: [N, L] int32, written: the slot of each row of a lane; -1: not in device memory
        row_of_slot: [N, H] int32, written: the row of each slot; -1: none. H is at most 16384
        last_use: [N, H] int32, written: the step that last used each slot; 0: none
        clock: [N] int32, written: steps of each lane
        compress_ratio: positions of a row
        out: (slots, misses) to write instead of allocating

    The slots of lane n are n * H to n * H + H - 1 of a device pool. A lane begins with -1 in slot_of_row and
    row_of_slot and with 0 in last_use and clock (`cumla.pages.Residency`). Rows that miss take the slots of least
    recent use, of equal ones the lower slots, and never a slot that this step uses. The rows, in order of their first
    entries, take these slots in ascending order. H must be at least the number of different rows that the tokens of a
    request select; K times its tokens always is. Rows for which no slot is left are absent.

    Returns slots [T, K] int32, -1 for absent rows, and misses [T, K] int32: at the first entry of each row that misses
    the row, which `fetch_resident` copies into the entry's slot; -1 elsewhere.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    check_integers(1, INT32_MAX, compress_ratio=compress_ratio)
    call = Call(backend, stream)
    topk_indices = call.array("topk_indices", topk_indices, INT32, ("T", "K"))
    lanes = call.array("lanes", lanes, INT32, ("R",))
    query_start_loc = call.array("query_start_loc", query_start_loc, INT32, (len(lanes) + 1,))
    seq_lens = call.array("seq_lens", seq_lens, INT32, ("R",))
    slot_of_row = call.array("slot_of_row", slot_of_row, INT32, ("N", "L"), writable=True)
    row_of_slot = call.array("row_of_slot", row_of_slot, INT32, ("N", "H"), writable=True)
    last_use = call.array("last_use", last_use, INT32, ("N", "H"), writable=True)
    clock = call.array("clock", clock, INT32, ("N",), writable=True)
    num_lanes, hot = row_of_slot.shape
    if not 1 <= hot <= MOST_HOT_ROWS or num_lanes * hot > INT32_MAX:
        raise ValueError(
            f"row_of_slot: got shape {tuple(row_of_slot.shape)}, expected 1 to {MOST_HOT_ROWS} slots of a lane "
            f"and at most {INT32_MAX} in all"
        )
    check_entries("topk_indices", topk_indices)
    outputs = pair("out", out)
    slots = call.output("out[0] (slots)", outputs[0], INT32, topk_indices.shape)
    misses = call.output("out[1] (misses)", outputs[1], INT32, topk_indices.shape)
    with call.kernels("residency") as kernels:
        kernels.resolve_resident(Selection(
            topk_indices, query_start_loc, seq_lens, lanes, slot_of_row, row_of_slot, last_use, clock, compress_ratio,
            slots, misses,
        ))  # fmt: skip
    return call.results()


@launch_cached
def fetch_resident(
    misses: Array,
    slots: Array,
    query_start_loc: Array,
    block_table: Array,
    host_cache: Array,
    cache: Array,
    *,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Copy the rows that missed from a cache in pinned host memory to their slots of a device cache, in one launch.

    Args:
        misses, slots: [T, K] int32 of `resolve_resident`; layers that share a selection share them, too
        query_start_loc: [R + 1] int32, as `resolve_resident` took it
        block_table: [R, B] int32, pages of host_cache
        host_cache: rows of every request, uint8 [num_blocks, block_size, token_bytes] or in its type's values, as
            attention takes it. In pinned host memory (`cumla.pages.host_pool`), which must stay allocated until the
            stream has copied it, or where the other arrays are
        cache: slots of every lane, written; a cache of the same format, its pages of any size
        block_size: rows of a page of both caches where these are raw pages [num_blocks, page_bytes]
        layout: a CacheLayout or the name of one; None: inferred from `cache`

    A row is skipped whose page is absent or whose slot is not in `cache`.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    check_optional_size(block_size=block_size)
    call = Call(backend, stream)
    misses = call.array("misses", misses, INT32, ("T", "K"))
    slots = call.array("slots", slots, INT32, ("T", "K"))
    block_table = call.array("block_table", block_table, INT32, ("R", -1))
    query_start_loc = call.array("query_start_loc", query_start_loc, INT32, (len(block_table) + 1,))
    check_entries("misses", misses)
    of_source = dlpack.argument(host_cache, "host_cache", stream=call.stream)
    across = isinstance(of_source.native, np.ndarray) and not isinstance(misses, np.ndarray)
    if not across:
        call.take(of_source)
    of_target = call.borrow("cache", cache, writable=True)
    layout = cache_layout(of_target, layout, block_size)
    target = cache_pages(call, of_target, layout, block_size)
    source = cache_pages(call, of_source, layout, block_size)
    if not (misses.size and len(block_table) and len(source.bytes) and len(target.bytes)):
        return
    with call.kernels("residency") as kernels:
        (kernels.fetch_resident_across if across else kernels.fetch_resident)(
            Fetch(misses, slots, query_start_loc, block_table, source, target)
        )


def check_entries(name: str, entries: Any) -> None:
    """Raise ValueError for more entries than kernels count."""
    if entries.size > MOST_ENTRIES:
        raise ValueError(f"{name}: got {entries.size} entries, expected at most {MOST_ENTRIES}")
