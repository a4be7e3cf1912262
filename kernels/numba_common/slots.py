"""Index arithmetic of both Numba backends: plain functions that each backend compiles for its target.

Arithmetic is on 64-bit integers: an int32 from an array is widened first.
"""

from typing import Any

import numpy as np


def lookup_block(block_table: Any, row: Any, column: Any) -> Any:
    """A block table's entry as 64 bits, or -1 outside the table."""
    if row < 0 or row >= block_table.shape[0] or column < 0 or column >= block_table.shape[1]:
        return np.int64(-1)
    return np.int64(block_table[row, column])


def lookup_slot(block_table: Any, row: Any, position: Any, block_size: Any) -> Any:
    """The slot of a position of request `row`, or -1 if the table has no such entry or no such block."""
    if row < 0 or row >= block_table.shape[0] or position < 0 or position >= block_table.shape[1] * block_size:
        return -1
    block = np.int64(block_table[row, position // block_size])
    slot = block * block_size + position % block_size
    return slot if block >= 0 and slot < 2**31 else -1


def token_position(query_start_loc: Any, seq_lens: Any, request: Any, token: Any) -> Any:
    """Position of a query token in its sequence; the last query token is the sequence's last."""
    return np.int64(seq_lens[request]) - query_start_loc[request + 1] + token


def complete_rows(positions: Any, token: Any, compress_ratio: Any) -> Any:
    """Number of complete rows of `compress_ratio` positions at a token's position; arbitrary without positions."""
    if len(positions) == 0:
        return np.int64(2**31)
    return max(np.int64(positions[token]) + 1, 0) // compress_ratio


def local_position(position: Any, shard: Any) -> Any:
    """Index of a position among a rank's tokens (kernels/types/shard.py), or -1 if another rank stores the position."""
    turn = np.int64(position) // shard.interleave
    if position < 0 or turn % shard.size != shard.rank:
        return np.int64(-1)
    return turn // shard.size * shard.interleave + position % shard.interleave


def local_count(tokens: Any, shard: Any) -> Any:
    """Number of a rank's tokens among the first `tokens`."""
    tokens, of_all = max(np.int64(tokens), 0), shard.size * shard.interleave
    rounds = tokens // of_all
    rest = tokens - rounds * of_all - shard.rank * shard.interleave
    return rounds * shard.interleave + min(max(rest, 0), shard.interleave)


def to_span(slot: Any, block_size: Any, block_span: Any) -> Any:
    """Converts a slot to `block_span` slots from page to page instead of `block_size`; -1 stays absent."""
    if slot < 0:
        return np.int64(-1)
    slot = np.int64(slot) // block_size * block_span + slot % block_size
    return slot if slot < 2**31 else np.int64(-1)


def find_request(starts: Any, row: Any) -> Any:
    """The request that `row` belongs to: the last one that starts at or before it, or -1.

    Args:
        starts: [R + 1], ascending: request r has the rows [starts[r], starts[r + 1])
    """
    low, high = 0, len(starts)  # starts before `low` are at most `row`, those from `high` on are above it
    while low < high:
        middle = (low + high) // 2
        if starts[middle] <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low < len(starts) else -1
