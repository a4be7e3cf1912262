"""Invalid arguments of operations."""

import numpy as np

import cumla
from cumla.layout import plain_rows
from cumla.specs.inputs import TINY
from support.calls import int32, ones
from support.lab import BF16
from support.refused import T, V, read_only

BLOCK = TINY.block_size

# Functions that make a valid argument invalid.


def longer(axis, by=1):
    """As many more along an axis."""
    return lambda x: ones(x.dtype, *(n + by * (i == axis % x.ndim) for i, n in enumerate(x.shape)))


def of(dtype):
    return lambda x: ones(dtype, *x.shape)


def strided(axis=-1):
    """Every second element along an axis of an array twice as long."""

    def make(x):
        every_second = [slice(None)] * x.ndim
        every_second[axis] = slice(None, None, 2)
        return longer(axis, x.shape[axis])(x)[tuple(every_second)]

    return make


def first(x):
    """An axis less."""
    return np.ascontiguousarray(x[0])


def deeper(x):
    """An axis more."""
    return ones(x.dtype, *x.shape, 1)


def plus(number):
    return lambda x: x + number


def member(i, wrong):
    """A tuple with one invalid element."""
    return lambda x: (*x[:i], wrong(x[i]), *x[i + 1 :])


def overlapping(x):
    """Pages so close to one another that they overlap."""
    return np.ndarray(x.shape, x.dtype, x.copy(), strides=(100, *x.strides[1:]))


def makes_read_only(wrong):
    """Directly, or as one element of a tuple."""
    return wrong is read_only or any(x.cell_contents is read_only for x in getattr(wrong, "__closure__", None) or ())


