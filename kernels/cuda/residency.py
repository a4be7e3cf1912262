"""Rows of a cache in host memory, the hot ones of them in device memory."""

from typing import Any

import numpy as np

from ..types.residency import Fetch, Selection
from ..types.segments import Pages
from .compile import kernel
from .constants import constant
from .launch import strides
from .spans import address, is_accessible

SOURCE = "common/residency.cu"
THREADS, FETCH_THREADS, ENTRIES = (constant(SOURCE, name) for name in ("THREADS", "FETCH_THREADS", "ENTRIES"))


def resolve_resident(args: Selection) -> None:
    tokens, topk = args.topk_indices.shape
    states = (args.slot_of_row, args.row_of_slot, args.last_use)
    tables = [x for state in states[:2] for x in (state, strides(state)[0], state.shape[1])]
    kernel(SOURCE, "resolve_resident")(
        (max(len(args.lanes), 1),), (THREADS,),
        (
            args.topk_indices, strides(args.topk_indices)[0], tokens, topk, args.query_start_loc, args.seq_lens,
            args.lanes, len(args.lanes), *tables, args.last_use, strides(args.last_use)[0], args.clock,
            len(args.clock), args.compress_ratio, args.slots, strides(args.slots)[0], args.misses,
            strides(args.misses)[0],
        ), overlap=True,
    )  # fmt: skip


def fetch_resident(args: Fetch) -> None:
    tokens, topk = args.misses.shape
    requests = len(args.query_start_loc) - 1
    warps = -(-tokens * topk // (ENTRIES * requests))  # of a request with the mean number of tokens
    ctas = -(-32 * warps // FETCH_THREADS)
    kernel(SOURCE, "fetch_resident")(
        (requests * ctas,), (FETCH_THREADS,),
        (
            args.misses, strides(args.misses)[0], args.slots, strides(args.slots)[0], tokens, topk,
            args.query_start_loc, ctas, args.block_table, strides(args.block_table)[0], args.block_table.shape[1],
            *_members(args.source), *_members(args.target), args.source.layout.row_bytes, args.tail_bytes,
        ), overlap=True,
    )  # fmt: skip


def _members(pages: Pages) -> tuple[Any, ...]:
    array = pages.bytes
    start = address(array) if isinstance(array, np.ndarray) else array
    return start, array.strides[0], len(array), pages.block_size


def fetch_resident_across(args: Fetch) -> None:
    """Rows of pages in host memory to device memory. Raises ValueError unless a device reads the host memory."""
    if not is_accessible(args.source.bytes):
        raise ValueError("host_cache: got host memory that is not pinned, expected memory of cumla.pages.host_pool")
    fetch_resident(args)
