"""Invalid arguments of dense attention, and of the steps of sparse and dense layers."""

from types import SimpleNamespace

import numpy as np
from layers.test_dense import HEADS, SCALE, Model
from layers.test_sparse import step_of
from metadata.batches import make_batch

import cumla
from cumla.layers.dense import BlockQuantizedWeight, MLACommonImpl
from cumla.layers.selection import IndexerInputs
from cumla.layers.sparse import LayerWorkspace, SparseMLALayer
from cumla.metadata import DeepseekV32IndexerMetadataBuilder, ServingConfig
from support.lab import BF16, Lab
from support.refused import EITHER, Call, From, T, V, With

HOST = Lab("cpu", on_device=False)
E4M3_PAGES = np.zeros((3, 16, 576), np.uint8)


def seeded():
    return np.random.default_rng(0)


# ---- dense attention


def packed_sequences():
    rng = seeded()
    q, v = (rng.standard_normal((4, 2, size)).astype(BF16) for size in (192, 128))
    cu = np.array([0, 4], np.int32)
    arguments = {"q": q, "k": q.copy(), "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return Call(cumla.mha_varlen, arguments | {"out": np.ones((4, 2, 128), BF16)})


def paged_rows():
    q = (5 * seeded().standard_normal((2, 1, 4, 576))).astype(BF16)
    arguments = {
        "q": q, "k_cache": np.zeros((3, 16, 576), BF16), "block_table": np.zeros((2, 3), np.int32),
        "cache_seqlens": np.zeros(2, np.int32), "out": np.ones((2, 1, 4, 512), BF16),
    }  # fmt: skip
    return Call(cumla.dense_mla_decode, arguments)


# ---- a step of a sparse layer


def sparse_step(ratio):
    layer, arguments, _ = step_of(seeded(), HOST, ratio, [150, 40], [1, 19])
    return Call(layer.step, arguments | {"out": np.full((20, 3, 512), 7, BF16), "backend": "cpu"})


def step_without_inserts(layout, dtype):
    """Rows of such a cache are written by others."""
    _, arguments, _ = step_of(seeded(), HOST, 1, [150, 40], [1, 19])
    cache = np.zeros((*arguments["swa_cache"].shape[:2], 512), dtype)
    arguments |= {"k": None, "swa_cache": cache, "out": np.full((20, 3, 512), 7, BF16)}
    return Call(SparseMLALayer(layout=layout).step, arguments)


def sparse_layer():
    return Call(SparseMLALayer, {}, creates=True)


def selecting(compressed):
    """With an indexer whose cache has no pages."""
    config = ServingConfig(
        compress_ratios=(4,), index_topk=16, block_size=8, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=256
    )
    metadata = DeepseekV32IndexerMetadataBuilder(config, "cpu").build(0, make_batch(HOST, [150, 40], [1, 19]))
    q, weights = np.zeros((20, 1, 128), np.uint8), np.zeros((20, 1), np.float32)
    indexer = IndexerInputs(q, weights, cumla.INDEXER_FP8.allocate(1, 64)[:0], metadata)
    return With(topk_indices=None, indexer=indexer)(compressed)


NONSENSE = (
    "a format", True, 0.5, 10**400, [], object(), np.zeros(()), np.array([None]), np.zeros(0), np.zeros(3, ">i4"),
)  # fmt: skip
NO_ARRAYS_OF_A_STEP = (None, np.zeros((), np.int32), np.zeros(1, np.int32), np.zeros(9), np.array([None]))
NO_PAGE_SIZES = (None, 0, True, 8.0, [8], np.zeros(3, np.int32))
READ_OF_METADATA = ("token_to_req_indices", "is_valid_token", "positions", "query_start_loc_cpu")


# ---- a dense layer


def dense_layer(**more):
    arguments = {"num_heads": HEADS, "head_size": 576, "scale": 1.0, "kv_b_proj": np.zeros((HEADS * 256, 512), BF16)}
    return Call(MLACommonImpl, arguments, creates=True)


def loading():
    def load(kv_b_proj, act_dtype):
        return MLACommonImpl(HEADS, 576, SCALE, kv_b_proj=kv_b_proj).process_weights_after_loading(act_dtype)

    return Call(load, {"kv_b_proj": np.zeros((HEADS * 256, 512), BF16), "act_dtype": BF16}, creates=True)


def dense_step(**format_):
    model = Model(HOST, seeded(), [9, 40], [1, 20], **format_)
    metadata = model.metadata()
    arguments = {"q": model.q, "k_c_normed": model.kv_c, "k_pe": model.k_pe, "kv_cache": model.cache}
    arguments |= {"attn_metadata": metadata, "k_scale": model.k_scale}
    return Call(model.impl.forward, arguments | {"output": np.full((21, HEADS * 128), 7, BF16)})


BYTES = np.zeros((HEADS * 256, 512), np.uint8)

CALLS = {
    "mha_varlen": packed_sequences,
    "dense_mla_decode": paged_rows,
    **{f"SparseMLALayer.step-{ratio}": lambda ratio=ratio: sparse_step(ratio) for ratio in (1, 4, 128)},
    "SparseMLALayer.step-DSV4_BF16": lambda: step_without_inserts(cumla.DSV4_BF16, BF16),
    "SparseMLALayer.step-DSV4_F32": lambda: step_without_inserts(cumla.DSV4_F32, np.float32),
    "SparseMLALayer": sparse_layer,
    "MLACommonImpl": dense_layer,
    "MLACommonImpl.process_weights_after_loading": loading,
    "MLACommonImpl.forward": dense_step,
    "MLACommonImpl.forward-fp8": lambda: dense_step(kv_cache_dtype="fp8", k_scale=1.0),
}
WRONG = {
    "mha_varlen": [
        ("q", lambda x: x.astype(np.float32), T, "q: got dtype float32"),
        ("k", lambda x: x[:3], V, r"v: got shape \(4, 2, 128\)"),
        ("k_pe", From(lambda _: np.ones((4, 128), BF16)), V, r"k: got shape \(4, 2, 192\)"),
        ("k_pe", np.ones((4, 192), BF16), V, "k_pe: got 192 values a key, expected fewer than q's 192"),
        ("v", lambda x: x.astype(np.float16), T, "v: got dtype float16"),
        ("cu_seqlens_k", np.array([0, 2, 4], np.int32), V, "cu_seqlens_k: got shape"),
        ("", With(cu_seqlens_q=np.zeros(0, np.int32), cu_seqlens_k=np.zeros(0, np.int32)), V,
         "cu_seqlens_q: got no entries"),
        ("softmax_scale", np.nan, V, "softmax_scale: got nan"),
        ("softmax_scale", 3e38, V, r"softmax_scale: got 3e\+38, expected a product"),
        ("", With(accumulate=True, out=None), V, "out: got None"),
        ("", With(accumulate=True, out=np.zeros((4, 2, 128), np.float32)), V, "lse: got None"),
        ("", With(accumulate=True, lse=np.zeros((2, 4), np.float32)), T, "out: got dtype bfloat16, expected float32"),
    ],
    "dense_mla_decode": [
        ("q", lambda x: x[..., :512], V, "q: got shape"),
        ("k_cache", lambda x: x.astype(np.float16), T,
         "k_cache: got dtype float16, expected q's bfloat16 or uint8"),
        ("block_table", lambda x: x[:1], V, "block_table: got 1 requests, expected at least 2"),
        ("cache_seqlens", lambda x: x[:1], V, "cache_seqlens: got 1 requests, expected at least 2"),
        ("max_seqlen", -1, V, "max_seqlen: got -1"),
        ("softmax_scale", 3e38, V, r"softmax_scale: got 3e\+38, expected a product"),
        ("", With(k_cache=E4M3_PAGES, scale=1e38), V, r"scale: got 1e\+38, expected at most 7.6e\+35"),
        ("", With(k_cache=E4M3_PAGES, scale=1e35, softmax_scale=1e4), V,
         r"softmax_scale: got 10000 times the cache's 1e\+35"),
    ],
    "SparseMLALayer.step-1": [
        ("k", lambda x: x[:-1], V, "k: got 19 tokens, expected at least the metadata's 20"),
        ("k", lambda x: x.astype(np.float16), T, "k: got dtype float16"),
        ("swa_cache", lambda x: x[:, :4], V, "swa_cache: got shape"),
        ("metadata", None, T, "metadata: got NoneType"),
        ("out", lambda x: x[:5], V, "out: got shape"),
        ("out", lambda x: x.astype(np.float32), T, "out: got dtype float32"),
        ("prefill_path", "sea", V, "prefill_path: got 'sea', expected 'pages', 'rows' or None"),
        ("workspace", LayerWorkspace(np.zeros((20, 512), BF16)), T, "workspace.lse: got dtype bfloat16"),
    ],
    "SparseMLALayer.step-4": [
        ("q", lambda x: x[:-1], V, "q: got 19 tokens, expected at least the metadata's 20"),
        ("q", lambda x: x.astype(np.float32), T, "q: got dtype float32"),
        ("q", lambda x: x[..., :448], V, "q: got shape"),
        ("swa_cache", lambda x: x[:0], V, "swa_cache: got 0 pages, expected at least 1"),
        ("compressed", None, V, "compressed: got None, expected a CompressedCache"),
        ("compressed", selecting, V, r"compressed\.indexer\.cache: got 0 pages, expected at least 2 for the 37"),
        ("compressed.topk_indices", None, T, "compressed.topk_indices: got None"),
        ("compressed.topk_indices", lambda x: x[:4], V,
         "compressed.topk_indices: got 4 tokens, expected at least the metadata's 20"),
        ("compressed.topk_indices", lambda x: x.astype(np.int64), T, "compressed.topk_indices: got dtype int64"),
        ("compressed.block_table", lambda x: x.astype(np.int64), T, "compressed.block_table: got dtype int64"),
        ("compressed.block_table", lambda x: x[:1], V,
         "compressed.block_table: got 1 requests, expected at least the metadata's 2"),
        ("compressed.block_table", lambda x: x[:, :1], V,
         "compressed.block_table: got 1 columns, pages of 32 rows each, expected at least 2 for the 37 rows"),
        ("compressed.k", lambda x: x.astype(np.float32), T, "compressed.k: got dtype float32"),
        ("compressed.slot_mapping", lambda x: x[:0], V, "compressed.slot_mapping: got 0 entries"),
        ("compressed.slot_mapping", lambda x: np.append(x, -1), V,
         "compressed.slot_mapping: got 2 entries, expected 1, one for each row of compressed.k"),
        ("compressed.cache", cumla.DSV4_FP8.allocate(9, 128), V,
         "compressed.cache: got pages of 128 rows, expected 32"),
        ("compressed.cache", lambda x: x[..., :500], V, "compressed.cache: got shape"),
        ("compressed.cache", lambda x: x[:0], V,
         r"compressed\.cache: got 0 pages, expected at least 2 for the 37 rows of the"),
        ("compressed.cache", np.zeros((9, cumla.DSV4_FP8.page_bytes(64)), np.uint8), V,
         "compressed.cache: got raw pages, expected block_size with them"),
        *((name, wrong, EITHER, None) for name in ("compressed", "workspace", "prefill_path", "join", "observe")
          for wrong in NONSENSE),
        *((f"metadata.{name}", wrong, EITHER, None) for name in READ_OF_METADATA for wrong in NO_ARRAYS_OF_A_STEP),
        *(("metadata.block_size", wrong, EITHER, None) for wrong in NO_PAGE_SIZES),
    ],
    "SparseMLALayer.step-128": [
        ("compressed.k", np.ones((3, 512), BF16), V,
         "compressed.slot_mapping: got 1 entries, expected 3, one for each row of compressed.k"),
        ("compressed.block_table", lambda x: x[:, :0], V,
         "compressed.block_table: got 0 columns, pages of 1 rows each, expected at least 1 for the 1 rows"),
        ("compressed.cache", lambda x: x[:, :0], V, "compressed.cache: got pages of 0 rows"),
        ("compressed.topk_indices", np.zeros((2, 8), np.int32), V, "compressed.topk_indices: got an"),
    ],
    # The message says how such caches are filled: the rows are not there yet.
    "SparseMLALayer.step-DSV4_BF16": [
        ("k", np.ones((20, 512), BF16), V, "k: got rows for a DSV4_BF16 cache, .*qnorm_rope_and_insert or by index"),
    ],
    "SparseMLALayer.step-DSV4_F32": [
        ("k", np.ones((20, 512), BF16), V, "k: got rows for a DSV4_F32 cache, .*qnorm_rope_and_insert or by index"),
    ],
    "SparseMLALayer": [
        *(("compress_ratio", wrong, EITHER, None) for wrong in (5, True, 4.0)),
        *(("index_topk", wrong, EITHER, None) for wrong in (0, 2.5, 2**31)),
        *(("softmax_scale", wrong, EITHER, None) for wrong in (float("nan"), "1", 1e300)),
        *(("layout", wrong, EITHER, None) for wrong in (cumla.V32_FP8, None, "DSV4_FP8")),
    ],
    "MLACommonImpl": [
        ("head_size", 512, V, "head_size: got 512, expected 576"),
        ("head_size", 576.0, V, "head_size: got 576.0"),
        ("num_kv_heads", 2, V, "num_kv_heads: got 2, expected 1"),
        ("kv_lora_rank", 256, V, "kv_lora_rank: got 256"),
        ("kv_cache_dtype", "int4", V, "kv_cache_dtype: got 'int4'"),
        ("num_heads", 200, V, "num_heads: got 200, expected at most 128"),
        ("q_lora_rank", 0, V, "q_lora_rank: got 0"),
        ("backend", "cobol", V, "backend: got 'cobol'"),
    ],
    "MLACommonImpl.process_weights_after_loading": [
        ("kv_b_proj", lambda x: x[:4], V, r"kv_b_proj: got shape \(4, 512\), expected \[768, 512\]"),
        ("kv_b_proj", BlockQuantizedWeight(BYTES, np.zeros((6, 5), np.float32)), V,
         r"kv_b_proj.weight: got scales of shape \(6, 5\), expected \(6, 4\)"),
        ("kv_b_proj", SimpleNamespace(weight=BYTES.view("float8_e5m2"), weight_scale=np.ones(1, np.float32)), T,
         "kv_b_proj.weight: got dtype float8_e5m2, expected float8_e4m3fn"),
        ("kv_b_proj", SimpleNamespace(weight_packed=BYTES), T, "kv_b_proj.weight_packed: got a packed weight"),
        ("kv_b_proj", SimpleNamespace(qweight=BYTES), T, "kv_b_proj.qweight: got a packed weight"),
        ("kv_b_proj", SimpleNamespace(weight=BYTES), V, "kv_b_proj: got an FP8 weight without weight_scale_inv"),
        ("kv_b_proj", SimpleNamespace(bias=BYTES), T, "kv_b_proj: got SimpleNamespace"),
        ("kv_b_proj", BYTES, T, "kv_b_proj: got dtype uint8"),
        ("act_dtype", np.dtype(np.float64), T, "act_dtype: got float64"),
    ],
    "MLACommonImpl.forward": [
        ("q", lambda x: x[:-1], V, "q: got 20 tokens, expected at least the metadata's 21"),
        ("q", lambda x: x[..., :128], V, "q: got shape"),
        ("q", lambda x: x.astype(np.float16), T, "q: got dtype float16, expected bfloat16"),
        ("k_c_normed", lambda x: x[:-1], V, "k_c_normed: got 20 tokens"),
        ("k_c_normed", lambda x: x.astype(np.float32), T, "k_c_normed: got dtype float32"),
        ("k_c_normed", lambda x: x[:, :500], V, "k_c_normed: got shape"),
        ("k_pe", lambda x: x[:, :60], V, "k_pe: got shape"),
        ("k_pe", lambda x: x.astype(np.float32), T, "k_pe: got dtype float32"),
        ("kv_cache", lambda x: x[..., :500], V, "kv_cache: got shape"),
        ("kv_cache", lambda x: x.astype(np.float16), T, "kv_cache: got dtype float16"),
        ("kv_cache", lambda x: x[:0], V, "kv_cache: got 0 pages, expected at least 1 for decodes"),
        ("kv_cache", lambda x: x[:, :4], V, "kv_cache: got pages of 4 tokens, expected 8"),
        ("output", np.zeros((21, 5), BF16), V, r"output: got bfloat16 \[21, 5\]"),
        ("output_scale", 0.5, V, "output_scale: got 0.5, expected None: the output is not quantised"),
        ("attn_metadata", None, T, "attn_metadata: got NoneType"),
        ("attn_metadata.slot_mapping", lambda x: x[:20], V, "attn_metadata.slot_mapping: got 20 entries"),
        *((f"attn_metadata.{name}", lambda x: x.astype(np.int64), T, f"attn_metadata.{name}: got dtype int64")
          for name in ("block_tables", "seq_lens_tensor", "query_start_loc")),
        ("attn_metadata.context_chunk_starts", None, T, "attn_metadata.context_chunk_starts: got NoneType"),
        ("attn_metadata.context_chunk_workspace", None, V, "attn_metadata: got no context_chunk_workspace"),
        ("attn_metadata.context_chunk_workspace", lambda x: x[:8], V, "context_chunk_workspace: got"),
        ("attn_metadata.max_decode_query_len", 2, V, "attn_metadata: got 1 decode tokens before prefills"),
        ("attn_metadata", With(num_prefills=0, num_prefill_tokens=0, num_decodes=0), V,
         "attn_metadata: got 1 decode tokens of 0 decodes"),
    ],
    "MLACommonImpl.forward-fp8": [
        ("k_scale", np.zeros(2, np.float32), V, None), ("k_scale", np.zeros(1), T, None),
    ],
}  # fmt: skip
