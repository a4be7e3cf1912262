"""Positions of a step's query tokens, and the cache slots of the rows that they write."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array import Array
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_integers, plain_integers
from ..kernels.types.metadata import CompressedSlots
from ..ops.indices import request_arrays

INT64 = (np.dtype(np.int64),)
MOST_TOKENS = 2**31 - 1
LEAST_RING = 8
STATE_BLOCK_SIZES = {4: 4, 128: 8}  # positions of a page of the compressor's states, by compress ratio


@plain_integers
def compute_positions(
    num_tokens: int,
    query_start_loc: Array,
    seq_lens: Array,
    out: Array | None = None,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Position of each query token of a step in its sequence.

    Args:
        num_tokens: query tokens
        query_start_loc: [R + 1] int32
        seq_lens: [R] int32, the new tokens included
        out: [>= num_tokens] int64 to write instead of allocating; -1 after the tokens

    Returns int64 [num_tokens]: the query tokens of a request are the last ones of its sequence; -1 for a token without
    a request. A call allocates a temporary array, so it cannot be captured in a CUDA graph; in graphs use `positions`
    of the window builder's metadata.
    """
    check_integers(0, num_tokens=num_tokens)
    call = Call(backend, stream)
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    slots = _slots(call, num_tokens, out)
    one_page = call.scratch("block_table", 4 * len(seq_lens)).view(np.int32).reshape(-1, 1)
    with call.kernels("indexer_metadata") as kernels:
        one_page[:] = 0  # with all positions in page 0, slots are positions
        kernels.compressed_slot_mapping(
            CompressedSlots(query_start_loc, seq_lens, one_page, num_tokens, MOST_TOKENS, 1, slots)
        )
    return call.results()[:num_tokens]


def compute_slot_mapping(
    num_tokens: int,
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Array,
    block_size: int,
    out: Array | None = None,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Slots of a step's query tokens in a cache that has a row for each position.

    Args:
        num_tokens: query tokens
        query_start_loc: [R + 1] int32
        seq_lens: [R] int32, the new tokens included
        block_table: [R, B] int32, page of each block_size positions
        block_size: positions of a page
        out: [>= num_tokens] int64 to write instead of allocating; -1 after the tokens

    Returns int64 [num_tokens]: page * block_size + position % block_size; -1 where the table has no such page and for a
    token without a request. `get_compressed_slot_mapping` is for rows of several positions; `compute_positions` returns
    the positions.
    """
    return get_compressed_slot_mapping(
        num_tokens, query_start_loc, seq_lens, block_table, block_size, 1, out, backend=backend, stream=stream
    )


@plain_integers
def get_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Array,
    block_size: int,
    compress_ratio: int,
    out: Array | None = None,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Slots of the rows that a step's tokens complete in a compressed cache.

    Args:
        num_tokens: query tokens
        query_start_loc: [R + 1] int32
        seq_lens: [R] int32, positions, the new ones included
        block_table: [R, B] int32, page of each block_size rows
        block_size: rows of a page
        compress_ratio: positions of a row
        out: [>= num_tokens] int64 to write instead of allocating; -1 after the tokens

    Returns int64 [num_tokens]: the slot of row position // compress_ratio for a token whose position is the
    last of its row; -1 for all others and where the table has no such page.
    Source: vLLM get_compressed_slot_mapping.
    """
    check_integers(0, num_tokens=num_tokens)
    check_integers(1, block_size=block_size, compress_ratio=compress_ratio)
    call = Call(backend, stream)
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    block_table = call.array("block_table", block_table, INT32, ("R", -1))
    slots = _slots(call, num_tokens, out)
    with call.kernels("indexer_metadata") as kernels:
        kernels.compressed_slot_mapping(
            CompressedSlots(query_start_loc, seq_lens, block_table, num_tokens, block_size, compress_ratio, slots)
        )
    return call.results()[:num_tokens]


def _slots(call: Call, num_tokens: int, out: Any) -> Any:
    slots = call.output("out", out, INT64, (num_tokens,) if out is None else (-1,))
    if len(slots) < num_tokens:
        raise ValueError(f"out: got {len(slots)} entries, expected at least num_tokens = {num_tokens}")
    return slots


def ring_capacity(num_speculative_tokens: int, pool: int = 2) -> int:
    """Rows of a request's ring: a power of two, at least 8 and at least num_speculative_tokens + pool.

    A step writes up to num_speculative_tokens + 1 rows. Drafts among them may be rejected; the pool - 1 rows before
    each of them must remain, also where the step is run again.

    Args:
        pool: tokens of a row or key: 2 for V4.1's latents of ratio 2, GLM-5.3-Flash's `index_kpool` for pooled keys

    Source: vLLM's compressor of DeepSeek V4.1, SGLang's pooled indexer.
    """
    check_integers(0, num_speculative_tokens=num_speculative_tokens)
    check_integers(2, pool=pool)
    return max(LEAST_RING, 1 << (int(num_speculative_tokens) + int(pool) - 1).bit_length())
