"""Checks the arguments of a dense layer's step before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dispatch.call import BYTES, INT32, SLOTS, Call, without_middle_axis
from ..dispatch.formats import pages_of
from ..layout import plain_rows
from ..metadata.builder import check_mode
from ..metadata.mla import MLACommonMetadata
from ..metadata.validation import check_pages
from ..ops.dense_cache import K_PE_DIM, KV_C_DIM, VALUE_TYPES, checked_scale
from ..ops.sparse_attention import check_heads
from .sparse_validation import check_array, check_rows


def check_forward(
    layer: Any,
    q: Any,
    k_c_normed: Any,
    k_pe: Any,
    kv_cache: Any,
    metadata: MLACommonMetadata,
    output: Any,
    k_scale: Any,
    stream: Any,
) -> None:
    """Raise TypeError or ValueError for arguments of the `forward` of an MLACommonImpl that do not fit together."""
    if not hasattr(layer, "W_UV"):
        raise ValueError("kv_b_proj: not processed, expected process_weights_after_loading to be called first")
    if not isinstance(metadata, MLACommonMetadata):
        raise TypeError(f"attn_metadata: got {type(metadata).__name__}, expected MLACommonMetadata")
    check_mode("attn_metadata", metadata.batch_invariant, layer.batch_invariant)
    call = Call(layer.backend, stream)
    native = call.borrow("q", q).native
    tokens, heads, dim = len(native) if native.ndim else 0, layer.num_heads, layer.qk_head_dim
    if native.ndim not in (2, 3) or native.size != tokens * heads * dim:
        raise ValueError(f"q: got shape {tuple(native.shape)}, expected [T, {heads}, {dim}]")
    if native.dtype != layer.W_UV.dtype:
        raise TypeError(f"q: got dtype {native.dtype}, expected {layer.W_UV.dtype}, the act_dtype")
    check_heads(heads)
    call.check_place("kv_b_proj", layer.W_UV)
    layer.workspace.check_place(native)
    same, used = (native.dtype,), metadata.num_decode_tokens + metadata.num_prefill_tokens
    check_rows("q", native, used, "tokens")
    check_array(call, "k_c_normed", k_c_normed, same, ("tokens", KV_C_DIM), used)
    rope = call.checked(without_middle_axis(call.borrow("k_pe", k_pe)), same, (-1, K_PE_DIM))
    check_rows("k_pe", rope, used, "tokens")
    cache = check_cache(call, layer, kv_cache, native.dtype, k_scale, metadata.block_size)
    prefills = metadata.prefill_metadata
    reads = metadata.num_decode_tokens or (
        prefills is not None and (prefills.context_chunk_seq_tot or layer.batch_invariant)
    )
    if reads and not metadata.is_profile_run:
        check_pages("kv_cache", cache, 1, "decodes and prefills with context")
    check_metadata(call, layer, metadata, used, native.dtype)
    if output is not None:
        result = call.borrow("output", output, writable=True).native
        shape = (tokens, heads * layer.v_head_dim)
        if result.shape != shape or result.dtype != native.dtype:
            raise ValueError(f"output: got {result.dtype} {list(result.shape)}, expected {native.dtype} {list(shape)}")
    # These calls raise an error for a backend without such kernels.
    call.kernels("dense_cache")
    call.kernels("dense_attention")
    call.kernels("projection")


def check_cache(
    call: Call, layer: Any, kv_cache: Any, dtype: np.dtype[Any], k_scale: Any, block_size: int | None = None
) -> Any:
    """The borrowed cache, checked; its pages must have block_size tokens if that is not None."""
    cache = call.borrow("kv_cache", kv_cache, writable=True)
    native = cache.native
    if not native.size:
        return native
    fp8 = layer.kv_cache_dtype != "auto"
    if native.dtype not in (BYTES if fp8 else (dtype,)):
        expected = "uint8" if fp8 else f"q's dtype, {dtype},"
        raise TypeError(
            f"kv_cache: got dtype {native.dtype}, expected {expected} for kv_cache_dtype {layer.kv_cache_dtype!r}"
        )
    pages = pages_of(call, cache, plain_rows(layer.head_size, VALUE_TYPES[native.dtype]))
    if block_size not in (None, pages.block_size):
        raise ValueError(
            f"kv_cache: got pages of {pages.block_size} tokens, expected {block_size}, the metadata's block_size"
        )
    if fp8:
        checked_scale(call, k_scale, "k_scale")
    return native


def check_metadata(call: Call, layer: Any, metadata: MLACommonMetadata, used: int, dtype: np.dtype[Any]) -> None:
    """Check the metadata that the step reads. It may come from a builder, a captured graph's state or the caller."""

    def check(name: str, value: Any, shape: tuple[int, ...], needed: int, of: str = "requests") -> None:
        check_array(call, f"attn_metadata.{name}", value, SLOTS if name == "slot_mapping" else INT32, shape, needed, of)

    def check_tables(part: MLACommonMetadata, requests: int) -> None:
        check("block_tables", part.block_tables, (-1, -1), requests)
        check("seq_lens_tensor", part.seq_lens_tensor, (-1,), requests)

    check("slot_mapping", metadata.slot_mapping, (-1,), used, "entries")
    decodes, prefills = metadata.decode_metadata, metadata.prefill_metadata
    if decodes is not None:
        if not metadata.num_decodes and len(metadata.block_tables):
            raise ValueError(f"attn_metadata: got {metadata.num_decode_tokens} decode tokens of 0 decodes")
        query_len, attending = decodes.max_decode_query_len or 1, metadata.num_attending_decode_tokens
        if prefills is not None and attending != metadata.num_decode_tokens:
            raise ValueError(
                f"attn_metadata: got {metadata.num_decode_tokens} decode tokens before prefills, expected {query_len} "
                f"for each of {metadata.num_decodes} decodes"
            )
        check_tables(decodes, attending // query_len)
    if prefills is None:
        return
    requests = prefills.num_prefills
    check("query_start_loc", prefills.query_start_loc, (-1,), requests + 1, "entries")
    if layer.batch_invariant:
        check_tables(prefills, requests)
        return
    chunks = prefills.context_chunk_seq_tot or []
    if not chunks:
        return
    check("block_tables", prefills.block_tables, (-1, -1), requests)
    for name, columns in (("context_chunk_starts", requests), ("context_chunk_cu_seq_lens", requests + 1)):
        check(name, getattr(prefills, name), (-1, columns), len(chunks), "chunks")
    workspace = metadata.context_chunk_workspace
    if workspace is None:
        raise ValueError(
            "attn_metadata: got no context_chunk_workspace for prefills with context, "
            "expected the one that MLACommonState.begin_forward sets"
        )
    rows = call.borrow("context_chunk_workspace", workspace, writable=True).native
    if rows.ndim != 2 or rows.shape[1] != layer.head_size or len(rows) < max(chunks) or rows.dtype != dtype:
        raise ValueError(
            f"context_chunk_workspace: got {rows.dtype} {list(rows.shape)}, "
            f"expected {dtype} of at least {max(chunks)} rows of {layer.head_size}"
        )
