"""Advances a decode batch by one step on the device."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import INT32, SLOTS, Call
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_integers
from ..kernels.types.metadata import DecodeBatch
from .sparse_cache import vector


@launch_cached
def advance_step(
    num_seqs: int,
    num_queries: int,
    block_size: int,
    input_tokens: Array,
    sampled_token_ids: Array,
    input_positions: Array,
    seq_lens: Array,
    slot_mapping: Array,
    block_tables: Array,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Write the next decode step's inputs: each sequence's sampled token, its position and its slot.

    Args:
        num_seqs: sequences of the batch, padding included
        num_queries: real sequences, the first ones
        block_size: tokens of a page
        input_tokens: [>= num_seqs] int64 or int32, written: the sampled token, -1 if it is too large for int32
        sampled_token_ids: [>= num_queries] or [>= num_queries, 1] int64 or int32
        input_positions: [>= num_seqs] int64 or int32, written: the token's position, the old length of its sequence
        seq_lens: [>= num_queries] int32, tokens of each sequence; increased by one
        slot_mapping: [>= num_seqs] int64 or int32, written: the slot of the position, -1 if the block table has no
            block for it
        block_tables: [>= num_queries, B] int32

    Padding gets token 0, position 0 and slot -1. A length of 2^31 - 1 is left unchanged.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM advance_step_flashattn.
    """
    check_integers(0, num_queries=num_queries)
    check_integers(1, block_size=block_size)
    check_integers(num_queries, num_seqs=num_seqs)
    call = Call(backend, stream)
    input_tokens = vector(call.borrow("input_tokens", input_tokens, writable=True), SLOTS, num_seqs)
    sampled = call.borrow("sampled_token_ids", sampled_token_ids)
    if sampled.native.ndim == 2 and sampled.native.shape[1] == 1:
        sampled = sampled._replace(native=sampled.native[:, 0])
    sampled_ids = vector(sampled, SLOTS, num_queries)
    input_positions = vector(call.borrow("input_positions", input_positions, writable=True), SLOTS, num_seqs)
    seq_lens = vector(call.borrow("seq_lens", seq_lens, writable=True), INT32, num_queries)
    slot_mapping = vector(call.borrow("slot_mapping", slot_mapping, writable=True), SLOTS, num_seqs)
    block_tables = call.array("block_tables", block_tables, INT32, (-1, -1))
    if len(block_tables) < num_queries:
        raise ValueError(f"block_tables: got {len(block_tables)} rows, expected at least {num_queries}, one a query")
    if num_seqs:
        with call.kernels("advance") as kernels:
            kernels.advance_step(DecodeBatch(
                num_seqs, num_queries, block_size, input_tokens, sampled_ids, input_positions, seq_lens, slot_mapping,
                block_tables,
            ))  # fmt: skip
