"""The compressor of DeepSeek V4: pools the tokens of a window into one row of a compressed cache."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import BF16, FLOAT32, INT32, SLOTS, Call
from ..dispatch.formats import cache_layout, cache_pages, check_layout
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_integers, check_optional_size
from ..kernels.types.compressor import Compression, CompressorRows
from ..layout import CacheLayout
from .indices import per_token
from .norm_rope import check_epsilon, cos_sin

PROJECTED = (*FLOAT32, *BF16)
ROWS = ("DSV4_FP8", "DSV4_BF16", "DSV4_F32", "INDEXER_FP8", "INDEXER_BF16", "INDEXER_F32")


@launch_cached
def compress_and_insert(
    kv_score: Array,
    position_bias: Array,
    norm_weight: Array,
    state_cache: Array,
    state_slot_mapping: Array,
    state_block_table: Array,
    k_cache: Array,
    slot_mapping: Array,
    positions: Array,
    token_to_req_indices: Array,
    query_start_loc: Array,
    cos_sin_cache: Array,
    *,
    compress_ratio: int,
    eps: float = 1e-6,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    index_kv_score: Array | None = None,
    index_position_bias: Array | None = None,
    index_norm_weight: Array | None = None,
    index_state_cache: Array | None = None,
    index_k_cache: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Save the states of this step's tokens for later steps, and insert the compressed rows that the step completes.

    A row represents compress_ratio positions. Each channel is the mean of the window's kv, weighted by the softmax over
    the window of score + position bias. The row then gets RMSNorm, RoPE at its first position, and the cache's format.
    If `kv_score` has two halves (coff 2, as at ratio 4), windows overlap: a row pools the second half of the channels
    of its own positions and the first half of the channels of the previous row's positions.

    Args:
        kv_score: [T, 2 * coff * D] float32 or bfloat16: kv, then score, coff * D channels each (coff 1 or 2)
        position_bias: [compress_ratio, coff * D] float32; row position % compress_ratio is added to a score
        norm_weight: [D] float32 or bfloat16
        state_cache: [num_blocks, state_block_size, 2 * coff * D] float32, written: kv, then score with its bias
        state_slot_mapping: [N] int64 or int32, N <= T: where a token's state is saved; -1 (or any slot outside the
            cache) for a token that no later step reads
        state_block_table: [R, B] int32, page of each state_block_size positions; -1: absent, for example already freed
        k_cache: a cache of `layout`, written: uint8 [num_blocks, block_size, token_bytes], raw pages [num_blocks,
            page_bytes] with layout and block_size given (pages of DSV4_FP8 as wide as 64 tokens need no block_size), or
            rows in the layout's plain type
        slot_mapping: [M] int64 or int32, M <= T: slot of the row that a token completes, -1 for the others
            (get_compressed_slot_mapping)
        positions: [T] int64 or int32, of each token in its sequence
        token_to_req_indices: [T] int32, request of each token
        query_start_loc: [R + 1] int32, first token of each request
        cos_sin_cache: [max_position, rope_dim] float32: cosines of the pairs, then sines
        compress_ratio: positions of a row
        eps: of the RMSNorm, positive
        layout: DSV4_FP8, DSV4_BF16, INDEXER_FP8, INDEXER_BF16, or on the host DSV4_F32, INDEXER_F32, or the name of
            one; D is its head_dim. None: inferred from the bytes per token
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        index_kv_score, index_position_bias, index_norm_weight, index_state_cache, index_k_cache: the same arguments of
            a second compressor, the indexer's; all or none. It uses the slots, pages and positions of the first. One
            launch computes both

    A window's positions of this step are read from kv_score, earlier ones from state_cache, so any chunking of a prompt
    gives the same row. A position before the sequence's start, or whose state has no page, is left out. A position
    whose score is -inf in a channel is left out of that channel; a channel without positions is 0. Values are rounded
    to bfloat16 before quantisation. The caches may be views of the same pages of one allocation, if slots and tables
    give each cache pages of its own. Positions outside cos_sin_cache are clamped to it.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM's DeepSeek V4 compressor (save_partial_states, compress_norm_rope_store), as one operation.
    """
    check_integers(1, compress_ratio=compress_ratio)
    check_optional_size(block_size=block_size)
    call = Call(backend, stream, early_release)
    kv_score = call.array("kv_score", kv_score, PROJECTED, ("T", -1))
    first = _rows(
        call, "", kv_score, position_bias, norm_weight, state_cache, k_cache, compress_ratio, layout, block_size
    )
    second_arrays = {
        "index_kv_score": index_kv_score, "index_position_bias": index_position_bias,
        "index_norm_weight": index_norm_weight, "index_state_cache": index_state_cache, "index_k_cache": index_k_cache,
    }  # fmt: skip
    missing = [name for name, array in second_arrays.items() if array is None]
    if 0 < len(missing) < len(second_arrays):
        there = ", ".join(name for name, array in second_arrays.items() if array is not None)
        raise ValueError(f"{missing[0]}: got None, expected the second compressor's, with {there}")
    compressors = [first]
    if not missing:
        second = call.array("index_kv_score", index_kv_score, (kv_score.dtype,), ("T", -1))
        compressors.append(_rows(
            call, "index_", second, index_position_bias, index_norm_weight, index_state_cache, index_k_cache,
            compress_ratio, None, None,
        ))  # fmt: skip
        _check_compatible(*compressors)
    state_slots = slots_of(call, "state_slot_mapping", state_slot_mapping)
    table = call.array("state_block_table", state_block_table, INT32, ("R", -1))
    slots = slots_of(call, "slot_mapping", slot_mapping)
    positions = call.array("positions", positions, SLOTS, ("T",))
    requests = per_token(call, "token_to_req_indices", token_to_req_indices, INT32, len(kv_score))
    starts = call.array("query_start_loc", query_start_loc, INT32, (call.size("R") + 1,))
    rotation = cos_sin(call, cos_sin_cache, min(rows.pages.layout.head_dim for rows in compressors))
    epsilon = check_epsilon(eps)
    call.may_share_pages("state_cache", "k_cache", "index_state_cache", "index_k_cache")
    if len(kv_score):
        with call.kernels("compressor") as kernels:
            step = Compression(
                state_slots, table, slots, positions, requests, starts, rotation, compress_ratio, epsilon
            )
            kernels.compress_and_insert(compressors, step)


