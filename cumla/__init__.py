"""Sparse attention serving without PyTorch: metadata, paged FP8 KV caches and sparse MLA for any DLPack array."""

from .attention import merge_attn_states, sparse_mla_decode, sparse_mla_prefill
from .cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from .indices import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
    compute_swa_indices_and_lens,
)
from .layout import DSV4_BF16, DSV4_FP8, INDEXER_FP8, MLA_BF16, V32_FP8, CacheLayout

__version__ = "0.1.0"

__all__ = [
    "DSV4_BF16",
    "DSV4_FP8",
    "INDEXER_FP8",
    "MLA_BF16",
    "V32_FP8",
    "CacheLayout",
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "compute_swa_indices_and_lens",
    "dequantize_and_gather_k_cache",
    "merge_attn_states",
    "quantize_and_insert_k_cache",
    "sparse_mla_decode",
    "sparse_mla_prefill",
]
