"""Sparse attention serving without PyTorch: metadata, paged FP8 KV caches and sparse MLA for any DLPack array."""

from . import layers, metadata  # after the operations, which they use
from .arrays.array import Array
from .dispatch import kernel_check as _kernel_check
from .dispatch.debug import debug
from .kernels.types.plan import DecodePlan, DenseDecodePlan
from .kernels.types.stream_workspace import release_memory
from .layout import (
    DSV4_BF16,
    DSV4_F32,
    DSV4_FP8,
    DSV41_FP4,
    DSV41_FP4_SPLIT,
    DSV41_FP8,
    DSV41_FP8_SPLIT,
    INDEXER_BF16,
    INDEXER_F32,
    INDEXER_FP8,
    INDEXER_MXFP4,
    MLA_BF16,
    MLA_F32,
    V32_FP8,
    V32_NOPE_FP8,
    CacheLayout,
    register_layout,
)
from .ops.advance import advance_step
from .ops.blocks import copy_blocks, swap_blocks
from .ops.candidates import apply_candidate_mask, candidate_logits, candidate_topk, select_candidate_blocks
from .ops.compressor import compress_and_insert
from .ops.dense_attention import dense_mla_decode, mha_varlen
from .ops.dense_cache import concat_and_cache_mla, gather_cache
from .ops.indexer import (
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    fused_indexer_q_rope_quant,
    get_paged_mqa_logits_metadata,
)
from .ops.indexer_topk import indexer_topk, top_k_per_row
from .ops.indices import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
    compute_swa_indices_and_lens,
)
from .ops.key_pools import indexer_kpool_and_insert
from .ops.latents import compress_latents
from .ops.linear import fp8_block_linear
from .ops.norm_rope import (
    apply_rope,
    fused_q_kv_rmsnorm,
    indexer_knorm_rope_and_insert,
    inverse_rope_and_quantize,
    norm_rope_and_insert,
    qnorm_rope_and_insert,
)
from .ops.residency import fetch_resident, resolve_resident
from .ops.spans import copy_spans
from .ops.sparse_attention import merge_attn_states, sparse_mla_decode, sparse_mla_prefill
from .ops.sparse_cache import (
    cp_gather_indexer_k_quant_cache,
    dequantize_and_gather_k_cache,
    indexer_k_quant_and_cache,
    quantize_and_insert_k_cache,
)
from .ops.support import Support, supports

__version__ = "0.1.0"


def _small_cases() -> _kernel_check.SelfTest:
    """The cases of the self-test; imported only when a compiled kernel is to be tested."""
    from .specs import self_test

    return self_test


_kernel_check.test_with(_small_cases)

__all__ = [
    "DSV4_BF16",
    "DSV4_F32",
    "DSV4_FP8",
    "DSV41_FP4",
    "DSV41_FP4_SPLIT",
    "DSV41_FP8",
    "DSV41_FP8_SPLIT",
    "INDEXER_BF16",
    "INDEXER_F32",
    "INDEXER_FP8",
    "INDEXER_MXFP4",
    "MLA_BF16",
    "MLA_F32",
    "V32_FP8",
    "V32_NOPE_FP8",
    "Array",
    "CacheLayout",
    "DecodePlan",
    "DenseDecodePlan",
    "Support",
    "advance_step",
    "apply_candidate_mask",
    "apply_rope",
    "build_flashinfer_mixed_sparse_indices",
    "candidate_logits",
    "candidate_topk",
    "combine_topk_swa_indices",
    "compress_and_insert",
    "compress_latents",
    "compute_global_topk_indices_and_lens",
    "compute_swa_indices_and_lens",
    "concat_and_cache_mla",
    "copy_blocks",
    "copy_spans",
    "cp_gather_indexer_k_quant_cache",
    "debug",
    "dense_mla_decode",
    "dequantize_and_gather_k_cache",
    "fetch_resident",
    "fp8_block_linear",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_indexer_q_rope_quant",
    "fused_q_kv_rmsnorm",
    "gather_cache",
    "get_paged_mqa_logits_metadata",
    "indexer_k_quant_and_cache",
    "indexer_knorm_rope_and_insert",
    "indexer_kpool_and_insert",
    "indexer_topk",
    "inverse_rope_and_quantize",
    "layers",
    "merge_attn_states",
    "metadata",
    "mha_varlen",
    "norm_rope_and_insert",
    "qnorm_rope_and_insert",
    "quantize_and_insert_k_cache",
    "register_layout",
    "release_memory",
    "resolve_resident",
    "select_candidate_blocks",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "supports",
    "swap_blocks",
    "top_k_per_row",
]
