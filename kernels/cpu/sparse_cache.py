"""Insert into and gather from the paged caches, one token per loop step, parallel over the cores."""

import ml_dtypes
import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import e2m1_in_units, one_scale
from ..types.segments import GatheredRows, Pages
from .rows import GROUPS, Geometry, copy_row, find_request, geometry_of, group_of, lookup_slot, read_row, write_row
from .threads import parallel_for

# Approximate nanoseconds per value.
TO_QUANTIZE, TO_DEQUANTIZE, TO_COPY = 4, 1, 1

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def quantize_and_insert_k_cache(
    k: np.ndarray, pages: Pages, slot_mapping: np.ndarray, power_of_two_scales: bool
) -> None:
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = np.ascontiguousarray(k[: len(slot_mapping)], dtype=np.float32)
        rope = np.ascontiguousarray(k[: len(slot_mapping), pages.layout.quantized_dim :], dtype=BFLOAT16)
    slots = np.ascontiguousarray(slot_mapping, dtype=np.int64)
    nanoseconds = values.size * TO_QUANTIZE // GROUPS
    parallel_for(
        GROUPS, nanoseconds, _insert,
        values, rope.view(np.uint16), pages.bytes, slots, geometry_of(pages), power_of_two_scales,
    )  # fmt: skip


@compiled(nogil=True)
def _insert(
    first_group: int,
    end_group: int,
    values: np.ndarray,
    rope: np.ndarray,
    pages: np.ndarray,
    slots: np.ndarray,
    g: Geometry,
    power_of_two: bool,
) -> None:
    for token in range(len(slots)):
        slot = slots[token]
        if 0 <= slot < pages.shape[0] * g.block_size and first_group <= group_of(slot) < end_group:
            write_row(pages[slot // g.block_size], slot % g.block_size, values[token], rope[token], g, power_of_two)


def dequantize_and_gather_k_cache(args: GatheredRows) -> None:
    out, pages, seq_lens, gather_lens, block_table, offset, compress_ratio = args
    seq_lens = seq_lens.astype(np.int64) // compress_ratio
    lens = np.minimum(np.maximum(seq_lens if gather_lens is None else gather_lens, 0), seq_lens).astype(np.int64)
    rows = np.maximum(np.minimum(lens, out.shape[1] - offset), 0)
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows, out=starts[1:])
    values = np.empty((int(starts[-1]), pages.layout.head_dim), np.float32)
    parallel_for(
        len(values), values.shape[1] * TO_DEQUANTIZE, _gather,
        values, pages.bytes, seq_lens - lens, starts, block_table, geometry_of(pages),
    )  # fmt: skip
    quantized = pages.layout.quantized_dim
    holds_bfloat16 = pages.layout.value_type != "float32"  # values from `kept` on
    with np.errstate(over="ignore", invalid="ignore"):  # a float16 output may overflow to infinity
        for request in range(len(rows)):
            target = out[request, offset : offset + rows[request]]
            source = values[starts[request] : starts[request + 1]]
            target[:] = source
            if out.dtype == BFLOAT16 and holds_bfloat16:  # NaN's bits, too
                target.view(np.uint16)[:, quantized:] = source.view(np.uint32)[:, quantized:] >> 16


@compiled(nogil=True)
def _gather(
    first_row: int,
    end_row: int,
    values: np.ndarray,
    pages: np.ndarray,
    positions: np.ndarray,
    starts: np.ndarray,
    block_table: np.ndarray,
    g: Geometry,
) -> None:
    for row in range(first_row, end_row):
        request = np.searchsorted(starts, row, side="right") - 1
        slot = lookup_slot(block_table, request, positions[request] + row - starts[request], g.block_size)
        if 0 <= slot < pages.shape[0] * g.block_size:
            read_row(pages[slot // g.block_size], slot % g.block_size, values[row], g)
        else:
            values[row] = 0


def cp_gather_indexer_k_quant_cache(
    pages: Pages, dst_k: np.ndarray, dst_scale: np.ndarray, block_table: np.ndarray, cu_seq_lens: np.ndarray
) -> None:
    rows = min(len(dst_k), max(int(cu_seq_lens[-1]), 0))
    parallel_for(
        rows, dst_k.shape[1] * TO_COPY, _gather_indexer,
        pages.bytes, dst_k, dst_scale, block_table, cu_seq_lens, geometry_of(pages),
    )  # fmt: skip


@compiled(nogil=True)
def _gather_indexer(first_row, end_row, pages, dst_k, dst_scale, block_table, cu_seq_lens, g):
    for row in range(first_row, end_row):
        request = find_request(cu_seq_lens, row)
        if request < 0:
            continue
        slot = lookup_slot(block_table, request, np.int64(row) - cu_seq_lens[request], g.block_size)
        if 0 <= slot < pages.shape[0] * g.block_size:
            page, token = pages[slot // g.block_size], slot % g.block_size
            start = g.scale_start + token * g.scale_stride
            values, scales = page[token * g.row_bytes : (token + 1) * g.row_bytes], page[start : start + g.scale_bytes]
            if dst_k.shape[1] == g.row_bytes:
                copy_row(dst_k[row], values)
                copy_row(dst_scale[row], scales)
                continue
            unit = one_scale(scales[0], scales[1], scales[2], scales[3])
            for i in range(g.head_dim):
                dst_k[row, i] = e2m1_in_units(values[i // 2] >> 4 * (i % 2) & 15, scales[i // g.scale_tile], unit)
            for i in range(4):
                dst_scale[row, i] = unit << 23 >> 8 * i & 255
        else:
            dst_k[row] = 0
            dst_scale[row] = 0
