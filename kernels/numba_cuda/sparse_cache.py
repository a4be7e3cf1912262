"""Insert into and gather from the paged caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..numba_common.geometry import geometry_of
from ..numba_common.numbers import (
    BFLOAT16,
    bfloat16_bits,
    e2m1_in_units,
    e2m1_quantized,
    float32_bits,
    from_float32,
    one_scale,
    quantized,
    to_float32,
)
from ..types.segments import GatheredRows, Pages
from .compiler import cuda
from .launch import MAX_BLOCKS, NO_VECTOR, kind_of, launch
from .rows import counts_for_scale, find_request, load, lookup_slot, read_value, scale_of_tile, store, store_scales

THREADS = 128
MAX_TILES = 32  # tiles of a row, in any layout


def quantize_and_insert_k_cache(k: Any, pages: Pages, slot_mapping: Any, power_of_two_scales: bool) -> None:
    insert(k, k[:, pages.layout.quantized_dim :], pages, slot_mapping, power_of_two_scales)


def insert(k: Any, rope: Any, pages: Pages, slot_mapping: Any, power_of_two_scales: bool) -> None:
    """Insert rows whose quantised values are in `k`; `rope` has the 16-bit values."""
    launch(
        insert_kernel, len(slot_mapping), THREADS,
        k, rope, kind_of(k), slot_mapping, pages.bytes, geometry_of(pages), power_of_two_scales,
    )  # fmt: skip


def insert_kernel(k, rope, kind, slots, pages, g, powers_of_two):
    """A thread block takes a token, a thread every blockDim.x-th value of its row."""
    # Magnitudes are compared as float32 bits, which have the same order and allow an atomic maximum. NaN is largest.
    largest = cuda.shared.array(MAX_TILES, np.int32)
    token = cuda.blockIdx.x
    slot = np.int64(slots[token])
    if slot < 0 or slot >= pages.shape[0] * g.block_size:
        return
    page, row = pages[slot // g.block_size], slot % g.block_size
    for tile in range(cuda.threadIdx.x, MAX_TILES, cuda.blockDim.x):
        largest[tile] = 0
    cuda.syncthreads()

    for i in range(cuda.threadIdx.x, g.quantized_dim, cuda.blockDim.x):
        magnitude = float32_bits(to_float32(k[token, i], kind)) & 0x7FFFFFFF
        if counts_for_scale(magnitude, g):
            cuda.atomic.max(largest, i // g.scale_tile, np.int32(magnitude))
    cuda.syncthreads()

    start = row * g.row_bytes
    store_scales(page, row, largest, powers_of_two, g)
    if g.e2m1_values:
        for i in range(cuda.threadIdx.x, g.quantized_bytes, cuda.blockDim.x):
            scale = scale_of_tile(largest[2 * i // g.scale_tile], powers_of_two, g)
            low = e2m1_quantized(to_float32(k[token, 2 * i], kind), scale)
            page[start + i] = low | (e2m1_quantized(to_float32(k[token, 2 * i + 1], kind), scale) << 4)
        return
    for i in range(cuda.threadIdx.x, g.head_dim, cuda.blockDim.x):
        if i < g.quantized_dim:
            scale = scale_of_tile(largest[i // g.scale_tile], powers_of_two, g)
            page[start + i] = quantized(to_float32(k[token, i], kind), scale)
        else:
            x = rope[token, i - g.quantized_dim]
            bits = np.int64(x) if kind == BFLOAT16 else bfloat16_bits(to_float32(x, kind))  # copies NaN bit by bit
            store(page, start + g.rope_offset + 2 * (i - g.quantized_dim), 2, bits)


def dequantize_and_gather_k_cache(args: GatheredRows) -> None:
    out, pages, seq_lens, gather_lens, block_table, offset, compress_ratio = args
    requests, num_rows = out.shape[0], out.shape[1] - offset
    if num_rows:
        launch(
            gather_kernel, requests * num_rows, THREADS,
            out, kind_of(out), pages.bytes, geometry_of(pages), seq_lens,
            NO_VECTOR if gather_lens is None else gather_lens, block_table, offset, num_rows, compress_ratio,
        )  # fmt: skip


def gather_kernel(out, kind, pages, g, seq_lens, gather_lens, block_table, offset, num_rows, compress_ratio):
    """A thread block takes a row of `out`, a thread every blockDim.x-th value of it."""
    request, row = cuda.blockIdx.x // num_rows, cuda.blockIdx.x % num_rows
    seq_len = np.int64(seq_lens[request]) // compress_ratio
    gathered = seq_len
    if len(gather_lens):
        gathered = min(np.int64(gather_lens[request]), seq_len)
    if row >= gathered:
        return
    slot = lookup_slot(block_table, request, seq_len - gathered + row, g.block_size)
    present = slot >= 0 and slot < pages.shape[0] * g.block_size
    for i in range(cuda.threadIdx.x, g.head_dim, cuda.blockDim.x):
        bits = np.int64(0)
        if present:
            page, token = pages[slot // g.block_size], slot % g.block_size
            if kind == BFLOAT16 and i >= g.quantized_dim:
                bits = load(page, token * g.row_bytes + g.rope_offset + 2 * (i - g.quantized_dim), 2)  # NaN's bits, too
            else:
                bits = from_float32(read_value(page, token, i, g), kind)
        out[request, offset + row, i] = bits


def cp_gather_indexer_k_quant_cache(
    pages: Pages, dst_k: Any, dst_scale: Any, block_table: Any, cu_seq_lens: Any
) -> None:
    launch(
        gather_indexer_kernel, min(len(dst_k), MAX_BLOCKS), THREADS,
        pages.bytes, geometry_of(pages), dst_k, dst_scale, block_table, cu_seq_lens,
    )  # fmt: skip


def gather_indexer_kernel(pages, g, dst_k, dst_scale, block_table, cu_seq_lens):
    """A thread block takes every gridDim.x-th row, a thread every blockDim.x-th byte of it."""
    num_rows = min(len(dst_k), max(cu_seq_lens[len(cu_seq_lens) - 1], 0))
    for row in range(cuda.blockIdx.x, num_rows, cuda.gridDim.x):
        request = find_request(cu_seq_lens, row)
        if request < 0:
            continue
        slot = lookup_slot(block_table, request, np.int64(row) - cu_seq_lens[request], g.block_size)
        present = slot >= 0 and slot < pages.shape[0] * g.block_size
        page, token = slot // g.block_size, slot % g.block_size
        if present and dst_k.shape[1] != g.row_bytes:
            start = g.scale_start + token * g.scale_stride
            scales = pages[page, start : start + g.scale_bytes]
            unit = one_scale(scales[0], scales[1], scales[2], scales[3])
            for i in range(cuda.threadIdx.x, g.head_dim, cuda.blockDim.x):
                code = pages[page, token * g.row_bytes + i // 2] >> 4 * (i % 2) & 15
                dst_k[row, i] = e2m1_in_units(code, scales[i // g.scale_tile], unit)
            if cuda.threadIdx.x == 0:
                store(dst_scale[row], 0, 4, unit << 23)
            continue
        for i in range(cuda.threadIdx.x, dst_k.shape[1], cuda.blockDim.x):
            dst_k[row, i] = pages[page, token * g.row_bytes + i] if present else 0
        for i in range(cuda.threadIdx.x, g.scale_bytes, cuda.blockDim.x):
            dst_scale[row, i] = pages[page, g.scale_start + token * g.scale_stride + i] if present else 0
