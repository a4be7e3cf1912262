"""What a step's batch looks like, and how requests are ordered in it.

A batch is decode-first: requests with few query tokens (decodes) stand before those with many (prefills).
Each array that a kernel needs on its device has a `_cpu` twin, so that nothing is ever read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .call import check_integers
from .interop import dlpack

PADDING_SLOT = -1


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One batch, shared by all layers and builders.

    query_start_loc         [num_reqs + 1] int32, first query token of each request; on the device
    query_start_loc_cpu     the same in host memory
    seq_lens                [num_reqs] int32, tokens of each request, the new ones included; on the device
    seq_lens_cpu            the same in host memory
    num_computed_tokens_cpu [num_reqs] int32 in host memory, tokens already in the cache
    num_reqs                requests, padding requests (no query tokens) included
    num_actual_tokens       query tokens; may count padding tokens, which follow those of the last request
    max_query_len           longest query, or a bound on it
    block_table_tensor      [num_reqs, B] int32, page of each block_size positions; on the device
    slot_mapping            [>= num_actual_tokens] int64 or int32, cache slot of each new token; -1 skips it
    max_seq_len             longest sequence, or a bound on it; taken from seq_lens_cpu if not given

    Source: vLLM CommonAttentionMetadata. There, constructing it fills the tail of slot_mapping with -1;
    here nothing is written until `pad_slot_mapping` is called.
    """

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    seq_lens_cpu: Any
    num_computed_tokens_cpu: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Any
    slot_mapping: Any
    max_seq_len: int = -1

    def __post_init__(self) -> None:
        if self.max_seq_len < 0:
            lens = host_array("seq_lens_cpu", self.seq_lens_cpu)
            object.__setattr__(self, "max_seq_len", int(lens.max(initial=0)))

    def pad_slot_mapping(self) -> None:
        """Fill slot_mapping beyond num_actual_tokens with -1, so that padding tokens are written nowhere.

        Needed before a step that runs at a captured size larger than its batch.
        """
        slots = dlpack.borrow(self.slot_mapping, "slot_mapping", writable=True)
        slots[self.num_actual_tokens :] = PADDING_SLOT


def host_array(name: str, value: Any) -> np.ndarray:
    """A `_cpu` array of a batch as NumPy. Raises ValueError for one on a device: to read it would wait for it."""
    if value.__class__ is np.ndarray:
        return value
    native = dlpack.borrow(value, name)
    if not isinstance(native, np.ndarray):
        raise ValueError(f"{name}: got an array on CUDA device {native.device.id}, expected one in host memory")
    return native


def first_true(mask: Any) -> int:
    """The first place where `mask` is True, or -1. (argmax stops there, and is quicker than any and count_nonzero.)"""
    first = int(mask.argmax()) if len(mask) else -1
    return first if first >= 0 and mask[first] else -1