def _rows(
    call: Call,
    prefix: str,
    kv_score: Any,
    position_bias: Any,
    norm_weight: Any,
    state_cache: Any,
    k_cache: Any,
    compress_ratio: int,
    layout: Any,
    block_size: int | None,
) -> CompressorRows:
    """Check the arrays of one compressor; `prefix` is the prefix of its arguments' names."""
    cache = call.borrow(f"{prefix}k_cache", k_cache, writable=True)
    layout = cache_layout(cache, layout)
    check_layout(layout, ROWS)
    width, dim = kv_score.shape[1], layout.head_dim
    if width not in (2 * dim, 4 * dim):
        raise ValueError(f"{prefix}kv_score: got {width} columns, expected {2 * dim} or {4 * dim} for {layout.name}")
    name = f"{prefix}state_cache"
    state = call.array(name, state_cache, FLOAT32, (-1, -1, width), writable=True)
    apart = state.strides[1] >= 4 * width and (len(state) < 2 or state.strides[0] >= state.shape[1] * state.strides[1])
    if state.size and not apart:  # NumPy's strides of an empty array are 0
        raise ValueError(f"{name}: got strides {state.strides} bytes, expected rows and pages that do not overlap")
    rows = CompressorRows(
        kv_score,
        call.array(f"{prefix}position_bias", position_bias, FLOAT32, (compress_ratio, width // 2)),
        call.array(f"{prefix}norm_weight", norm_weight, PROJECTED, (dim,)),
        state,
        cache_pages(call, cache, layout, block_size),
    )
    call.check_float32("layout", layout.value_type)
    return rows


def _check_compatible(first: CompressorRows, second: CompressorRows) -> None:
    """Raise TypeError or ValueError unless two compressors can share slots and their windows have the same overlap."""
    coffs = [rows.kv_score.shape[1] // (2 * rows.pages.layout.head_dim) for rows in (first, second)]
    if coffs[0] != coffs[1]:
        raise ValueError(f"index_kv_score: got windows of {coffs[1]} halves, expected {coffs[0]} as in kv_score")
    if first.norm_weight.dtype != second.norm_weight.dtype:
        raise TypeError(f"index_norm_weight: got dtype {second.norm_weight.dtype}, expected {first.norm_weight.dtype}")
    if first.state.shape[1] != second.state.shape[1]:
        raise ValueError(
            f"index_state_cache: got pages of {second.state.shape[1]} positions, expected {first.state.shape[1]}"
        )


def slots_of(call: Call, name: str, value: Any) -> Any:
    """Check slots, one a token; tokens beyond the last slot have none."""
    slots = call.array(name, value, SLOTS, (-1,))
    if len(slots) > call.size("T"):
        raise ValueError(f"{name}: got {len(slots)} slots, expected at most {call.size('T')}, one a token")
    return slots
