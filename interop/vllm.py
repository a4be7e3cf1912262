"""vLLM's cache and index operations of DeepSeek V4 on cumla.

    from cumla.interop.vllm import quantize_and_insert_k_cache, ...

in place of `from vllm.models.deepseek_v4.common.ops import ...` (vllm.v1.attention.ops.deepseek_v4_ops before).
Names, positions and argument names are the same; arguments are tensors or any other arrays.
docs/guide/from-vllm.md lists the differences.
"""

from __future__ import annotations

from typing import Any

from ..dispatch.values import check_flags
from ..layout import DSV4_FP8
from ..ops import indices, sparse_cache

__all__ = [
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "dequantize_and_gather_k_cache",
    "quantize_and_insert_k_cache",
]

build_flashinfer_mixed_sparse_indices = indices.build_flashinfer_mixed_sparse_indices
combine_topk_swa_indices = indices.combine_topk_swa_indices
compute_global_topk_indices_and_lens = indices.compute_global_topk_indices_and_lens


def quantize_and_insert_k_cache(
    k: Any, k_cache: Any, slot_mapping: Any, block_size: int = 64, is_ue8m0: bool = True, use_fnuz: bool = False
) -> None:
    """cumla.quantize_and_insert_k_cache of DSV4_FP8.

    k_cache   uint8 [num_blocks, block_size, 584], [num_blocks, block_size, 1, 584] or [num_blocks, page_bytes]
    use_fnuz  False: the FP8 of AMD's gfx942 is not supported
    """
    _refuse_fnuz(use_fnuz)
    sparse_cache.quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size, is_ue8m0, layout=DSV4_FP8)


def dequantize_and_gather_k_cache(
    out: Any,
    k_cache: Any,
    seq_lens: Any,
    gather_lens: Any | None,
    block_table: Any,
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
