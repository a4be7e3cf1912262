"""Insert into and gather from the paged caches."""

from __future__ import annotations

from typing import Any

from ...layout import INDEXER_FP8
from ..types.segments import GatheredRows, Pages
from .compile import kernel
from .constants import constant
from .launch import C_NAMES, MAX_BLOCKS, is_aligned, pointer, strides

INSERT, INSERT_KEYS, GATHER_KEYS = "common/cache_insert.cu", "common/indexer_insert.cu", "common/indexer_gather.cu"
WARPS = 4  # per CTA
MAX_GRID_Y = 65_535
TOKENS = 2  # per warp in a gather: see docs/kernels/cache.md
STREAMED_ROWS = 8_192  # gathered rows above which they would evict each other from L2


def quantize_and_insert_k_cache(k: Any, pages: Pages, slot_mapping: Any, power_of_two_scales: bool) -> None:
    if pages.layout == INDEXER_FP8:  # its exponents have the usual minimum
        insert_indexer_keys(k, pages, slot_mapping, power_of_two_scales)
        return
    rope = k.data.ptr + pages.layout.quantized_dim * k.dtype.itemsize
    insert(k, rope, strides(k)[0], is_aligned(k, pages.bytes), pages, slot_mapping, power_of_two_scales)


def insert_indexer_keys(k: Any, pages: Pages, slot_mapping: Any, power_of_two_scales: bool) -> None:
    num_tokens = len(slot_mapping)
    kernel(
        INSERT_KEYS,
        "indexer_k_quant_and_cache",
        INPUT=C_NAMES[k.dtype.name],
        SLOT=C_NAMES[slot_mapping.dtype.name],
        POWER_OF_TWO=int(power_of_two_scales),
        ALIGNED=int(is_aligned(k, pages.bytes)),
    )(
        (-(-num_tokens // constant(INSERT_KEYS, "GROUPS")),),
        (constant(INSERT_KEYS, "THREADS"),),
        (
            k, strides(k)[0], slot_mapping, num_tokens, pages.bytes, pages.bytes.strides[0], pages.num_slots,
            pages.block_size,
        ),
        overlap=True,
    )  # fmt: skip


def insert(
    k: Any, rope: Any, rope_stride: int, aligned: bool, pages: Pages, slot_mapping: Any, power_of_two_scales: bool
) -> None:
    """Insert rows whose quantised values are in `k`; `rope`, an array or an address, has the 16-bit values."""
    num_tokens = len(slot_mapping)
    kernel(
        INSERT,
        "quantize_and_insert_k_cache",
        LAYOUT=pages.layout.name,
        INPUT=C_NAMES[k.dtype.name],
        SLOT=C_NAMES[slot_mapping.dtype.name],
        POWER_OF_TWO=int(power_of_two_scales),
        MIN_EXPONENT=pages.layout.min_exponent,
        ALIGNED=int(aligned),
    )(
        (-(-num_tokens // constant(INSERT, "TOKENS", LAYOUT=pages.layout)),),
        (constant(INSERT, "THREADS"),),
        (
            k, strides(k)[0], rope, rope_stride, slot_mapping, num_tokens,
            pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size,
        ),
        overlap=True,
    )  # fmt: skip


def dequantize_and_gather_k_cache(args: GatheredRows) -> None:
    requests, num_rows = args.out.shape[0], args.out.shape[1] - args.offset
    if num_rows == 0:
        return
    kernel(
        "common/cache_gather.cu",
        "dequantize_and_gather_k_cache",
        LAYOUT=args.pages.layout.name,
        ALIGNED=int(is_aligned(args.out, args.pages.bytes)),
        **gather_macros(args.out, requests * num_rows),
    )(
        (-(-num_rows // (WARPS * TOKENS)), min(requests, MAX_GRID_Y)),
        (32 * WARPS,),
        gather_arguments(args),
        overlap=True,
    )


def gather_macros(out: Any, num_rows: int) -> dict[str, Any]:
    return {"OUTPUT": C_NAMES[out.dtype.name], "TOKENS": TOKENS, "STREAM": int(num_rows >= STREAMED_ROWS)}


def gather_arguments(args: GatheredRows) -> tuple[Any, ...]:
    """Members of `GatheredRows` (common/gathered_rows.cuh)."""
    out, pages, seq_lens, gather_lens, block_table, offset, compress_ratio = args
    request_stride, token_stride, _ = strides(out)
    return (
        out.data.ptr + offset * out.strides[1], request_stride, token_stride, pages.bytes, pages.bytes.strides[0],
        pages.num_slots, seq_lens, pointer(gather_lens), block_table, strides(block_table)[0], out.shape[1] - offset,
        pages.block_size, out.shape[0], block_table.shape[1], compress_ratio, 0,
    )  # fmt: skip


def cp_gather_indexer_k_quant_cache(
    pages: Pages, dst_k: Any, dst_scale: Any, block_table: Any, cu_seq_lens: Any
) -> None:
    num_rows = len(dst_k)
    scales_aligned = (dst_scale.data.ptr | dst_scale.strides[0]) % 4 == 0
    to_e4m3 = int(dst_k.shape[1] != pages.layout.row_bytes)
    rows = constant(GATHER_KEYS, "ROWS", LAYOUT=pages.layout, TO_E4M3=to_e4m3)
    kernel(
        GATHER_KEYS,
        "cp_gather_indexer_k_quant_cache",
        LAYOUT=pages.layout.name,
        TO_E4M3=to_e4m3,
        ALIGNED=int(is_aligned(pages.bytes, dst_k) and scales_aligned),
    )(
        (min(-(-num_rows // rows), MAX_BLOCKS),),
        (constant(GATHER_KEYS, "THREADS"),),
        (
            pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size,
            dst_k, dst_k.strides[0], dst_scale, dst_scale.strides[0], num_rows,
            block_table, strides(block_table)[0], block_table.shape[1], cu_seq_lens, len(block_table),
        ),
        overlap=True,
    )  # fmt: skip
