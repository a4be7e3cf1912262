"""Inserts into and gathers from the dense caches of multi-head latent attention: rows of kv_c and k_pe."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..arrays.array import Array
from ..dispatch.call import BF16, BYTES, FLOAT32, FLOATS, INT32, Call, without_middle_axis
from ..dispatch.formats import bytes_of, pages_of
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_choice, check_integers, in_float32
from ..layout import MLA_BF16, MLA_F32, V32_FP8, CacheLayout, ValueType, plain_rows
from .sparse_cache import checked_slots, requests_of, vector

KV_C_DIM = MLA_BF16.head_dim - MLA_BF16.rope_dim
K_PE_DIM = MLA_BF16.rope_dim
VALUE_TYPES: dict[np.dtype[Any], ValueType] = {
    **dict.fromkeys(BF16, "bfloat16"),
    np.dtype(np.float16): "float16",
    **dict.fromkeys(BYTES, "e4m3"),
}


@launch_cached
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    scale: float | Array | None = None,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Write each token's kv_c and k_pe, concatenated, into its slot of a paged cache.

    Args:
        kv_c: [T, 512] bfloat16, float16 or float32
        k_pe: [T, 64] or [T, 1, 64] of kv_c's dtype; RoPE applied already
        kv_cache: written; its type depends on kv_cache_dtype:
            "auto"               [num_blocks, block_size, 576] bfloat16 or float16 (or the bytes of a
                                 MLA_BF16 cache), on the host also float32; values are rounded if
                                 kv_c's dtype differs
            "fp8", "fp8_e4m3"    uint8 [num_blocks, block_size, 576]: e4m3 of value / scale
            "fp8_ds_mla"         a V32_FP8 cache, uint8 [num_blocks, block_size, 656], power-of-two scales
        slot_mapping: [N] int64 or int32, N <= T: slot = block * block_size + row. Slots outside the cache, such as -1,
            skip their row; rows of kv_c beyond N are ignored
        scale: for "fp8": float32 array of one value on the device, or a number; None is 1. Otherwise ignored

    Infinity saturates in FP8 and NaN is stored as NaN. Bytes of other slots and padding are not written. Two tokens
    for one slot are the caller's error: see quantize_and_insert_k_cache.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM concat_and_cache_mla.
    """
    call = Call(backend, stream)
    kv_c = call.array("kv_c", kv_c, FLOATS, ("T", KV_C_DIM))
    k_pe = call.checked(without_middle_axis(call.borrow("k_pe", k_pe)), (kv_c.dtype,), ("T", K_PE_DIM))
    cache = call.borrow("kv_cache", kv_cache, writable=True)
    layout = layout_of_dtype(cache.native, kv_cache_dtype)
    pages = pages_of(call, cache, layout)
    call.check_float32("kv_cache", layout.value_type)
    slots = checked_slots(call, slot_mapping, "kv_c")
    per_tensor = layout.value_type == "e4m3" and not layout.num_scales
    tensor_scale = checked_scale(call, scale) if per_tensor else None
    if len(slots):
        with call.kernels("dense_cache") as kernels:
            kernels.concat_and_cache_mla(kv_c, k_pe, pages, slots, tensor_scale)


