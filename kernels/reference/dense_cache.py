"""Insert into and gather from caches of plain rows."""

import numpy as np

from ..types.segments import Pages
from .rows import E4M3_VALUES, gathered_rows, lookup_slot, to_e4m3
from .sparse_cache import quantize_and_insert_k_cache


def concat_and_cache_mla(
    kv_c: np.ndarray,
    k_pe: np.ndarray,
    pages: Pages,
    slot_mapping: np.ndarray,
    scale: float | np.ndarray | None,
) -> None:
    rows = np.concatenate([kv_c[: len(slot_mapping)], k_pe[: len(slot_mapping)]], axis=1)
    if pages.layout.num_scales:
        quantize_and_insert_k_cache(rows, pages, slot_mapping, True)
        return
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < pages.num_slots:
            row_bytes(pages, int(slot))[:] = stored(rows[token], pages, scale)


def stored(values: np.ndarray, pages: Pages, scale: float | np.ndarray | None) -> np.ndarray:
    """Values as the bytes of a row in the cache's format."""
    with np.errstate(all="ignore"):  # float16 may overflow to infinity, and a scale may be 0
        if scale is not None:
            return to_e4m3(values.astype(np.float32) / np.float32(scale))
        return values.astype(np.dtype(pages.layout.value_type)).view(np.uint8)


def row_bytes(pages: Pages, slot: int) -> np.ndarray:
    """A view of the bytes of the row of `slot`, to read or to write."""
    start = slot % pages.block_size * pages.layout.row_bytes
    return pages.bytes[slot // pages.block_size, start : start + pages.layout.row_bytes]


def gather_cache(
    pages: Pages,
    dst: np.ndarray,
    block_table: np.ndarray,
    cu_seq_lens: np.ndarray,
    seq_starts: np.ndarray | None,
    scale: float | np.ndarray | None,
) -> None:
    for request, row, position in gathered_rows(cu_seq_lens, seq_starts, len(dst)):
        slot = lookup_slot(block_table, request, position, pages.block_size)
        if not 0 <= slot < pages.num_slots:
            dst[row] = 0
        elif scale is None:
            dst[row] = row_bytes(pages, slot)
        else:
            with np.errstate(all="ignore"):  # a float16 output may overflow to infinity
                dst[row] = (E4M3_VALUES[row_bytes(pages, slot)] * np.float32(scale)).astype(dst.dtype)
