"""Insert into and gather from caches of plain rows, one row per loop step, parallel over the cores."""

import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import quantized
from ..types.segments import Pages
from .rows import E4M3_VALUES, GROUPS, copy_row, find_request, group_of, lookup_slot
from .sparse_cache import TO_COPY, TO_QUANTIZE, quantize_and_insert_k_cache
from .threads import parallel_for


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
        nanoseconds = values.shape[1] * TO_QUANTIZE
        parallel_for(len(values), nanoseconds, _quantize, values, np.float32(np.ravel(scale)[0]), row_bytes)
    slots = np.ascontiguousarray(slot_mapping, dtype=np.int64)
    nanoseconds = row_bytes.size * TO_COPY // GROUPS
    parallel_for(GROUPS, nanoseconds, _scatter, row_bytes, pages.bytes, slots, pages.block_size)


@compiled(nogil=True)
def _quantize(first_row, end_row, values, scale, row_bytes):
    for row in range(first_row, end_row):
        for i in range(values.shape[1]):
            row_bytes[row, i] = quantized(values[row, i], scale)


@compiled(nogil=True)
def _scatter(first_group, end_group, rows, pages, slots, block_size):
    width = rows.shape[1]
    for row in range(len(slots)):
        slot = slots[row]
        if 0 <= slot < pages.shape[0] * block_size and first_group <= group_of(slot) < end_group:
            start = slot % block_size * width
            copy_row(pages[slot // block_size, start : start + width], rows[row])


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
        _gather_rows(pages, dst, block_table, cu_seq_lens, starts)
        return
    first, end = (min(max(int(cu_seq_lens[i]), 0), len(dst)) for i in (0, -1))
    stored = np.zeros((end, pages.layout.row_bytes), np.uint8)
    _gather_rows(pages, stored, block_table, cu_seq_lens, starts)
    with np.errstate(all="ignore"):  # a float16 output may overflow to infinity
        dst[first:end] = E4M3_VALUES[stored[first:]] * np.float32(np.ravel(scale)[0])


def _gather_rows(
    pages: Pages, dst: np.ndarray, block_table: np.ndarray, cu_seq_lens: np.ndarray, seq_starts: np.ndarray
) -> None:
    rows, nanoseconds = min(len(dst), max(int(cu_seq_lens[-1]), 0)), dst.shape[1] * TO_COPY
    parallel_for(rows, nanoseconds, _gather, pages.bytes, dst, block_table, cu_seq_lens, seq_starts, pages.block_size)


@compiled(nogil=True)
def _gather(first_row, end_row, pages, dst, block_table, cu_seq_lens, seq_starts, block_size):
    width = dst.shape[1]
    for row in range(first_row, end_row):
        request = find_request(cu_seq_lens, row)
        if request < 0:
            continue
        position = np.int64(seq_starts[request]) + row - cu_seq_lens[request]
        slot = lookup_slot(block_table, request, position, block_size)
        if 0 <= slot < pages.shape[0] * block_size:
            start = slot % block_size * width
            copy_row(dst[row], pages[slot // block_size, start : start + width])
        else:
            dst[row] = 0
