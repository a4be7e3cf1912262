"""Pooled index keys of GLM-5.3-Flash: an index key for several tokens, and the ring of raw keys between steps."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import BF16, FLOAT32, INT32, SLOTS, Call
from ..dispatch.formats import cache_layout, cache_pages, check_layout
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_flags, check_optional_size
from ..kernels.types.compressor import KeyPools
from ..layout import INDEXER_FP8, CacheLayout
from .compressor import slots_of
from .norm_rope import INDEXER_KEYS, check_epsilon

DIM = INDEXER_FP8.head_dim
VALUES = (*FLOAT32, *BF16)
MOST_POOLED = 128  # tokens of a pool


@launch_cached
def indexer_kpool_and_insert(
    k: Array,
    gate: Array,
    weight: Array,
    bias: Array,
    ape: Array,
    state_cache: Array,
    state_slot_mapping: Array,
    k_cache: Array,
    slot_mapping: Array,
    positions: Array,
    query_start_loc: Array,
    *,
    restart_rows: Array | None = None,
    restart_positions: Array | None = None,
    eps: float = 1e-6,
    hadamard: bool = True,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Pool the index keys of several tokens into one, insert it, and save in a ring the tokens that a later step pools.

    A key represents P positions, p P to p P + P - 1. Each channel is the mean of the LayerNorm of their k, weighted by
    the softmax over the positions of gate + ape. The token at the last position completes the key. Tokens of the pool
    that belong to earlier steps are read from the request's ring.

    Args:
        k: [T, 128] float32 or bfloat16, as projected; may be columns of a wider array
        gate: [T, 128] of k's dtype; may be columns of a wider array
        weight, bias: [128] of one dtype, float32 or bfloat16, of the LayerNorm
        ape: [P, 128] float32, P from 2 to 128; row position % P is added to the gate
        state_cache: [rings, capacity, 256] float32 or bfloat16, written: a token's normalised key, then its gate. One
            ring a request, for its lifetime; capacity at least P. cumla.metadata.ring_capacity returns the capacity for
            drafts. Only the last `capacity` tokens of a request are saved. Keys and gates of the step, too, are rounded
            to this type before they are pooled
        state_slot_mapping: [N] int64 or int32, N <= T: ring * capacity + position % capacity. A token with slot -1, or
            any slot outside the state cache, is padding: it is not saved and completes no key. A request whose first
            token is padding saves nothing
        k_cache: a cache of `layout`, written: uint8 [num_blocks, block_size, 132], raw pages [num_blocks, page_bytes]
            with block_size given, or rows [num_blocks, block_size, 128]
        slot_mapping: [M] int64 or int32, M <= T: slot of the key that a token completes, -1 for the others
            (get_compressed_slot_mapping with compress_ratio P)
        positions: [T] int64 or int32, of each token in its sequence
        query_start_loc: [R + 1] int32, first token of each request. Tokens without a request are padding
        restart_rows: [rings, P - 1, 256] of state_cache's dtype, and
        restart_positions: [rings] int32, initially 0, both written: they allow a step to be run again with the same
            result. A request that starts at position p within a pool, and has more tokens than its ring has free rows,
            overwrites rows of the open pool in its ring: these arrays save those rows and p. None: such a step must not
            be run again; a step of up to capacity - P + 1 tokens may always be. For a ring that is moved or restored,
            move these as well, or set its position to 0
        eps: of the LayerNorm, positive
        hadamard: whether keys are rotated (Hadamard, Sylvester's order, times 128 ** -0.5) before they are stored, as
            fused_indexer_q_rope_quant with the same flag rotates queries; scores are then equal but for rounding
        layout: INDEXER_FP8 or INDEXER_BF16, on the host also INDEXER_F32, or the name of one; None: inferred from the
            cache

    Any division of a prompt into steps gives bit-identical keys. Rejected drafts need no rollback: later tokens
    overwrite their rows of the ring by position, and the key of a pool with a rejected token is written again when the
    pool is complete. A gate of -inf leaves its position out of a channel; a channel without positions is 0. Sums are
    float32; keys are rounded to bfloat16, rotated, and rounded to bfloat16 again before quantisation.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: the pooled indexer of GLM-5.3-Flash in SGLang and vLLM.
    """
    check_optional_size(block_size=block_size)
    check_flags(hadamard=hadamard)
    call = Call(backend, stream)
    k = call.array("k", k, VALUES, ("T", DIM))
    gate = call.array("gate", gate, (k.dtype,), ("T", DIM))
    weight = call.array("weight", weight, VALUES, (DIM,))
    bias = call.array("bias", bias, (weight.dtype,), (DIM,))
    ape = call.array("ape", ape, FLOAT32, (-1, DIM))
    pool = len(ape)
    if not 2 <= pool <= MOST_POOLED:
        raise ValueError(f"ape: got {pool} rows, expected the 2 to {MOST_POOLED} positions of a pool")
    state = call.array("state_cache", state_cache, VALUES, (-1, -1, 2 * DIM), writable=True)
    if state.shape[1] < pool:
        raise ValueError(f"state_cache: got rings of {state.shape[1]} rows, expected at least the {pool} of a pool")
    state_slots = slots_of(call, "state_slot_mapping", state_slot_mapping)
    cache = call.borrow("k_cache", k_cache, writable=True)
    layout = cache_layout(cache, layout, block_size, DIM)
    check_layout(layout, INDEXER_KEYS)
    pages = cache_pages(call, cache, layout, block_size)
    call.check_float32("layout", layout.value_type)
    slots = slots_of(call, "slot_mapping", slot_mapping)
    positions = call.array("positions", positions, SLOTS, ("T",))
    starts = call.array("query_start_loc", query_start_loc, INT32, (-1,))
    if not len(starts):
        raise ValueError("query_start_loc: got no entries, expected one more than the number of requests")
    if (restart_rows is None) != (restart_positions is None):
        raise ValueError("restart_positions: got one of restart_rows and restart_positions, expected both or none")
    restart = call.optional(
        "restart_rows", restart_rows, (state.dtype,), (len(state), pool - 1, 2 * DIM), writable=True
    )
    restarts = call.optional("restart_positions", restart_positions, INT32, (len(state),), writable=True)
    epsilon = check_epsilon(eps)
    if len(state_slots):
        with call.kernels("key_pools") as kernels:
            kernels.indexer_kpool_and_insert(KeyPools(
                k, gate, weight, bias, ape, state, state_slots, restart, restarts, pages, slots, positions, starts,
                epsilon, bool(hadamard),
            ))  # fmt: skip
