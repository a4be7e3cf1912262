"""Insert into and gather from the paged caches."""

import ml_dtypes
import numpy as np

from ..types.segments import GatheredRows, Pages
from .rows import gathered_rows, lookup_slot, read_tokens, rope_bits, write_tokens

BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
UE8M0_NAN, E4M3_NAN = 0xFF, 0x7F


def quantize_and_insert_k_cache(
    k: np.ndarray, pages: Pages, slot_mapping: np.ndarray, power_of_two_scales: bool
) -> None:
    tokens = np.flatnonzero((slot_mapping >= 0) & (slot_mapping < pages.num_slots))
    with np.errstate(invalid="ignore"):  # signalling NaN
        values, rope = np.split(k[tokens], [pages.layout.quantized_dim], axis=1)
        slots = slot_mapping[tokens].astype(np.int64)
        write_tokens(pages, slots, values.astype(np.float32), rope.astype(BFLOAT16), power_of_two_scales)


def dequantize_and_gather_k_cache(args: GatheredRows) -> None:
    out, pages, seq_lens, gather_lens, block_table, offset, compress_ratio = args
    for request, seq_len in enumerate(seq_lens.astype(np.int64) // compress_ratio):
        wanted = seq_len if gather_lens is None else gather_lens[request]
        gather_len = max(0, min(seq_len, wanted, out.shape[1] - offset))
        first = seq_len - max(0, min(seq_len, wanted))
        positions = range(int(first), int(first) + int(gather_len))
        slots = np.array([lookup_slot(block_table, request, x, pages.block_size) for x in positions], np.int64)
        rows = np.arange(len(slots)) + offset
        out[request, rows] = 0
        present = (slots >= 0) & (slots < pages.num_slots)
        rows, slots = rows[present], slots[present]
        with np.errstate(over="ignore", invalid="ignore"):  # a float16 output may overflow to infinity
            out[request, rows] = read_tokens(pages, slots).astype(np.float32).astype(out.dtype)
        if out.dtype == BFLOAT16 and pages.layout.value_type != "float32":  # NaN's bits, too
            out.view(np.uint16)[request, rows, pages.layout.quantized_dim :] = rope_bits(pages, slots)


def cp_gather_indexer_k_quant_cache(
    pages: Pages, dst_k: np.ndarray, dst_scale: np.ndarray, block_table: np.ndarray, cu_seq_lens: np.ndarray
) -> None:
    layout = pages.layout
    for request, row, position in gathered_rows(cu_seq_lens, None, len(dst_k)):
        slot = lookup_slot(block_table, request, position, pages.block_size)
        if not 0 <= slot < pages.num_slots:
            dst_k[row], dst_scale[row] = 0, 0
            continue
        page, token = pages.bytes[slot // pages.block_size], slot % pages.block_size
        start = layout.scale_start(pages.block_size) + token * layout.scale_stride
        scales = page[start : start + layout.scale_bytes]
        if dst_k.shape[1] != layout.row_bytes:  # MXFP4 as e4m3, in units of 2^-6 of the largest scale
            unit = np.exp2(max(int(scales[scales != UE8M0_NAN].max(initial=0)) - 6, 1) - 127.0)
            values = read_tokens(pages, np.array([slot])) / unit
            dst_k[row] = np.where(np.isnan(values), E4M3_NAN, values.astype(E4M3).view(np.uint8))
            dst_scale[row] = np.full(1, unit, np.float32).view(np.uint8)
            continue
        dst_k[row] = page[token * layout.row_bytes : (token + 1) * layout.row_bytes]
        dst_scale[row] = scales
