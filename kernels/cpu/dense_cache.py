"""Insert into and gather from caches of plain rows, one row a loop step, over all cores."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..numba_common.numbers import quantized
from ..types.segments import Pages
from .rows import E4M3_VALUES, find_request, lookup_slot
from .sparse_cache import quantize_and_insert_k_cache


def concat_and_cache_mla(
    kv_c: np.ndarray,
    k_pe: np.ndarray,
    pages: Pages,
    slot_mapping: np.ndarray,
    scale: float | np.ndarray | None,
) -> None:
    layout = pages.layout
    rows = np.concatenate([kv_c[: len(slot_mapping)], k_pe[: len(slot_mapping)]], axis=1)
    if layout.num_scales:
        quantize_and_insert_k_cache(rows, pages, slot_mapping, True)
        return
    with np.errstate(all="ignore"):  # float16 may overflow to infinity
        values = rows.astype(np.float32 if scale is not None else np.dtype(layout.value_type), copy=False)
    if scale is None:
        row_bytes = values.view(np.uint8)
    else:
        row_bytes = np.empty(values.shape, np.uint8)
        _quantize(values, np.float32(np.ravel(scale)[0]), row_bytes)
    _scatter(row_bytes, pages.bytes, np.ascontiguousarray(slot_mapping, dtype=np.int64), pages.block_size)


@njit(parallel=True, cache=True)
def _quantize(values, scale, row_bytes):
    for row in prange(len(values)):
        for i in range(values.shape[1]):
            row_bytes[row, i] = quantized(values[row, i], scale)


@njit(parallel=True, cache=True)
def _scatter(rows, pages, slots, block_size):
    width = rows.shape[1]
    for row in prange(len(slots)):
        slot = slots[row]
        if 0 <= slot < pages.shape[0] * block_size:
            start = slot % block_size * width
            pages[slot // block_size, start : start + width] = rows[row]


def gather_cache(
    pages: Pages,
    dst: np.ndarray,
    block_table: np.ndarray,
    cu_seq_lens: np.ndarray,
    seq_starts: np.ndarray | None,
    scale: float | np.ndarray | None,
) -> None:
    starts = np.zeros(len(block_table), np.int32) if seq_starts is None else np.ascontiguousarray(seq_starts)
    if scale is None:
        _gather(pages.bytes, dst, block_table, cu_seq_lens, starts, pages.block_size)
        return
    first, end = (min(max(int(cu_seq_lens[i]), 0), len(dst)) for i in (0, -1))
    stored = np.zeros((end, pages.layout.row_bytes), np.uint8)
    _gather(pages.bytes, stored, block_table, cu_seq_lens, starts, pages.block_size)
    with np.errstate(all="ignore"):  # a float16 output may overflow to infinity
        dst[first:end] = E4M3_VALUES[stored[first:]] * np.float32(np.ravel(scale)[0])


@njit(parallel=True, cache=True)
def _gather(pages, dst, block_table, cu_seq_lens, seq_starts, block_size):
    width = dst.shape[1]
    for row in prange(min(len(dst), max(cu_seq_lens[-1], 0))):
        request = find_request(cu_seq_lens, row)
        if request < 0:
            continue
        position = np.int64(seq_starts[request]) + row - cu_seq_lens[request]
        slot = lookup_slot(block_table, request, position, block_size)
        if 0 <= slot < pages.shape[0] * block_size:
            start = slot % block_size * width
            dst[row] = pages[slot // block_size, start : start + width]
        else:
            dst[row] = 0
