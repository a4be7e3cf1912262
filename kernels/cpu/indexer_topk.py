"""The indexer's top-k on the CPU: a radix selection of each row."""

import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import float32_bits
from ..reference.indexer import row_lens
from ..types.indexer import Rows, Slots
from ..types.indices import TopkSlots
from .indices import compute_global_topk_indices_and_lens
from .threads import parallel_for

DIGIT_BITS = 8  # of the radix selection
TO_SELECT = 10  # approximate nanoseconds per logit


def top_k_per_row(logits: np.ndarray, rows: Rows, indices: np.ndarray, slots: Slots | None = None) -> None:
    first, count = columns_of(rows, *logits.shape)
    bins = np.empty((len(logits), 1 << DIGIT_BITS), np.int64)
    parallel_for(len(logits), logits.shape[1] * TO_SELECT, _select, logits, first, count, bins, indices)
    if slots is not None:
        requests = np.arange(len(logits), dtype=np.int32) // np.int32(rows.next_n)
        is_valid = np.ones(len(logits), bool) if slots.is_valid is None else slots.is_valid
        of_rows = slots.block_table, slots.block_size, is_valid, slots.positions, slots.pool, slots.indices, slots.lens
        compute_global_topk_indices_and_lens(TopkSlots(indices, requests, *of_rows, compact=True, pool=slots.pool))


def columns_of(rows: Rows, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """First valid column and number of valid columns of each row."""
    zeros = np.zeros(num_rows, np.int64)
    if rows.lens is not None:
        return zeros, np.clip(row_lens(rows.lens, rows.next_n).astype(np.int64), 0, width)
    keys = width if rows.num_keys is None else rows.num_keys
    start = zeros if rows.starts is None else np.clip(rows.starts.astype(np.int64), 0, keys)
    end = zeros + keys if rows.ends is None else np.clip(rows.ends.astype(np.int64), start, keys)
    return (start, end - start) if rows.num_keys is None else (zeros, np.minimum(end - start, width))


@compiled
def order_of(x):
    """An integer, at least 1, that increases with float32 `x`; 0 for NaN. -0 and 0 have one integer."""
    if x != x:
        return np.int64(0)
    bits = float32_bits(x + np.float32(0))
    return bits ^ np.int64(0xFFFFFFFF) if bits >> 31 else bits | np.int64(0x80000000)


@compiled(nogil=True)
def _select(first_row, end_row, logits, first, count, all_bins, indices):
    topk, bins = indices.shape[1], all_bins[first_row]
    for m in range(first_row, end_row):
        row = logits[m, first[m] : first[m] + count[m]]
        # Finds the k-th largest order digit by digit: of the orders with the digits found, `needed` are selected.
        needed, prefix, shift = topk, np.int64(0), 32
        numbers = 0
        for i in range(len(row)):
            numbers += row[i] == row[i]
        if numbers <= topk:
            prefix, needed = np.int64(0), 0
        else:
            while shift:
                shift -= DIGIT_BITS
                bins[:] = 0
                for i in range(len(row)):
                    order = order_of(row[i])
                    if order and order >> (shift + DIGIT_BITS) == prefix:
                        bins[(order >> shift) & 0xFF] += 1
                digit = (1 << DIGIT_BITS) - 1
                while bins[digit] < needed:
                    needed -= bins[digit]
                    digit -= 1
                prefix = (prefix << DIGIT_BITS) | digit
        found = 0
        for i in range(len(row)):
            order = order_of(row[i])
            if order > prefix or (order == prefix and order and needed > 0):
                needed -= order == prefix
                indices[m, found] = i
                found += 1
        indices[m, found:] = -1
