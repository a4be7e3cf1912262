"""The compressor of DeepSeek V4: pools the tokens of a window into one row of a compressed cache."""

from __future__ import annotations

from typing import Any

from ..dispatch.call import BF16, FLOAT32, INT32, SLOTS, Call
from ..dispatch.formats import cache_layout
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_integers, check_optional_size
from ..kernels.types.compressor import Compression
from ..layout import CacheLayout
from .norm_rope import check_epsilon, cos_sin

PROJECTED = (*FLOAT32, *BF16)


@launch_cached
def compress_and_insert(
    kv_score: Any,
    position_bias: Any,
    norm_weight: Any,
    state_cache: Any,
    state_slot_mapping: Any,
    state_block_table: Any,
    k_cache: Any,
    slot_mapping: Any,
    positions: Any,
    token_to_req_indices: Any,
    query_start_loc: Any,
    cos_sin_cache: Any,
    *,
    compress_ratio: int,
    eps: float = 1e-6,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Save what later steps need of this step's tokens, and insert the compressed rows that the step completes.

    A row stands for compress_ratio positions. Channel by channel it is the mean of its window's kv, weighted by the
    softmax over the window of score + position bias; then RMSNorm, RoPE at the first of its positions, and the cache's
    format. Where `kv_score` has two halves (coff 2, as at ratio 4), windows overlap: a row pools the second half of its
    own positions' channels and the first half of those of the row before.

    kv_score            [T, 2 * coff * D] float32 or bfloat16: kv, then score, coff * D channels each (coff 1 or 2)
    position_bias       [compress_ratio, coff * D] float32, added to the score of positions with that remainder
    norm_weight         [D] float32 or bfloat16
    state_cache         [num_blocks, state_block_size, 2 * coff * D] float32, written: kv, then score with its bias
    state_slot_mapping  [N] int64 or int32, N <= T: where a token's state is saved; -1 (or any slot outside the
                        cache) for a token that no later step reads
    state_block_table   [R, B] int32, page of each state_block_size positions; -1 where there is none (any more)
    k_cache             a cache of `layout`, written: uint8 [num_blocks, block_size, token_bytes], raw pages
                        [num_blocks, page_bytes] with layout and block_size given, or rows in the layout's plain type
    slot_mapping        [M] int64 or int32, M <= T: slot of the row that a token completes, -1 for the others
                        (get_compressed_slot_mapping)
    positions           [T] int64 or int32, of each token in its sequence
    token_to_req_indices  [T] int32, request of each token
    query_start_loc     [R + 1] int32, first token of each request
    cos_sin_cache       [max_position, rope_dim] float32: cosines of the pairs, then sines
    compress_ratio      positions of a row
    eps                 of the RMSNorm
    layout              DSV4_FP8, DSV4_BF16, INDEXER_FP8, INDEXER_BF16, or on the host DSV4_F32, INDEXER_F32; D is its
                        head_dim. The name of one is taken, too; None: told by the size of a token

    A window's positions that this step computes are read from kv_score, earlier ones from state_cache: any split of a
    prompt gives the same row. A position before the sequence's start, or whose state has no page, is left out; a row
    of which none is left is 0. Values are rounded to bfloat16 before they are quantised. A position outside
    cos_sin_cache turns as its nearest row says.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM's DeepSeek V4 compressor (save_partial_states, compress_norm_rope_store), as one operation.
    """
    check_integers(1, compress_ratio=compress_ratio)
    check_optional_size(block_size=block_size)
    call = Call(backend, stream)
    kv_score = call.array("kv_score", kv_score, PROJECTED, ("T", -1))
    layout = cache_layout(call, "k_cache", k_cache, layout)
    if (layout.rope_dim == 0 and layout.head_dim != 128) or layout.head_dim not in (128, 512):
        raise ValueError(f"layout: got {layout.name}, expected that of V4's compressed rows or of the indexer's keys")
    width, head_dim = kv_score.shape[1], layout.head_dim
    if width not in (2 * head_dim, 4 * head_dim):
        raise ValueError(f"kv_score: got {width} columns, expected {2 * head_dim} or {4 * head_dim} for {layout.name}")
    position_bias = call.array("position_bias", position_bias, FLOAT32, (compress_ratio, width // 2))
    norm_weight = call.array("norm_weight", norm_weight, PROJECTED, (head_dim,))
    state = call.array("state_cache", state_cache, FLOAT32, (-1, -1, width), writable=True)
    if (len(state) > 1 and state.strides[0] < state.shape[1] * state.strides[1]) or state.strides[1] < 4 * width:
        raise ValueError(f"state_cache: got strides {state.strides} bytes, expected rows and pages side by side")
    state_slots = slots_of(call, "state_slot_mapping", state_slot_mapping)
    table = call.array("state_block_table", state_block_table, INT32, ("R", -1))
    pages = call.pages("k_cache", k_cache, layout, block_size, writable=True)
    call.check_float32("layout", layout.value_type)
    slots = slots_of(call, "slot_mapping", slot_mapping)
    positions = call.array("positions", positions, SLOTS, ("T",))
    requests = call.array("token_to_req_indices", token_to_req_indices, INT32, (-1,))
    if len(requests) < len(kv_score):
        raise ValueError(f"token_to_req_indices: got {len(requests)} entries, expected {len(kv_score)}, one a token")
    starts = call.array("query_start_loc", query_start_loc, INT32, (call.size("R") + 1,))
    turns = cos_sin(call, cos_sin_cache, head_dim)
    epsilon = check_epsilon(eps)
    if len(kv_score):
        with call.kernels("compressor") as kernels:
            kernels.compress_and_insert(
                kv_score, state, state_slots, table, pages, slots, positions, requests, starts,
                Compression(position_bias, norm_weight, turns, compress_ratio, epsilon),
            )  # fmt: skip


def slots_of(call: Call, name: str, value: Any) -> Any:
    """Check slots, one a token; tokens beyond them have none."""
    slots = call.array(name, value, SLOTS, (-1,))
    if len(slots) > call.size("T"):
        raise ValueError(f"{name}: got {len(slots)} slots, expected at most {call.size('T')}, one a token")
    return slots
