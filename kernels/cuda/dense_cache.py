"""Insert into and gather from caches of plain rows."""

from typing import Any

from numpy import float32, generic

from ..types.segments import Pages
from .compile import kernel
from .launch import C_NAMES, MAX_BLOCKS, is_aligned, strides, unit
from .sparse_cache import WARPS, insert


def scale_arguments(scale: Any | None) -> tuple[Any, ...]:
    """A scale, an array or a number, as the kernels' (pointer or null, value)."""
    if scale is None or isinstance(scale, generic):
        return 0, float32(1) if scale is None else scale
    return scale.data.ptr, float32(1)


def concat_and_cache_mla(kv_c: Any, k_pe: Any, pages: Pages, slot_mapping: Any, scale: Any | None) -> None:
    layout = pages.layout
    aligned = is_aligned(kv_c, k_pe, pages.bytes)
    if layout.num_scales:
        insert(kv_c, k_pe, strides(k_pe)[0], aligned, pages, slot_mapping, True)
        return
    kernel(
        "common/dense_insert.cu",
        "concat_and_cache_mla",
        INPUT=C_NAMES[kv_c.dtype.name],
        CACHE=C_NAMES.get(layout.value_type, layout.value_type),
        KV_C_DIM=kv_c.shape[1],
        SLOT=C_NAMES[slot_mapping.dtype.name],
        ALIGNED=int(aligned),
    )(
        (-(-len(slot_mapping) // WARPS),),
        (32 * WARPS,),
        (
            kv_c, strides(kv_c)[0], k_pe, strides(k_pe)[0], slot_mapping, len(slot_mapping),
            pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size, *scale_arguments(scale),
        ),
        overlap=True,
    )  # fmt: skip


def gather_cache(
    pages: Pages, dst: Any, block_table: Any, cu_seq_lens: Any, seq_starts: Any | None, scale: Any | None
) -> None:
    num_rows, row_bytes = len(dst), pages.layout.row_bytes
    if scale is None:
        gather = kernel("common/dense_gather.cu", "gather_cache", UNIT=unit(row_bytes, pages.bytes, dst))
    else:
        aligned = row_bytes % 8 == 0 and is_aligned(pages.bytes, dst)
        gather = kernel("common/dense_gather.cu", "gather_cache", OUTPUT=C_NAMES[dst.dtype.name], ALIGNED=int(aligned))
    starts = (0, 0) if seq_starts is None else (seq_starts.data.ptr, strides(seq_starts)[0])
    gather(
        (min(-(-num_rows // WARPS), MAX_BLOCKS),),
        (32 * WARPS,),
        (
            pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size, row_bytes,
            dst, dst.strides[0], num_rows, block_table, strides(block_table)[0], block_table.shape[1],
            cu_seq_lens, len(block_table), *starts, *scale_arguments(scale),
        ),
        overlap=True,
    )  # fmt: skip