# By example: argument, an invalid value or a function that makes it, error, message, in terms of `wrong` and
# of the right arguments' names.
WRONG = {
    "quantize_and_insert_k_cache-DSV4_FP8": [
        ("k", longer(-1, -1), V, "k: got rows of 511 values, expected {k.shape[1]} for a DSV4_FP8 cache"),
        ("k", of(np.float64), T, "k: got dtype float64"),
        ("k", first, V, "k: got shape"),
        ("k", strided(), V, "k: got strides"),
        ("k", [[1.0]], T, "k: got list"),
        ("k_cache", ones(np.uint8, 2, BLOCK, 583), V, "k_cache: got shape"),
        ("k_cache", ones(np.uint8, 2, BLOCK + 1, 584), V, "k_cache: got shape"),
        ("k_cache", ones(np.uint8, 2, BLOCK * 584 - 1), V, "k_cache: got pages of {wrong.shape[1]} bytes"),
        ("k_cache", of(BF16), T, "k_cache: got dtype bfloat16"),
        ("k_cache", read_only, V, "k_cache: got a read-only"),
        ("k_cache", strided(), V, "k_cache: got pages of {k_cache.shape[1]} bytes"),
        ("k_cache", lambda x: overlapping(ones(np.uint8, 2, BLOCK, 584)), V, "k_cache: got strides"),
        ("block_size", True, T, "block_size: got True"),
        ("slot_mapping", longer(0), V, "slot_mapping: got {wrong.size} slots, expected at most {k.shape[0]}"),
        ("slot_mapping", of(np.float32), T, "slot_mapping: got dtype float32"),
        ("slot_mapping", deeper, V, "slot_mapping: got shape"),
        ("block_size", -4, V, "block_size: got -4"),
        ("block_size", 0, V, "block_size: got 0"),
        ("block_size", 4.0, T, "block_size: got 4.0"),
        ("is_ue8m0", False, V, "is_ue8m0: got False"),
        ("layout", cumla.MLA_BF16, V, "layout: got MLA_BF16"),
        ("layout", "DSV5_FP8", V, "layout: got 'DSV5_FP8', expected one of DSV4_FP8, V32_FP8"),
        ("layout", 584, T, "layout: got 584 of type int, expected a CacheLayout or the name of one"),
        ("layout", plain_rows(512, "e4m3"), V, "layout: got e4m3"),
        ("block_size", np.array(4), T, r"block_size: got array\(4\) of type ndarray"),
        ("block_size", np.True_, T, r"block_size: got np.True_ of type bool"),
        ("backend", "gpu", V, "backend: got 'gpu'"),
    ],
    "dequantize_and_gather_k_cache-DSV4_FP8": [
        ("out", longer(0), V, "seq_lens: got shape"),
        ("out", longer(-1, 64), V, "out: got rows of {wrong.shape[2]} values, expected {out.shape[2]}"),
        ("out", of(np.float64), T, "out: got dtype float64"),
        ("out", read_only, V, "out: got a read-only"),
        ("k_cache", ones(np.uint8, 2, 100), V, "k_cache: got pages of 100 bytes"),
        ("seq_lens", of(np.int64), T, "seq_lens: got dtype int64"),
        ("seq_lens", strided(), V, "seq_lens: got strides"),
        ("gather_lens", longer(0), V, "gather_lens: got shape"),
        ("block_table", longer(0), V, "block_table: got shape"),
        ("block_size", -1, V, "block_size: got -1"),
        ("offset", -1, V, "offset: got -1"),
        ("offset", 25, V, "offset: got 25, expected at most {out.shape[1]}"),
        ("layout", plain_rows(512, "float16"), V, "layout: got float16"),
    ],
    "fused_indexer_q_rope_quant": [
        ("index_q", longer(-1, -64), V, "index_q: got shape"),
        ("index_q_cos_sin_cache", longer(-1, -32), V, "index_q_cos_sin_cache: got shape"),
        ("positions", of(np.float32), T, "positions: got dtype float32"),
        ("index_weights", longer(-1), V, "index_weights: got shape"),
    ],
    "fp8_mqa_logits": [
        ("q", of(BF16), T, "q: got dtype bfloat16, expected uint8"),
        ("q", longer(-1, -64), V, "q: got shape"),
        ("kv", longer(-1, -64), V, "k.*: got shape"),
        ("kv", lambda kv: (kv, ones(np.float32, len(kv))), V, "kv_scales: got an array, but kv is a pair"),
        ("weights", longer(-1), V, "weights: got shape"),
        ("cu_seqlen_ks", longer(0), V, "cu_seqlen_ks: got shape"),
        ("cu_seqlen_ke", of(np.int64), T, "cu_seqlen_ke: got dtype int64"),
    ],
    "fp8_paged_mqa_logits-scheduled": [
        ("q", first, V, "q: got shape"),
        ("kv_cache", longer(-1, -4), V, "kv_cache: got shape"),
        ("weights", longer(0, 3), V, "weights: got shape"),
        ("context_lens", lambda x: int32(len(x), 3), V, "context_lens: got shape"),
        ("block_table", longer(0, -1), V,
         "block_table: got {wrong.shape[0]} rows, expected at least {context_lens.size}"),
        ("schedule_metadata", longer(-1), V, "schedule_metadata: got shape"),
        ("schedule_metadata", int32(1, 2), V, "schedule_metadata: got 1 rows"),
        ("max_context_len", -1, V, "max_context_len: got -1"),
    ],
    "get_paged_mqa_logits_metadata": [
        ("context_lens", of(np.int64), T, "context_lens: got dtype int64"),
        ("block_kv", 0, V, "block_kv: got 0"),
        ("num_sms", 2.0, T, "num_sms: got 2.0"),
    ],
    "top_k_per_row-starts": [
        ("logits", of(BF16), T, "logits: got dtype bfloat16"),
        ("topk", -1, V, "topk: got -1"),
        ("row_ends", longer(0, -1), V, "row_ends: got shape"),
    ],
    "indexer_topk-cu_seqlen_ks": [
        ("topk", True, T, "topk: got True"),
        ("kv", of(np.float32), T, "k.*: got dtype float32"),
    ],
    "compress_latents-ratio-2": [
        ("kv_score", longer(-1), V, "kv_score: got shape"),
        ("norm_weight", of(np.float16), T, "norm_weight: got dtype float16"),
        ("slot_mapping", longer(0, 9), V, "slot_mapping: got {wrong.size} slots"),
        ("latents", read_only, V, "latents: got a read-only"),
        ("state_cache", longer(-1, -4), V, "state_cache: got shape"),
        ("state_cache", None, V, "state_cache: got None for compress_ratio 2"),
        ("positions", longer(0), V, "positions: got shape"),
        ("compress_ratio", 4, V, "compress_ratio: got 4"),
        ("eps", 0.0, V, "eps: got 0"),
    ],
    "indexer_kpool_and_insert-INDEXER_BF16": [
        ("k", longer(-1), V, "k: got shape"),
        ("gate", of(BF16), T, "gate: got dtype bfloat16"),
        ("weight", of(np.float16), T, "weight: got dtype float16"),
        ("ape", longer(0, -3), V, "ape: got 1 rows"),
        ("ape", longer(0, 3), V, "state_cache: got rings of 4 rows, expected at least the 7 of a pool"),
        ("state_cache", read_only, V, "state_cache: got a read-only"),
        ("state_slot_mapping", longer(0, 9), V, "state_slot_mapping: got {wrong.size} slots"),
        ("k_cache", read_only, V, "k_cache: got a read-only"),
        ("slot_mapping", of(np.float32), T, "slot_mapping: got dtype float32"),
        ("positions", longer(0), V, "positions: got shape"),
        ("query_start_loc", int32(0), V, "query_start_loc: got no entries"),
        ("restart_rows", longer(1), V, "restart_rows: got shape"),
        ("restart_positions", None, V, "restart_positions: got one of"),
        ("hadamard", 1, T, "hadamard: got 1"),
        ("eps", 0.0, V, "eps: got 0"),
    ],
    "select_candidate_blocks": [
        ("logits", of(BF16), T, "logits: got dtype bfloat16"),
        ("topk_blocks", -1, V, "topk_blocks: got -1"),
        ("row_ends", longer(0, -1), V, "row_ends: got shape"),
        ("candidate_block_size", 0, V, "candidate_block_size: got 0"),
    ],
    "apply_candidate_mask": [
        ("logits", read_only, V, "logits: got a read-only"),
        ("candidate_blocks", longer(0), V, "candidate_blocks: got shape"),
        ("candidate_blocks", of(np.int64), T, "candidate_blocks: got dtype int64"),
        ("with_nan", 1, T, "with_nan: got 1"),
    ],
    "candidate_logits-INDEXER_MXFP4": [
        ("q", of(np.float16), T, "q: got dtype float16"),
        ("kv_cache", longer(-1, -4), V, "kv_cache: got shape"),
        ("candidate_blocks", longer(0, -1), V, "candidate_blocks: got shape"),
        ("candidate_block_size", 2**31 - 1, V, "candidate_blocks: got 2 blocks of 2147483647 positions"),
        ("context_lens", lambda x: int32(len(x), 3), V, "context_lens: got shape"),
    ],
    "candidate_topk": [
        ("topk", True, T, "topk: got True"),
        ("candidate_blocks", of(np.float32), T, "candidate_blocks: got dtype float32"),
        ("max_workspace_bytes", 4, V, "max_workspace_bytes: got 4 bytes, expected at least"),
    ],
    "resolve_resident": [
        ("topk_indices", of(np.int64), T, "topk_indices: got dtype int64"),
        ("query_start_loc", longer(0), V, "query_start_loc: got shape"),
        ("row_of_slot", longer(-1), V, "last_use: got shape"),
        ("slot_of_row", read_only, V, "slot_of_row: got a read-only"),
        ("clock", longer(0), V, "clock: got shape"),
        ("compress_ratio", 0, V, "compress_ratio: got 0"),
    ],
    "fetch_resident-DSV4_FP8": [
        ("slots", longer(-1), V, "slots: got shape"),
        ("block_table", longer(0), V, "query_start_loc: got shape"),
        ("host_cache", ones(np.uint8, 2, BLOCK, 656), V, "host_cache: got shape"),
        ("cache", read_only, V, "cache: got a read-only"),
    ],
    "indexer_k_quant_and_cache": [
        ("k", longer(-1, -64), V, "k: got shape"),
        ("kv_cache", ones(np.uint8, 2, BLOCK, 584), V, "kv_cache: got shape"),
        ("kv_cache", read_only, V, "kv_cache: got a read-only"),
        ("slot_mapping", longer(0), V, "slot_mapping: got {wrong.size} slots"),
        ("quant_block_size", 64, V, "quant_block_size: got 64, expected 128"),
        ("scale_fmt", "e8", V, "scale_fmt: got 'e8'"),
    ],
    "cp_gather_indexer_k_quant_cache": [
        ("kv_cache", longer(-1, -4), V, "kv_cache: got shape"),
        ("dst_k", longer(-1, 4), V, "dst_k: got shape"),
        ("dst_k", of(BF16), T, "dst_k: got dtype bfloat16"),
        ("dst_k", read_only, V, "dst_k: got a read-only"),
        ("dst_scale", longer(0, -1), V, "dst_scale: got shape"),
        ("dst_scale", lambda x: ones(np.uint8, len(x), 1), V, "dst_scale: got shape"),
        ("dst_scale", of(np.float16), T, "dst_scale: got dtype float16"),
        ("dst_scale", lambda x: ones(np.float32, len(x), 2), V, "dst_scale: got shape"),
        ("block_table", longer(0, -1), V, "block_table: got {wrong.shape[0]} rows, expected at least "
         "{block_table.shape[0]}"),
        ("cu_seq_lens", int32(0), V, "cu_seq_lens: got no entries"),
        ("cu_seq_lens", of(np.int64), T, "cu_seq_lens: got dtype int64"),
    ],
    "concat_and_cache_mla-bfloat16": [
        ("kv_c", longer(-1, 64), V, "kv_c: got shape"),
        ("kv_c", of(np.float64), T, "kv_c: got dtype float64"),
        ("k_pe", longer(0, -1), V, "k_pe: got shape"),
        ("k_pe", of(np.float16), T, "k_pe: got dtype float16"),
        ("kv_cache", longer(-1, -64), V, "kv_cache: got shape"),
        ("kv_cache", of(np.float64), T, "kv_cache: got dtype float64"),
        ("kv_cache", of(np.uint8), V, "kv_cache: got shape"),
        ("kv_cache", read_only, V, "kv_cache: got a read-only"),
        ("slot_mapping", longer(0), V, "slot_mapping: got {wrong.size} slots"),
        ("kv_cache_dtype", "fp8", T, "kv_cache: got dtype bfloat16"),
        ("kv_cache_dtype", "fp8_ds_mla", T, "kv_cache: got dtype bfloat16"),
        ("kv_cache_dtype", "fp8_e5m2", V, "kv_cache_dtype: got 'fp8_e5m2'"),
    ],
    "concat_and_cache_mla-e4m3-one-scale": [
        ("scale", ones(np.float32, 2), V, r"scale: got shape \(2,\), expected one value"),
        ("scale", ones(np.float64, 1), T, "scale: got dtype float64"),
        ("scale", "1", T, "scale: got str"),
        ("scale", True, T, "scale: got True of type bool"),
        ("scale", 10**400, V, "scale: got an integer of 1329 bits, expected a finite number"),
        ("scale", 1e300, V, r"scale: got 1e\+300, expected a number that float32 has"),
        ("scale", float("nan"), V, "scale: got nan"),
        ("scale", 1j, T, "scale: got 1j of type complex"),
    ],
    "gather_cache-bfloat16": [
        ("src_cache", of(np.float32), T, "src_cache: got dtype float32"),
        ("src_cache", first, V, "src_cache: got shape"),
        ("src_cache", strided(1), V, "src_cache: got strides"),
        ("dst", longer(-1, -64), V, "dst: got bfloat16 rows of {wrong.shape[1]}"),
        ("dst", of(np.float16), V, "dst: got float16 rows of {dst.shape[1]}"),
        ("dst", of(np.int32), T, "dst: got dtype int32"),
        ("dst", read_only, V, "dst: got a read-only"),
        ("block_table", longer(0, -1), V, "block_table: got {wrong.shape[0]} rows"),
        ("cu_seq_lens", longer(0, -1), V,
         "cu_seq_lens: got {wrong.size} entries, expected at least {cu_seq_lens.size}"),
        ("cu_seq_lens", strided(), V, "cu_seq_lens: got strides"),
        ("batch_size", -1, V, "batch_size: got -1"),
        ("batch_size", plus(1), V, "cu_seq_lens: got {cu_seq_lens.size} entries"),
        ("seq_starts", longer(0, -1), V, "seq_starts: got shape"),
        ("seq_starts", of(np.int64), T, "seq_starts: got dtype int64"),
    ],
    "compute_swa_indices_and_lens": [
        ("query_start_loc", longer(0, -1), V, "query_start_loc: got {wrong.size} entries, expected "
         "{query_start_loc.size}"),
        ("token_to_req_indices", longer(0, -1), V, "token_to_req_indices: got {wrong.size} entries"),
        ("is_valid_token", of(np.int32), T, "is_valid_token: got dtype int32"),
        ("block_size", 0, V, "block_size: got 0"),
        ("window_size", -2, V, "window_size: got -2"),
        ("num_tokens", plus(1), V, "token_to_req_indices: got {token_to_req_indices.size} entries"),
        ("token_offset", 1, V, "token_to_req_indices: got {token_to_req_indices.size} entries, expected at least 8"),
        ("out", member(0, longer(-1, -1)), V, r"out\[0\] \(swa_indices\): got shape"),
        ("out", member(1, of(np.int64)), T, r"out\[1\] \(swa_lens\): got dtype int64"),
        ("out", lambda x: x[0], T, "out: got ndarray, expected a pair"),
    ],
    "compute_global_topk_indices_and_lens": [
        ("topk_indices", of(np.int64), T, "topk_indices: got dtype int64"),
        ("topk_indices", first, V, "topk_indices: got shape"),
        ("is_valid_token", longer(0, -1), V, "is_valid_token: got {wrong.size} entries"),
        ("block_table", first, V, "block_table: got shape"),
        ("block_size", -1, V, "block_size: got -1"),
        ("block_size", 2**31, V, "block_size: got 2147483648, expected at most"),
        ("out", member(0, read_only), V, r"out\[0\] \(global_topk.*got a read"),
    ],
    "combine_topk_swa_indices": [
        ("gather_lens", longer(0), V, "gather_lens: got shape"),
        ("topk", plus(3), V, "topk_indices: got {topk_indices.shape[1]} columns, expected at least topk = {wrong}"),
        ("N", 99, V, "N: got 99, expected at most M = {M}"),
        ("M", 2**31, V, "M: got 2147483648"),
        ("M", 2**30, V, "M: got 1073741824 rows for each of {seq_lens.size} requests, "
         "expected a workspace within int32"),
        ("compress_ratio", -1, V, "compress_ratio: got -1"),
        ("out", member(0, longer(-1, -1)), V, r"out\[0\] \(combined_indices\): got shape"),
    ],
    "build_flashinfer_mixed_sparse_indices-lens": [
        ("decode_swa_indices", longer(-1), V, "decode_swa_indices: got shape"),
        ("decode_compressed_topk_lens", longer(0), V, "decode_compressed_topk_lens: got shape"),
        ("prefill_topk_indices", longer(-1, -3), V, "prefill_topk_indices: got {wrong.shape[1]} columns"),
        ("token_to_req_indices", longer(0, -1), V, "token_to_req_indices: got {wrong.size} entries"),
        ("compressed_block_table", None, V, "compressed_block_table: got None, expected a table to map"),
        ("decode_is_valid_token", ones(np.bool_, 0), V, "decode_is_valid_token: got 0 entries"),
        ("swa_block_size", 0, V, "swa_block_size: got 0"),
        ("swa_block_span", 0, V, "swa_block_span: got 0"),
        ("out", member(1, longer(0, -1)), V, r"out\[1\] \(sparse_topk_lens\): got shape"),
    ],
    "compress_and_insert-DSV4_FP8": [
        ("kv_score", longer(-1, -12), V, "kv_score: got {wrong.shape[1]} columns, expected {position_bias.shape[1]} or "
         "{kv_score.shape[1]}"),
        ("state_cache", of(np.float64), T, "state_cache: got dtype float64"),
        ("state_slot_mapping", longer(0), V,
         "state_slot_mapping: got {wrong.size} slots, expected at most {kv_score.shape[0]}"),
        ("state_block_table", first, V, "state_block_table: got shape"),
        ("compress_ratio", 3, V, "position_bias: got shape"),
    ],
    "fp8_block_linear": [
        ("x", of(np.float16), T, "x: got dtype float16"),
        ("x", longer(-1), V, "weight: got shape"),
        ("x", first, V, "x: got shape"),
        ("x", lambda x: x[:, :0], V, "x: got rows of 0 values"),
        ("weight", of(np.int32), T, "weight: got dtype int32"),
        ("weight", strided(), V, "weight: got strides"),
        ("weight_scale", longer(0), V, "weight_scale: got shape"),
        ("weight_scale", of(BF16), T, "weight_scale: got dtype bfloat16"),
        ("block_rows", 0, V, "block_rows: got 0"),
        ("block_columns", 48, V, "block_columns: got 48, expected a multiple of 32"),
        ("float32_output", 1, T, "float32_output: got 1"),
    ],
    "fp8_block_linear-groups": [
        ("weight", first, V, "weight: got shape"),
        ("weight_scale", longer(0), V, "weight_scale: got shape"),
    ],
    "fused_q_kv_rmsnorm": [
        ("kv", of(np.float32), T, "kv: got dtype float32"),
        ("q_weight", longer(0, -1), V, "q_weight: got shape"),
        ("out", member(1, longer(-1, -1)), V, r"out\[1\] \(kv\): got shape"),
    ],
    "qnorm_rope_and_insert-DSV4_FP8": [
        ("q", ones(BF16, 3, 129, 512), V, "q: got 129 heads"),
        ("kv", longer(0, -1), V, "kv: got shape"),
        ("slot_mapping", longer(0), V, "slot_mapping: got {wrong.size} slots, expected at most {kv.shape[0]}"),
        ("positions", of(np.float32), T, "positions: got dtype float32"),
        ("cos_sin_cache", longer(-1, -1), V, "cos_sin_cache: got"),
        ("layout", cumla.V32_FP8, V, "layout: got V32_FP8"),
    ],
    "norm_rope_and_insert-DSV41_FP4": [
        ("kv", longer(-1, -1), V, "kv: got shape"),
        ("weight", longer(0), V, "weight: got shape"),
        ("slot_mapping", longer(0), V, "slot_mapping: got {wrong.size} slots"),
        ("cos_sin_cache", longer(-1, -1), V, "cos_sin_cache: got"),
        ("round_rows", 1, T, "round_rows: got 1 of type int, expected True or False"),
        ("layout", cumla.INDEXER_MXFP4, V, "layout: got INDEXER_MXFP4, expected DSV4_FP8, DSV41_FP8"),
    ],
    "indexer_knorm_rope_and_insert-INDEXER_FP8": [
        ("k", longer(-1, -1), V, "k: got shape"),
        ("bias", of(BF16), T, "bias: got dtype bfloat16"),
        ("layout", cumla.DSV4_FP8, V, "layout: got DSV4_FP8, expected INDEXER_FP8, INDEXER_BF16 or INDEXER_F32"),
        ("slot_mapping", longer(0), V, "slot_mapping: got {wrong.size} slots"),
    ],
    "apply_rope": [
        ("x", longer(-1, -1), V, "x: got {wrong.shape[2]} values a head, expected an even number"),
        ("out", read_only, V, "out: got a read"),
    ],
    "inverse_rope_and_quantize-scales": [
        ("num_groups", 3, V, "num_groups: got 3, expected a divisor of the {o.shape[1]} heads"),
        ("out", member(1, longer(-1)), V, r"out\[1\] \(scales\): got sh"),
    ],
    "sparse_mla_decode-inferred": [
        ("q", first, V, r"q: got shape .*, expected \[b, s_q, h, any\]"),
        ("q", of(np.float16), T, "q: got dtype float16, expected bfloat16"),
        ("q", longer(2, 126), V, "q: got 129 heads, expected 1 to 128"),
        ("q", longer(2, -3), V, "q: got 0 heads"),
        ("q", longer(-1, 64), V, "q: got 576 values a head, expected 512 for a DSV4_FP8 cache"),
        ("k_cache", longer(-1, -1), V, r"k_cache: got uint8 of shape \(7, 5, 583\)"),
        ("k_cache", of(np.float32), V, "k_cache: got float32 of shape"),
        ("k_cache", longer(-1, 72), V, "q: got 512 values a head, expected 576 for a V32_FP8 cache"),
        ("k_cache", first, V, "k_cache: got uint8 of shape"),
        ("indices", of(np.int64), T, "indices: got dtype int64, expected int32"),
        ("indices", first, V, r"indices: got shape .*, expected \[b, s_q, any\]"),
        ("topk_length", longer(0), V, r"topk_length: got shape \(4,\), expected \[b\] with b = 3"),
        ("topk_length", int32(2, 2, 1), V, "topk_length: got shape"),
        ("topk_length", of(np.int64), T, "topk_length: got dtype int64"),
        ("extra_k_cache", None, V, "extra_k_cache: extra_k_cache and extra_indices must be given together"),
        ("extra_indices", None, V, "extra_k_cache: extra_k_cache and extra_indices must be given together"),
        ("extra_k_cache", longer(-1, 72), V, "extra_k_cache: got shape"),
        ("extra_indices", longer(1, -1), V, "extra_indices: got shape"),
        ("extra_topk_length", longer(1, -1), V, "extra_topk_length: got shape"),
        ("attn_sink", longer(0), V, r"attn_sink: got shape \(4,\), expected \[h\] with h = 3"),
        ("attn_sink", of(np.float64), T, "attn_sink: got dtype float64"),
        ("softmax_scale", float("nan"), V, "softmax_scale: got nan, expected a finite number"),
        ("out", longer(-1, -1), V, "out: got shape"),
        ("out", of(np.float32), T, "out: got dtype float32"),
        ("out", read_only, V, "out: got a read-only"),
        ("lse", longer(-1), V, "lse: got shape"),
        ("lse", read_only, V, "lse: got a read-only"),
    ],
    "sparse_mla_prefill-576": [
        ("q", longer(-1, -76), V, "q: got 500 values a head, expected 512 or 576"),
        ("q", longer(1, 197), V, "q: got 200 heads"),
        ("kv", longer(-1, -64), V, r"kv: got shape \(9, 512\), expected \[any, d\] with d = 576"),
        ("kv", of(np.uint8), T, "kv: got dtype uint8"),
        ("indices", longer(0, -1), V, "indices: got shape"),
        ("topk_length", longer(0), V, "topk_length: got shape"),
        ("d_v", 576, V, "d_v: got 576, expected 512"),
        ("softmax_scale", float("inf"), V, "softmax_scale: got inf"),
        ("out", lambda x: x[:1], T, r"out: got (?s:.*), expected \(out, max_logits, lse\)"),
        ("out", member(2, of(BF16)), T, r"out\[2\] \(lse\): got dtype bfloat16"),
        ("out", member(2, read_only), V, r"out\[2\] \(lse\): got a read-only"),
    ],
    "merge_attn_states-float32": [
        ("prefix_output", of(BF16), T, "prefix_output: got dtype bfloat16, expected float32"),
        ("suffix_output", longer(-1), V, "suffix_output: got shape"),
        ("prefix_lse", longer(0), V, "prefix_lse: got shape"),
        ("output", read_only, V, "output: got a read-only"),
        ("output_lse", of(np.float64), T, "output_lse: got dtype float64"),
        ("output_lse", read_only, V, "output_lse: got a read-only"),
    ],
}  # fmt: skip