@launch_cached
def gather_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    cu_seq_lens: Array,
    batch_size: int,
    seq_starts: Array | None = None,
    *,
    scale: float | Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Gather rows of several requests from a paged cache into a dense workspace, one request after another.

    Args:
        src_cache: [num_blocks, block_size, width] bfloat16, float16 or bytes (uint8)
        dst: [N, width], written: rows [cu_seq_lens[r], cu_seq_lens[r + 1]) are positions seq_starts[r], seq_starts[r] +
            1, ... of request r; rows without a request, as at the end of a longer workspace, are not written. Rows of
            src_cache's size in bytes are copied unchanged; FP8 (uint8) rows are dequantised into bfloat16, float16 or
            float32
        block_table: [>= batch_size, B] int32
        cu_seq_lens: [>= batch_size + 1] int32, ascending
        batch_size: requests
        seq_starts: [>= batch_size] int32, any stride; positions need not be aligned to pages. None: all 0
        scale: for FP8 rows: float32 array of one value on the device, or a number; None is 1

    A position whose block is absent is gathered as zeros. A dequantised value is e4m3 times scale in float32, rounded
    once to dst's type.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM gather_cache, with dequantisation as in its later gather_and_maybe_dequant_cache.
    """
    check_integers(0, batch_size=batch_size)
    call = Call(backend, stream)
    cache = call.borrow("src_cache", src_cache)
    source = cache.native
    value_type = VALUE_TYPES.get(source.dtype)
    if value_type is None:
        raise TypeError(f"src_cache: got dtype {source.dtype}, expected bfloat16, float16 or uint8")
    if source.ndim < 3:
        raise ValueError(f"src_cache: got shape {tuple(source.shape)}, expected [num_blocks, block_size, width]")
    if not source.shape[-1]:
        raise ValueError(f"src_cache: got shape {tuple(source.shape)}, expected rows of at least one value")
    pages = pages_of(call, cache, plain_rows(source.shape[-1], value_type))
    dst = call.array("dst", dst, (*FLOATS, *BYTES), ("N", -1), writable=True)
    row_bytes = pages.layout.row_bytes
    same_type = dst.dtype == source.dtype or dst.dtype in BYTES or source.dtype in BYTES
    copied = same_type and dst.shape[1] * dst.dtype.itemsize == row_bytes
    if not copied and not (value_type == "e4m3" and dst.dtype in FLOATS and dst.shape[1] == row_bytes):
        raise ValueError(
            f"dst: got {dst.dtype} rows of {dst.shape[1]}, expected rows like src_cache's, {source.dtype} of "
            f"{source.shape[-1]}" + (", or bfloat16, float16 or float32 of that width" if value_type == "e4m3" else "")
        )
    block_table = call.array("block_table", block_table, INT32, (-1, -1))
    cu_seq_lens = call.array("cu_seq_lens", cu_seq_lens, INT32, (-1,))
    if len(cu_seq_lens) < batch_size + 1:
        raise ValueError(f"cu_seq_lens: got {len(cu_seq_lens)} entries, expected at least {batch_size + 1}")
    cu_seq_lens = cu_seq_lens[: batch_size + 1]
    block_table = requests_of(block_table, cu_seq_lens)
    if seq_starts is not None:
        seq_starts = vector(call.borrow("seq_starts", seq_starts), INT32, batch_size)[:batch_size]
    tensor_scale = None if copied else checked_scale(call, scale)
    if dst.size and batch_size:
        rows = bytes_of(dst, len(dst), row_bytes) if copied else dst
        with call.kernels("dense_cache") as kernels:
            kernels.gather_cache(pages, rows, block_table, cu_seq_lens, seq_starts, tensor_scale)


def layout_of_dtype(native: Any, kv_cache_dtype: str) -> CacheLayout:
    """The format of a cache array by `kv_cache_dtype`."""
    check_choice(("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"), kv_cache_dtype=kv_cache_dtype)
    if kv_cache_dtype == "fp8_ds_mla":
        return V32_FP8
    if kv_cache_dtype != "auto":
        return plain_rows(MLA_BF16.head_dim, "e4m3")
    if native.dtype == np.float16:
        return plain_rows(MLA_BF16.head_dim, "float16")
    return MLA_F32 if native.dtype == np.float32 else MLA_BF16


def checked_scale(call: Call, scale: Any, name: str = "scale") -> Any:
    """A cache's scale as float32: an array of one value unchanged, a number by value, None as 1."""
    if scale is None:
        return np.float32(1)
    if isinstance(scale, (numbers.Number, np.generic)):
        return np.float32(in_float32(name, scale))
    native = call.borrow(name, scale).native
    if native.dtype not in FLOAT32:
        raise TypeError(f"{name}: got dtype {native.dtype}, expected float32")
    if native.size != 1:
        raise ValueError(f"{name}: got shape {tuple(native.shape)}, expected one value")
    return native.reshape(1)
