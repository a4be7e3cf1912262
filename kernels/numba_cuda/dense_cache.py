"""Insert into and gather from caches of plain rows."""

from typing import Any

import numpy as np

from ..numba_common.numbers import KINDS, dequantized, from_float32, quantized, to_float32
from ..types.segments import Pages
from .compiler import cuda
from .launch import MAX_BLOCKS, NO_SCALE, NO_VECTOR, kind_of, launch
from .rows import find_request, lookup_slot, store
from .sparse_cache import THREADS, insert


def scale_arguments(scale: Any) -> tuple[Any, Any]:
    """A scale as (array of one value, number); kernels use the number if the array is empty."""
    return (NO_SCALE, scale) if isinstance(scale, np.float32) else (scale, np.float32(1))


def concat_and_cache_mla(kv_c: Any, k_pe: Any, pages: Pages, slot_mapping: Any, scale: Any | None) -> None:
    layout = pages.layout
    if layout.num_scales:
        insert(kv_c, k_pe, pages, slot_mapping, True)
    elif scale is None:
        launch(
            insert_values_kernel, len(slot_mapping), THREADS,
            kv_c, k_pe, kind_of(kv_c), slot_mapping, pages.bytes, pages.block_size, KINDS[layout.value_type],
        )  # fmt: skip
    else:
        launch(
            insert_fp8_kernel, len(slot_mapping), THREADS,
            kv_c, k_pe, kind_of(kv_c), slot_mapping, pages.bytes, pages.block_size, *scale_arguments(scale),
        )  # fmt: skip


def insert_values_kernel(kv_c, k_pe, kind, slots, pages, block_size, stored_kind):
    """A thread block takes a token, a thread every blockDim.x-th value of its row."""
    token = cuda.blockIdx.x
    slot = np.int64(slots[token])
    if slot < 0 or slot >= pages.shape[0] * block_size:
        return
    width = kv_c.shape[1] + k_pe.shape[1]
    page, start = pages[slot // block_size], slot % block_size * 2 * width
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        bits = np.int64(kv_c[token, i] if i < kv_c.shape[1] else k_pe[token, i - kv_c.shape[1]])
        if kind != stored_kind:  # values in the cache's type are copied bit by bit, NaN included
            bits = from_float32(to_float32(bits, kind), stored_kind)
        store(page, start + 2 * i, 2, bits)


def insert_fp8_kernel(kv_c, k_pe, kind, slots, pages, block_size, scale, scale_value):
    """A thread block takes a token, a thread every blockDim.x-th value of its row."""
    token = cuda.blockIdx.x
    slot = np.int64(slots[token])
    if slot < 0 or slot >= pages.shape[0] * block_size:
        return
    divisor = float32_of(scale, scale_value)
    width = kv_c.shape[1] + k_pe.shape[1]
    page, start = pages[slot // block_size], slot % block_size * width
    for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        bits = kv_c[token, i] if i < kv_c.shape[1] else k_pe[token, i - kv_c.shape[1]]
        page[start + i] = quantized(to_float32(bits, kind), divisor)


@cuda.jit(device=True)
def float32_of(scale, scale_value):
    """The scale of a cache: the array's only value, as bits, or the number if the array is empty."""
    return to_float32(scale[0], 0) if len(scale) else scale_value


def gather_cache(
    pages: Pages, dst: Any, block_table: Any, cu_seq_lens: Any, seq_starts: Any | None, scale: Any | None
) -> None:
    blocks = min(len(dst), MAX_BLOCKS)
    starts = NO_VECTOR if seq_starts is None else seq_starts
    where = (pages.bytes, pages.block_size, block_table, cu_seq_lens, starts)
    if scale is None:
        launch(copy_rows_kernel, blocks, THREADS, dst, *where)
    else:
        launch(dequantize_rows_kernel, blocks, THREADS, dst, kind_of(dst), *where, *scale_arguments(scale))


@cuda.jit(device=True)
def gathered_slot(row, num_slots, block_size, block_table, cu_seq_lens, seq_starts):
    """The slot of a gathered row; -1 if it is absent, -2 if the row belongs to no request."""
    request = find_request(cu_seq_lens, row)
    if request < 0:
        return -2
    position = np.int64(row) - cu_seq_lens[request]
    if len(seq_starts):
        position += seq_starts[request]
    slot = lookup_slot(block_table, request, position, block_size)
    return slot if slot < num_slots else -1


def copy_rows_kernel(dst, pages, block_size, block_table, cu_seq_lens, seq_starts):
    """A thread block takes every gridDim.x-th row, a thread every blockDim.x-th byte of it."""
    num_rows = min(len(dst), max(cu_seq_lens[len(cu_seq_lens) - 1], 0))
    width = dst.shape[1]
    for row in range(cuda.blockIdx.x, num_rows, cuda.gridDim.x):
        slot = gathered_slot(row, pages.shape[0] * block_size, block_size, block_table, cu_seq_lens, seq_starts)
        if slot > -2:
            page, start = slot // block_size, slot % block_size * width
            for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                dst[row, i] = pages[page, start + i] if slot >= 0 else 0


def dequantize_rows_kernel(dst, kind, pages, block_size, block_table, cu_seq_lens, seq_starts, scale, scale_value):
    """A thread block takes every gridDim.x-th row, a thread every blockDim.x-th value of it."""
    num_rows = min(len(dst), max(cu_seq_lens[len(cu_seq_lens) - 1], 0))
    width = dst.shape[1]
    factor = float32_of(scale, scale_value)
    for row in range(cuda.blockIdx.x, num_rows, cuda.gridDim.x):
        slot = gathered_slot(row, pages.shape[0] * block_size, block_size, block_table, cu_seq_lens, seq_starts)
        if slot > -2:
            page, start = slot // block_size, slot % block_size * width
            for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
                bits = np.int64(0)
                if slot >= 0:
                    bits = from_float32(dequantized(pages[page, start + i], factor), kind)
                dst[row, i] = bits
