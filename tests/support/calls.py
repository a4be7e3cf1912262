"""Calls that work, of every operation, to be made wrong in one argument (test_safety_errors.py)."""

from dataclasses import dataclass, field

import numpy as np

import cumla
from support.lab import BF16


@dataclass
class Operation:
    """A call that works. arguments: by name; written: names of those that it writes; keywords: options."""

    function: object
    arguments: dict
    written: tuple
    keywords: dict = field(default_factory=dict)


def int32(*shape):
    return np.zeros(shape, np.int32)


def ones(dtype, *shape):
    return np.ones(shape, dtype)


def apart(page_stride, pages):
    """Pages of as many bytes so far from one another, over and into one another where they are larger."""
    return np.ndarray(pages.shape, pages.dtype, pages, strides=(page_stride, *pages.strides[1:]))


def operations():
    return {
        "insert": Operation(
            cumla.quantize_and_insert_k_cache,
            {
                "k": ones(BF16, 3, 512), "k_cache": ones(np.uint8, 2, 4, 584), "slot_mapping": np.arange(3),
                "block_size": 4,
            },
            ("k_cache",),
            {"layout": cumla.DSV4_FP8},
        ),
        "gather": Operation(
            cumla.dequantize_and_gather_k_cache,
            {
                "out": ones(BF16, 2, 5, 512), "k_cache": ones(np.uint8, 2, 4, 584), "seq_lens": int32(2),
                "gather_lens": int32(2), "block_table": int32(2, 1), "block_size": 4, "offset": 0,
            },
            ("out",),
            {"layout": cumla.DSV4_FP8},
        ),
        "indexer_insert": Operation(
            cumla.indexer_k_quant_and_cache,
            {"k": ones(BF16, 3, 128), "kv_cache": ones(np.uint8, 2, 4, 132), "slot_mapping": np.arange(3)},
            ("kv_cache",),
        ),
        "indexer_gather": Operation(
            cumla.cp_gather_indexer_k_quant_cache,
            {
                "kv_cache": ones(np.uint8, 2, 4, 132), "dst_k": ones(np.uint8, 5, 128),
                "dst_scale": ones(np.float32, 5), "block_table": int32(2, 1), "cu_seq_lens": int32(3),
            },
            ("dst_k", "dst_scale"),
        ),
        "concat": Operation(
            cumla.concat_and_cache_mla,
            {
                "kv_c": ones(BF16, 3, 512), "k_pe": ones(BF16, 3, 64), "kv_cache": ones(BF16, 2, 4, 576),
                "slot_mapping": np.arange(3), "kv_cache_dtype": "auto", "scale": None,
            },
            ("kv_cache",),
        ),
        "gather_cache": Operation(
            cumla.gather_cache,
            {
                "src_cache": ones(BF16, 2, 4, 576), "dst": ones(BF16, 5, 576), "block_table": int32(2, 1),
                "cu_seq_lens": int32(3), "batch_size": 2, "seq_starts": int32(2),
            },
            ("dst",),
        ),
        "swa": Operation(
            cumla.compute_swa_indices_and_lens,
            {
                "query_start_loc": int32(3), "seq_lens": int32(2), "token_to_req_indices": int32(4),
                "is_valid_token": ones(np.bool_, 4), "block_table": int32(2, 1), "block_size": 4, "window_size": 3,
                "num_tokens": 4,
            },
            (),
            {"out": (ones(np.int32, 4, 3), ones(np.int32, 4))},
        ),
        "topk": Operation(
            cumla.compute_global_topk_indices_and_lens,
            {
                "topk_indices": int32(4, 3), "token_to_req_indices": int32(4), "block_table": int32(2, 1),
                "block_size": 4, "is_valid_token": ones(np.bool_, 4),
            },
            (),
            {"out": (ones(np.int32, 4, 3), ones(np.int32, 4))},
        ),
        "combine": Operation(
            cumla.combine_topk_swa_indices,
            {
                "topk_indices": int32(4, 3), "query_start_loc": int32(3), "seq_lens": int32(2), "gather_lens": int32(2),
                "window_size": 3, "compress_ratio": 4, "topk": 3, "M": 9, "N": 4,
            },
            (),
            {"out": (ones(np.int32, 4, 128), ones(np.int32, 4))},
        ),
        "mixed": Operation(
            cumla.build_flashinfer_mixed_sparse_indices,
            {
                "decode_swa_indices": int32(1, 3), "decode_compressed_indices": int32(1, 2),
                "decode_compressed_topk_lens": int32(1), "prefill_topk_indices": int32(3, 2),
                "query_start_loc": int32(3), "seq_lens": int32(2), "token_to_req_indices": int32(4),
                "swa_block_table": int32(2, 1), "swa_block_size": 4, "compressed_block_table": int32(2, 1),
                "compressed_block_size": 4, "window_size": 3, "compress_ratio": 4, "topk": 2,
                "decode_compressed_indices_are_local": True,
            },
            (),
            {"out": (ones(np.int32, 4, 7), ones(np.int32, 4))},
        ),
        "indexer_queries": Operation(
            cumla.fused_indexer_q_rope_quant,
            {
                "positions": np.arange(3), "index_q": ones(BF16, 3, 2, 128),
                "index_q_cos_sin_cache": ones(np.float32, 5, 64), "index_weights": ones(np.float32, 3, 2),
            },
            (),
            {"out": (ones(np.uint8, 3, 2, 128), ones(np.float32, 3, 2))},
        ),
        "scores": Operation(
            cumla.fp8_mqa_logits,
            {
                "q": ones(np.uint8, 3, 2, 128), "kv": ones(np.uint8, 6, 128), "weights": ones(np.float32, 3, 2),
                "cu_seqlen_ks": int32(3), "cu_seqlen_ke": int32(3) + 6,
            },
            (),
            {"kv_scales": ones(np.float32, 6), "out": ones(np.float32, 3, 6)},
        ),
        "paged_scores": Operation(
            cumla.fp8_paged_mqa_logits,
            {
                "q": ones(np.uint8, 3, 1, 2, 128), "kv_cache": ones(np.uint8, 2, 4, 132),
                "weights": ones(np.float32, 3, 2), "context_lens": int32(3) + 4, "block_table": int32(3, 1),
                "schedule_metadata": int32(5, 2),
                "max_context_len": 4,
            },
            (),
            {"out": ones(np.float32, 3, 4)},
        ),
        "schedule": Operation(
            cumla.get_paged_mqa_logits_metadata,
            {"context_lens": int32(3), "block_kv": 64, "num_sms": 4},
            (),
            {"out": ones(np.int32, 5, 2)},
        ),
        "choice": Operation(
            cumla.top_k_per_row,
            {"logits": ones(np.float32, 3, 7), "topk": 2, "row_starts": int32(3), "row_ends": int32(3) + 7},
            (),
            {"out": ones(np.int32, 3, 2)},
        ),
        "score_and_choose": Operation(
            cumla.indexer_topk,
            {
                "q": ones(np.uint8, 3, 2, 128), "kv": ones(np.uint8, 6, 128), "weights": ones(np.float32, 3, 2),
                "topk": 2,
            },
            (),
            {
                "kv_scales": ones(np.float32, 6), "cu_seqlen_ks": int32(3), "cu_seqlen_ke": int32(3) + 6,
                "out": ones(np.int32, 3, 2),
            },
        ),
        "decode": Operation(
            cumla.sparse_mla_decode,
            {
                "q": ones(BF16, 1, 1, 2, 512), "k_cache": ones(np.uint8, 2, 4 * 584), "indices": int32(1, 1, 3),
                "layout": cumla.DSV4_FP8, "block_size": 4, "topk_length": int32(1), "attn_sink": ones(np.float32, 2),
                "softmax_scale": 0.1,
            },
            ("out", "lse"),
            {"out": ones(BF16, 1, 1, 2, 512), "lse": ones(np.float32, 1, 2, 1)},
        ),
        "prefill": Operation(
            cumla.sparse_mla_prefill,
            {
                "q": ones(BF16, 2, 2, 512), "kv": ones(BF16, 3, 512), "indices": int32(2, 3), "softmax_scale": 0.1,
                "d_v": 512, "attn_sink": ones(np.float32, 2), "topk_length": int32(2),
            },
            (),
            {"out": (ones(BF16, 2, 2, 512), ones(np.float32, 2, 2), ones(np.float32, 2, 2))},
        ),
        "merge": Operation(
            cumla.merge_attn_states,
            {
                "output": ones(BF16, 2, 1, 8), "prefix_output": ones(BF16, 2, 1, 8),
                "prefix_lse": ones(np.float32, 1, 2), "suffix_output": ones(BF16, 2, 1, 8),
                "suffix_lse": ones(np.float32, 1, 2), "output_lse": ones(np.float32, 1, 2),
            },
            ("output", "output_lse"),
        ),
        "mha": Operation(
            cumla.mha_varlen,
            {
                "q": ones(BF16, 2, 1, 48), "k": ones(BF16, 3, 1, 32), "v": ones(BF16, 3, 1, 16),
                "k_pe": ones(BF16, 3, 16), "cu_seqlens_q": np.array([0, 2], np.int32),
                "cu_seqlens_k": np.array([0, 3], np.int32), "softmax_scale": 0.1, "causal": True,
            },
            ("out", "lse"),
            {"out": ones(BF16, 2, 1, 16), "lse": ones(np.float32, 1, 2)},
        ),
        "dense": Operation(
            cumla.dense_mla_decode,
            {
                "q": ones(BF16, 1, 2, 1, 576), "k_cache": ones(np.uint8, 2, 4, 576), "block_table": int32(1, 1),
                "cache_seqlens": ones(np.int32, 1), "scale": 1.0, "softmax_scale": 0.1, "causal": True, "max_seqlen": 4,
            },
            ("out", "lse"),
            {"out": ones(BF16, 1, 2, 1, 512), "lse": ones(np.float32, 1, 1, 2)},
        ),
        "swap": Operation(
            cumla.swap_blocks,
            {"src": int32(2, 3), "dst": ones(np.int32, 2, 3), "src_to_dst": np.zeros((1, 2), np.int64)},
            ("dst",),
        ),
        "copy": Operation(
            cumla.copy_blocks,
            {"kv_caches": (ones(np.int32, 2, 3),), "src_to_dsts": np.array([[0, 1]])},
            (),
        ),
        "advance": Operation(
            cumla.advance_step,
            {
                "num_seqs": 2, "num_queries": 1, "block_size": 4, "input_tokens": ones(np.int64, 2),
                "sampled_token_ids": ones(np.int64, 1), "input_positions": ones(np.int64, 2),
                "seq_lens": ones(np.int32, 1), "slot_mapping": ones(np.int64, 2), "block_tables": int32(1, 2),
            },
            ("input_tokens", "input_positions", "seq_lens", "slot_mapping"),
        ),
        **around_attention(),
    }  # fmt: skip