class HostLens(NamedTuple):
    """What a batch says on the host: query_start_loc [num_reqs + 1], query lengths and seq_lens [num_reqs]."""

    starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray

    @classmethod
    def of(cls, batch: CommonAttentionMetadata) -> HostLens:
        """Read them. Raises ValueError for shapes that are not the batch's."""
        starts = host_array("query_start_loc_cpu", batch.query_start_loc_cpu)
        seq_lens = host_array("seq_lens_cpu", batch.seq_lens_cpu)
        num_reqs = batch.num_reqs
        if starts.shape != (num_reqs + 1,) or seq_lens.shape != (num_reqs,):
            raise ValueError(
                f"query_start_loc_cpu, seq_lens_cpu: got shapes {starts.shape} and {seq_lens.shape}, "
                f"expected {(num_reqs + 1,)} and {(num_reqs,)}, as num_reqs is {num_reqs}"
            )
        return cls(starts, starts[1:] - starts[:-1], seq_lens)

    def split(
        self, batch: CommonAttentionMetadata, decode_threshold: int, require_uniform: bool = False
    ) -> tuple[int, int, int, int]:
        """As `split_decodes_and_prefills`."""
        num_reqs, num_tokens, query_lens = batch.num_reqs, batch.num_actual_tokens, self.query_lens
        all_decodes = (num_reqs, 0, num_tokens, 0)
        if batch.max_query_len <= decode_threshold and not (require_uniform and decode_threshold > 1):
            return all_decodes
        first = query_lens[0] if num_reqs else 0
        if first > decode_threshold:
            return 0, num_reqs, 0, num_tokens
        is_prefill = query_lens != first if require_uniform else query_lens > decode_threshold
        num_decodes = first_true(is_prefill)
        if num_decodes < 0:
            return all_decodes
        if require_uniform and first and not query_lens[num_decodes] and not query_lens[is_prefill].any():
            return all_decodes  # padded to a captured size
        num_decode_tokens = int(self.starts[num_decodes])
        return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Find where a decode-first batch changes from decodes to prefills.

    decode_threshold  longest query of a decode
    require_uniform   decodes must all have the query length of the first one; a batch in which every other
                      query is empty (a padded uniform batch) is all decodes

    Returns (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens). Empty queries after the
    first prefill count as prefills.
    Source: vLLM split_decodes_and_prefills, without its assertions on the order of zero-length padding.
    """
    return HostLens.of(common_attn_metadata).split(common_attn_metadata, decode_threshold, require_uniform)


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: Any, scheduler_output: Any, decode_threshold: int = 1
) -> bool:
    """Bring decodes to the front of a persistent batch with as few swaps as possible.

    input_batch       has `req_ids`, in batch order, and `swap_states(i, j)`
    scheduler_output  has `num_scheduled_tokens`, request id -> query tokens of this step

    Returns whether anything was moved. Decodes near the end trade places with prefills near the front.
    Source: vLLM reorder_batch_to_split_decodes_and_prefills.
    """
    scheduled = [scheduler_output.num_scheduled_tokens[req_id] for req_id in input_batch.req_ids]
    num_decodes = sum(tokens <= decode_threshold for tokens in scheduled)
    misplaced_prefills = [i for i in range(num_decodes) if scheduled[i] > decode_threshold]
    misplaced_decodes = [i for i in range(num_decodes, len(scheduled)) if scheduled[i] <= decode_threshold]
    for prefill, decode in zip(misplaced_prefills, reversed(misplaced_decodes), strict=True):
        input_batch.swap_states(prefill, decode)
    return bool(misplaced_prefills)


def make_local_attention_virtual_batches(
    attn_chunk_size: int, query_start_loc_np: Any, seq_lens_np: Any, block_table: Any, block_size: int = 0
) -> tuple[Any, Any, Any, Any]:
    """Cut each request at multiples of `attn_chunk_size` into requests that attend within their chunk only.

    query_start_loc_np  [R + 1] host integers; seq_lens_np [R] host integers
    block_table         [R, B] int32
    block_size          tokens of a page, a divisor of attn_chunk_size; has no usable default

    Returns seqlens_q_local [V], cu_seqlens_q_local [V + 1] int32, seqlens_k_local [V] int32 and
    block_table_local [V, attn_chunk_size // block_size], whose columns beyond the table repeat its last.
    A request without query tokens gives none.
    Raises ValueError for sizes that do not divide, and for a table without columns that is looked into.
    Source: vLLM make_local_attention_virtual_batches.
    """
    if block_size < 1 or attn_chunk_size < 1 or attn_chunk_size % block_size:
        raise ValueError(
            f"block_size: got {block_size}, expected a positive divisor of attn_chunk_size = {attn_chunk_size}"
        )
    starts = host_array("query_start_loc_np", query_start_loc_np)
    seq_lens = host_array("seq_lens_np", seq_lens_np)
    table = dlpack.borrow(block_table, "block_table")
    query_lens = np.diff(starts)
    first_chunk = (seq_lens - query_lens) // attn_chunk_size
    last_chunk = (seq_lens - 1) // attn_chunk_size
    num_chunks = np.where(query_lens > 0, last_chunk - first_chunk + 1, 0)

    request = np.repeat(np.arange(len(seq_lens)), num_chunks)
    within = np.arange(len(request)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    chunk_start = (first_chunk[request] + within) * attn_chunk_size
    chunk_end = np.minimum(chunk_start + attn_chunk_size, seq_lens[request])
    query_start = np.maximum(chunk_start, (seq_lens - query_lens)[request])
    seqlens_q_local = (chunk_end - query_start).astype(query_lens.dtype)
    cu_seqlens_q_local = np.zeros(len(request) + 1, np.int32)
    np.cumsum(seqlens_q_local, out=cu_seqlens_q_local[1:])
    seqlens_k_local = (chunk_end - chunk_start).astype(np.int32)

    if len(request) and not table.shape[1]:
        raise ValueError(f"block_table: got shape {tuple(table.shape)}, expected at least one column")
    columns = chunk_start[:, None] // block_size + np.arange(attn_chunk_size // block_size)
    columns = np.minimum(columns, table.shape[1] - 1)
    xp = dlpack.namespace_of(table)
    request, columns = xp.asarray(request), xp.asarray(columns)
    local_table = table[request[:, None], columns]
    framework = dlpack.framework_of(block_table)
    return seqlens_q_local, cu_seqlens_q_local, seqlens_k_local, dlpack.give(local_table, framework)


def get_dcp_local_seq_lens(
    seq_lens: Any, dcp_world_size: int = 1, dcp_rank: int | None = None, cp_kv_cache_interleave_size: int = 1
) -> Any:
    """How many tokens of each request one rank holds when the cache is dealt out over ranks.

    seq_lens                     [R] integers
    dcp_world_size               ranks
    dcp_rank                     the rank, or None for all of them
    cp_kv_cache_interleave_size  neighbouring tokens that go to the same rank

    Returns [R] for a rank, [R, dcp_world_size] for all, of seq_lens' dtype.
    Raises ValueError for a rank that does not exist.
    Source: vLLM get_dcp_local_seq_lens.
    """
    check_integers(1, dcp_world_size=dcp_world_size, cp_kv_cache_interleave_size=cp_kv_cache_interleave_size)
    lens = dlpack.borrow(seq_lens, "seq_lens")
    ranks: Any = dcp_rank
    if dcp_rank is None:
        ranks = dlpack.namespace_of(lens).arange(dcp_world_size)
        lens = lens[:, None]
    elif not 0 <= dcp_rank < dcp_world_size:
        raise ValueError(f"dcp_rank: got {dcp_rank}, expected 0 to {dcp_world_size - 1}")
    interleave = cp_kv_cache_interleave_size
    whole_rounds = lens // interleave // dcp_world_size * interleave
    rest = lens - whole_rounds * dcp_world_size - ranks * interleave
    local = (whole_rounds + rest.clip(0, interleave)).astype(lens.dtype)
    return dlpack.give(local, dlpack.framework_of(seq_lens))


@dataclass(frozen=True)
class PerLayerParameters:
    """What attention kernels take from a layer: window to the left (-1: none), logits soft cap, scale."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def get_per_layer_parameters(layers: Mapping[str, Any], cls_: type[Any]) -> dict[str, PerLayerParameters]:
    """Read PerLayerParameters off the attention layers of a model.

    layers  layer name -> layer with `impl`, which has `scale` and may have `sliding_window` (its first item
            is window_left) and `logits_soft_cap`
    cls_    class that every impl must be of

    Raises TypeError for another impl.
    Source: vLLM get_per_layer_parameters, with the layers handed in.
    """
    parameters = {}
    for name, layer in layers.items():
        impl = layer.impl
        if not isinstance(impl, cls_):
            raise TypeError(f"layers[{name!r}].impl: got {type(impl).__name__}, expected {cls_.__name__}")
        window = getattr(impl, "sliding_window", None)
        parameters[name] = PerLayerParameters(
            window_left=-1 if window is None else window[0],
            logits_soft_cap=getattr(impl, "logits_soft_cap", None),
            sm_scale=impl.scale,
        )
    return parameters


def infer_global_hyperparameters(per_layer_params: Mapping[str, PerLayerParameters]) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises ValueError if there are no layers, or names one that differs from the first.
    Source: vLLM infer_global_hyperparameters.
    """
    if not per_layer_params:
        raise ValueError("per_layer_params: got no layers, expected at least one")
    first_name, first = next(iter(per_layer_params.items()))
    for name, parameters in per_layer_params.items():
        if parameters != first:
            raise ValueError(f"per_layer_params: {name!r} has {parameters}, expected {first} as {first_name!r} has")
    return first


KV_CACHE_LAYOUTS = ("NHD", "HND")
_KV_CACHE_LAYOUT_OVERRIDE: str | None = None


def get_kv_cache_layout() -> str:
    """Order of the axes of a dense KV page: "NHD" (tokens, heads, values), unless `set_kv_cache_layout` chose "HND"."""
    return _KV_CACHE_LAYOUT_OVERRIDE or KV_CACHE_LAYOUTS[0]


def set_kv_cache_layout(cache_layout: str | None) -> None:
    """Choose what `get_kv_cache_layout` answers from now on; None takes the choice back.

    Raises ValueError for another layout.
    Source: vLLM set_kv_cache_layout, whose answer was cached before it could be changed.
    """
    global _KV_CACHE_LAYOUT_OVERRIDE
    if cache_layout is not None and cache_layout not in KV_CACHE_LAYOUTS:
        raise ValueError(f"cache_layout: got {cache_layout!r}, expected one of {', '.join(KV_CACHE_LAYOUTS)}")
    _KV_CACHE_LAYOUT_OVERRIDE = cache_layout
