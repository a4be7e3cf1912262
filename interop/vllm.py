"""vLLM's cache and index operations of DeepSeek V4 on cumla, and vLLM's batches.

    from cumla.interop.vllm import quantize_and_insert_k_cache, ...

in place of `from vllm.models.deepseek_v4.common.ops import ...` (earlier: vllm.v1.attention.ops.deepseek_v4_ops).
Names, positions and argument names are the same; arguments are tensors or any other arrays.
docs/guide/from-vllm.md lists the differences. `from_vllm` converts a vLLM batch for cumla's metadata builders.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..dispatch.values import check_flags, check_integers
from ..layout import DSV4_FP8
from ..metadata.batch import CommonAttentionMetadata, host_integers
from ..ops import indices, sparse_cache

__all__ = [
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "dequantize_and_gather_k_cache",
    "from_vllm",
    "quantize_and_insert_k_cache",
]

build_flashinfer_mixed_sparse_indices = indices.build_flashinfer_mixed_sparse_indices
combine_topk_swa_indices = indices.combine_topk_swa_indices
compute_global_topk_indices_and_lens = indices.compute_global_topk_indices_and_lens


def quantize_and_insert_k_cache(
    k: Array, k_cache: Array, slot_mapping: Array, block_size: int = 64, is_ue8m0: bool = True, use_fnuz: bool = False
) -> None:
    """cumla.quantize_and_insert_k_cache of DSV4_FP8.

    Args:
        k_cache: uint8 [num_blocks, block_size, 584], [num_blocks, block_size, 1, 584] or [num_blocks, page_bytes]
        use_fnuz: False: the FP8 of AMD's gfx942 is not supported
    """
    _refuse_fnuz(use_fnuz)
    sparse_cache.quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size, is_ue8m0, layout=DSV4_FP8)


def dequantize_and_gather_k_cache(
    out: Array,
    k_cache: Array,
    seq_lens: Array,
    gather_lens: Array | None,
    block_table: Array,
    block_size: int,
    offset: int,
    use_fnuz: bool = False,
) -> None:
    """cumla.dequantize_and_gather_k_cache of DSV4_FP8; k_cache and use_fnuz as in quantize_and_insert_k_cache."""
    _refuse_fnuz(use_fnuz)
    sparse_cache.dequantize_and_gather_k_cache(
        out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, layout=DSV4_FP8
    )


def _refuse_fnuz(use_fnuz: bool) -> None:
    check_flags(use_fnuz=use_fnuz)
    if use_fnuz:
        raise ValueError("use_fnuz: got True, expected False: values are e4m3fn")


COUNTS = "num_reqs", "num_actual_tokens", "max_query_len"
REQUIRED = "query_start_loc", "seq_lens", *COUNTS, "block_table_tensor", "slot_mapping"
REFUSED = {  # fields of batches that cumla's builders do not take: the batches that they take
    "dcp_local_seq_lens": "a batch of whole contexts: cumla.parallel shards them",
    "encoder_seq_lens": "a batch without cross-attention",
}


def from_vllm(metadata: Any, *, seq_lens_cpu: Any = None, block_size: int | None = None) -> CommonAttentionMetadata:
    """Convert a vLLM CommonAttentionMetadata to cumla's, for all metadata builders of cumla.

    Args:
        metadata: an object with vLLM's fields, of 0.10 or later; arrays of any framework
        seq_lens_cpu: [num_reqs] integers in host memory, if the metadata has the lengths only on the device
        block_size: positions of a page, if builders should check it

    The batch has the metadata's own arrays, without rows beyond num_reqs. Nothing is copied, and properties that wait
    for the device are not read: `_seq_lens_cpu` of later releases is used, their property `seq_lens_cpu` is not.
    A missing `num_computed_tokens_cpu` is computed from the lengths. The tail of slot_mapping is not written;
    `pad_slot_mapping` fills it.

    Raises TypeError for an object without vLLM's fields, ValueError for lengths that are only on the device, and for a
    batch that is not causal, is sharded by DCP, or has cross-attention.
    """
    missing = [name for name in REQUIRED if _field(metadata, name) is None]
    if missing:
        kind = type(metadata).__name__
        raise TypeError(f"metadata: got {kind} without {', '.join(missing)}, expected vLLM's CommonAttentionMetadata")
    causal = _field(metadata, "causal")
    if causal is not None and not causal:
        raise ValueError("metadata.causal: got False, expected True: ServingConfig.noncausal_decodes is the builder's")
    for name, expected in REFUSED.items():
        if _field(metadata, name) is not None:
            raise ValueError(f"metadata.{name}: got an array, expected {expected}")
    if block_size is not None:
        check_integers(1, block_size=block_size)
    counts = {name: _field(metadata, name) for name in COUNTS}
    check_integers(0, **counts)
    requests = int(counts["num_reqs"])
    starts = _rows(_on_host(metadata, "query_start_loc", None), requests + 1)
    lens = _rows(_on_host(metadata, "seq_lens", seq_lens_cpu), requests)
    computed = _field(metadata, "num_computed_tokens_cpu", "_num_computed_tokens_cpu")
    longest = _field(metadata, "max_seq_len")
    return CommonAttentionMetadata(
        query_start_loc=_rows(metadata.query_start_loc, requests + 1),
        query_start_loc_cpu=starts,
        seq_lens=_rows(metadata.seq_lens, requests),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=lens - np.diff(starts) if computed is None else _rows(computed, requests),
        **counts,
        block_table_tensor=_rows(metadata.block_table_tensor, requests),
        slot_mapping=metadata.slot_mapping,
        max_seq_len=-1 if longest is None else longest,
        block_size=block_size,
    )


def _field(metadata: Any, *names: str) -> Any:
    """The first of these fields that the metadata has, or None. Properties, which wait for a device, are not read."""
    for name in names:
        if isinstance(inspect.getattr_static(type(metadata), name, None), (property, functools.cached_property)):
            continue
        value = getattr(metadata, name, None)
        if value is not None:
            return value
    return None


def _rows(array: Any, count: int) -> Any:
    """An array without rows beyond `count`."""
    return array if array.shape[0] == count else array[:count]


def _on_host(metadata: Any, name: str, host_copy: Any) -> np.ndarray:
    """A field's integers in host memory: `host_copy`, the metadata's own copy, or the field itself if it is there."""
    if host_copy is None:
        host_copy = _field(metadata, f"{name}_cpu", f"_{name}_cpu")
    if host_copy is None:
        host_copy = getattr(metadata, name)
        if not isinstance(dlpack.borrow(host_copy, f"metadata.{name}"), np.ndarray):
            raise ValueError(
                f"{name}_cpu: got metadata with {name} only on its device, expected {name}_cpu in host memory: "
                "nothing is read back"
            )
    return host_integers(f"{name}_cpu", np.array(host_copy) if isinstance(host_copy, (list, tuple)) else host_copy)