def around_attention():
    """The compressor, norms and RoPE."""
    turns, positions = ones(np.float32, 8, 64), np.arange(3)
    return {
        "compress": Operation(
            cumla.compress_and_insert,
            {
                "kv_score": ones(np.float32, 3, 512), "position_bias": ones(np.float32, 4, 256),
                "norm_weight": ones(np.float32, 128), "state_cache": ones(np.float32, 2, 4, 512),
                "state_slot_mapping": np.arange(3), "state_block_table": int32(1, 2),
                "k_cache": ones(np.uint8, 2, 4, 132), "slot_mapping": np.arange(3), "positions": positions,
                "token_to_req_indices": int32(3), "query_start_loc": int32(2), "cos_sin_cache": turns,
            },
            ("state_cache", "k_cache"),
            {"compress_ratio": 4, "eps": 1e-6, "layout": cumla.INDEXER_FP8},
        ),
        "norms": Operation(
            cumla.fused_q_kv_rmsnorm,
            {
                "qr": ones(BF16, 3, 96), "kv": ones(BF16, 3, 64), "q_weight": ones(np.float32, 96),
                "kv_weight": ones(np.float32, 64),
            },
            (),
            {"eps": 1e-6, "out": (ones(BF16, 3, 96), ones(BF16, 3, 64))},
        ),
        "window_rows": Operation(
            cumla.qnorm_rope_and_insert,
            {
                "q": ones(BF16, 3, 2, 512), "kv": ones(BF16, 3, 512), "k_cache": ones(np.uint8, 2, 4, 584),
                "slot_mapping": np.arange(3), "positions": positions, "cos_sin_cache": turns,
            },
            ("k_cache",),
            {"eps": 1e-6, "layout": cumla.DSV4_FP8, "out": ones(BF16, 3, 2, 512)},
        ),
        "index_keys": Operation(
            cumla.indexer_knorm_rope_and_insert,
            {
                "k": ones(np.float32, 3, 128), "weight": ones(np.float32, 128), "bias": ones(np.float32, 128),
                "k_cache": ones(np.uint8, 2, 4, 132), "slot_mapping": np.arange(3), "positions": positions,
                "cos_sin_cache": turns,
            },
            ("k_cache",),
            {"eps": 1e-6, "layout": cumla.INDEXER_FP8},
        ),
        "rope": Operation(
            cumla.apply_rope,
            {"x": ones(BF16, 3, 2, 128), "positions": positions, "cos_sin_cache": turns},
            (),
            {"out": ones(BF16, 3, 2, 128)},
        ),
        "inverse": Operation(
            cumla.inverse_rope_and_quantize,
            {"o": ones(BF16, 3, 4, 512), "positions": positions, "cos_sin_cache": turns, "num_groups": 2},
            (),
            {"out": (ones(np.uint8, 2, 3, 1024), ones(np.float32, 2, 3, 8))},
        ),
    }  # fmt: skip


# What Numba's simulator takes too long for.
ATTENTION = ("decode", "prefill", "merge", "mha", "dense")


class ReadOnly:
    """An array that may not be written, where there are such arrays (host memory)."""

    def __init__(self, array):
        self.array = array


def put(lab, value):
    if isinstance(value, ReadOnly):
        array = value.array.copy()
        array.flags.writeable = False
        return array
    if isinstance(value, tuple):
        return tuple(put(lab, x) for x in value)
    return lab.put(value) if isinstance(value, np.ndarray) else value


def holds_read_only(value):
    return isinstance(value, ReadOnly) or (isinstance(value, tuple) and any(map(holds_read_only, value)))
