"""Helpers of vLLM's scheduler and model runner, for engines with the same design."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_integers, plain_integers, shown
from .batch import check_lengths, host_integers


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: Any, scheduler_output: Any, decode_threshold: int = 1
) -> bool:
    """Move decodes to the front of a persistent batch with the fewest swaps.

    Args:
        input_batch: has `req_ids`, in batch order, and `swap_states(i, j)`
        scheduler_output: has `num_scheduled_tokens`, request id -> query tokens of this step

    Returns whether anything was moved. Decodes near the end are swapped with prefills near the front.
    Source: vLLM reorder_batch_to_split_decodes_and_prefills.
    """
    scheduled = [scheduler_output.num_scheduled_tokens[req_id] for req_id in input_batch.req_ids]
    num_decodes = sum(tokens <= decode_threshold for tokens in scheduled)
    misplaced_prefills = [i for i in range(num_decodes) if scheduled[i] > decode_threshold]
    misplaced_decodes = [i for i in range(num_decodes, len(scheduled)) if scheduled[i] <= decode_threshold]
    for prefill, decode in zip(misplaced_prefills, reversed(misplaced_decodes), strict=True):
        input_batch.swap_states(prefill, decode)
    return bool(misplaced_prefills)


@plain_integers
def make_local_attention_virtual_batches(
    attn_chunk_size: int, query_start_loc_np: Any, seq_lens_np: Any, block_table: Any, block_size: int = 0
) -> tuple[Any, Any, Any, Any]:
    """Divide each request at multiples of `attn_chunk_size` into requests that attend within their chunk only.

    Args:
        query_start_loc_np: [R + 1] host integers; seq_lens_np [R] host integers
        block_table: [R, B] int32
        block_size: tokens of a page, a divisor of attn_chunk_size; the default is never valid

    Returns seqlens_q_local [V], cu_seqlens_q_local [V + 1] int32, seqlens_k_local [V] int32 and
    block_table_local [V, attn_chunk_size // block_size], whose columns beyond the table repeat its last.
    A request without query tokens has no virtual requests.
    Raises ValueError for sizes that do not divide, and for a table without columns if an entry is needed.
    Source: vLLM make_local_attention_virtual_batches.
    """
    check_integers(-(2**31), block_size=block_size)
    check_integers(1, attn_chunk_size=attn_chunk_size)
    if block_size < 1 or attn_chunk_size % block_size:
        raise ValueError(
            f"block_size: got {block_size}, expected a positive divisor of attn_chunk_size = {attn_chunk_size}"
        )
    starts = host_integers("query_start_loc_np", query_start_loc_np)
    seq_lens = host_integers("seq_lens_np", seq_lens_np)
    check_lengths("query_start_loc_np", starts, "seq_lens_np", seq_lens)
    table = dlpack.borrow(block_table, "block_table")
    if table.ndim != 2 or len(table) < len(seq_lens):
        raise ValueError(f"block_table: got shape {tuple(table.shape)}, expected a row for each of {len(seq_lens)}")
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


@dataclass(frozen=True)
class PerLayerParameters:
    """A layer's parameters for attention kernels: window to the left (-1: none), logits soft cap, scale."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def get_per_layer_parameters(layers: Mapping[str, Any], cls_: type[Any]) -> dict[str, PerLayerParameters]:
    """Read the PerLayerParameters of a model's attention layers.

    Args:
        layers: layer name -> layer with `impl`, which has `scale` and may have `sliding_window` (its first item is
            window_left) and `logits_soft_cap`
        cls_: class of which every impl must be an instance

    Raises TypeError for another impl.
    Source: vLLM get_per_layer_parameters, with the layers as an argument.
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

    Raises ValueError without layers, or for a layer whose parameters differ from the first's; the message names it.
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
KV_CACHE_LAYOUT_VARIABLE = "CUMLA_KV_CACHE_LAYOUT"
_KV_CACHE_LAYOUT_OVERRIDE: str | None = None


def get_kv_cache_layout() -> str:
    """Order of the axes of a dense KV page: "NHD" (tokens, heads, values) or "HND".

    The layout set by `set_kv_cache_layout`, else by the environment variable CUMLA_KV_CACHE_LAYOUT, else "NHD".
    Raises ValueError for another layout in the variable.
    """
    if _KV_CACHE_LAYOUT_OVERRIDE is not None:
        return _KV_CACHE_LAYOUT_OVERRIDE
    layout = os.environ.get(KV_CACHE_LAYOUT_VARIABLE) or KV_CACHE_LAYOUTS[0]
    if layout not in KV_CACHE_LAYOUTS:
        raise ValueError(f"{KV_CACHE_LAYOUT_VARIABLE}: got {layout!r}, expected one of {', '.join(KV_CACHE_LAYOUTS)}")
    return layout


def set_kv_cache_layout(cache_layout: str | None) -> None:
    """Set the layout that `get_kv_cache_layout` returns; None clears it.

    Raises ValueError for another layout.
    Source: vLLM set_kv_cache_layout, which has no effect after the layout has been read and cached.
    """
    global _KV_CACHE_LAYOUT_OVERRIDE
    if cache_layout is not None and cache_layout not in KV_CACHE_LAYOUTS:
        raise ValueError(f"cache_layout: got {shown(cache_layout)}, expected one of {', '.join(KV_CACHE_LAYOUTS)}")
    _KV_CACHE_LAYOUT_OVERRIDE = cache_layout
