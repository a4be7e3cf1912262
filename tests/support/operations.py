"""Small calls of operations, as NumPy arrays by name.

EXAMPLES  those that `python -m cumla check` makes, of every public operation
CASES     one of each that compilers of frameworks know, of which they compile every one
"""

import inspect
from unittest import mock

import numpy as np

import cumla
from cumla.cli import check_cases
from cumla.cli.check_cases import Bench
from support.lab import BF16

BLOCK, BLOCKS = 4, 6
CASES = {}


def case(make):
    CASES[make.__name__] = make
    return make


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(BF16)


def ints(rng, high, *shape):
    return rng.integers(0, high, shape).astype(np.int32)


def page_table(rng, requests=3):
    return rng.permutation(BLOCKS).reshape(requests, -1).astype(np.int32)


def fp8_cache(rng, layout):
    """A cache of values that are finite."""
    cache = np.zeros((BLOCKS, BLOCK, layout.token_bytes), np.uint8)
    k = rng.standard_normal((BLOCKS * BLOCK, layout.head_dim)).astype(BF16)
    slots = np.arange(BLOCKS * BLOCK)
    cumla.quantize_and_insert_k_cache(k, cache, slots, BLOCK, layout=layout, backend="reference")
    return cache


@case
def advance_step(rng):
    return {
        "num_seqs": 4, "num_queries": 3, "block_size": BLOCK, "input_tokens": ints(rng, 9, 4),
        "sampled_token_ids": ints(rng, 100, 3), "input_positions": ints(rng, 9, 4), "seq_lens": ints(rng, 7, 3) + 1,
        "slot_mapping": ints(rng, 9, 4), "block_tables": page_table(rng),
    }  # fmt: skip


def batch(rng):
    return {
        "query_start_loc": np.array([0, 2, 3, 6], np.int32), "seq_lens": np.array([5, 8, 4], np.int32),
    }  # fmt: skip


def tokens():
    return np.array([0, 0, 1, 2, 2, 2], np.int32)


@case
def compute_swa_indices_and_lens(rng):
    return {
        **batch(rng), "token_to_req_indices": tokens(), "is_valid_token": rng.random(6) < 0.8,
        "block_table": page_table(rng), "block_size": BLOCK, "window_size": 3, "num_tokens": 6,
    }  # fmt: skip


@case
def compute_global_topk_indices_and_lens(rng):
    return {
        "topk_indices": ints(rng, 8, 6, 5) - 1, "token_to_req_indices": tokens(), "block_table": page_table(rng),
        "block_size": BLOCK, "is_valid_token": rng.random(6) < 0.8, "compact": True,
    }  # fmt: skip


@case
def combine_topk_swa_indices(rng):
    return {
        "topk_indices": ints(rng, 3, 6, 5) - 1, **batch(rng), "gather_lens": np.array([4, 3, 4], np.int32),
        "window_size": 3, "compress_ratio": 4, "topk": 5, "M": 9, "N": 4,
    }  # fmt: skip


@case
def build_flashinfer_mixed_sparse_indices(rng):
    return {
        "decode_swa_indices": ints(rng, 20, 2, 3), "decode_compressed_indices": ints(rng, 8, 2, 6) - 1,
        "decode_compressed_topk_lens": None, "prefill_topk_indices": ints(rng, 3, 4, 5), **batch(rng),
        "token_to_req_indices": tokens(), "swa_block_table": page_table(rng), "swa_block_size": BLOCK,
        "compressed_block_table": page_table(rng), "compressed_block_size": BLOCK, "window_size": 3,
        "compress_ratio": 4, "topk": 5, "decode_compressed_indices_are_local": True,
        "decode_is_valid_token": np.array([True, False]),
    }  # fmt: skip


@case
def quantize_and_insert_k_cache(rng):
    return {
        "k": rows(rng, 5, 512), "k_cache": fp8_cache(rng, cumla.DSV4_FP8), "block_size": BLOCK,
        "slot_mapping": np.array([3, -1, 20, 7, 8], np.int32),
    }  # fmt: skip


@case
def dequantize_and_gather_k_cache(rng):
    return {
        "out": rows(rng, 3, 6, 512), "k_cache": fp8_cache(rng, cumla.DSV4_FP8),
        "seq_lens": np.array([5, 8, 2], np.int32), "gather_lens": np.array([3, 4, 2], np.int32),
        "block_table": page_table(rng), "block_size": BLOCK, "offset": 1,
    }  # fmt: skip


@case
def indexer_k_quant_and_cache(rng):
    return {
        "k": rows(rng, 3, 128), "kv_cache": fp8_cache(rng, cumla.INDEXER_FP8),
        "slot_mapping": np.array([9, -1, 2], np.int32),
    }  # fmt: skip


@case
def cp_gather_indexer_k_quant_cache(rng):
    return {
        "kv_cache": fp8_cache(rng, cumla.INDEXER_FP8), "dst_k": np.zeros((12, 128), np.uint8),
        "dst_scale": np.zeros(12, np.float32), "block_table": page_table(rng),
        "cu_seq_lens": np.array([0, 3, 8, 10], np.int32),
    }  # fmt: skip


def indexer_queries(rng, *shape):
    return rng.integers(0, 0x7E, shape).astype(np.uint8)


@case
def fused_indexer_q_rope_quant(rng):
    return {
        "positions": np.array([3, 0, 7], np.int64), "index_q": rows(rng, 3, 4, 128),
        "index_q_cos_sin_cache": rng.standard_normal((6, 64)).astype(np.float32), "index_weights": rows(rng, 3, 4),
        "rope_first": True,
    }  # fmt: skip


@case
def fp8_mqa_logits(rng):
    return {
        "q": indexer_queries(rng, 3, 4, 128), "kv": indexer_queries(rng, 9, 128),
        "weights": rng.standard_normal((3, 4)).astype(np.float32), "cu_seqlen_ks": np.array([0, 2, 5], np.int32),
        "cu_seqlen_ke": np.array([4, 9, 5], np.int32), "kv_scales": np.ones(9, np.float32),
    }  # fmt: skip


def paged_queries(rng):
    return {
        "q": indexer_queries(rng, 3, 2, 4, 128), "weights": rng.standard_normal((6, 4)).astype(np.float32),
        "context_lens": np.array([5, 8, 2], np.int32), "block_table": page_table(rng),
    }  # fmt: skip


@case
def fp8_paged_mqa_logits(rng):
    return {**paged_queries(rng), "kv_cache": fp8_cache(rng, cumla.INDEXER_FP8), "clean_logits": True}


@case
def get_paged_mqa_logits_metadata(rng):
    return {"context_lens": np.array([1000, 500], np.int32), "block_kv": 64, "num_sms": 4}


@case
def top_k_per_row(rng):
    return {
        "logits": rng.standard_normal((3, 20)).astype(np.float32),
        "topk": 4,
        "row_ends": np.array([9, 3, 20], np.int32),
    }


@case
def indexer_topk(rng):
    return {**paged_queries(rng), "kv": fp8_cache(rng, cumla.INDEXER_FP8), "topk": 3}


@case
def concat_and_cache_mla(rng):
    return {
        "kv_c": rows(rng, 3, 512), "k_pe": rows(rng, 3, 64), "kv_cache": rows(rng, BLOCKS, BLOCK, 576),
        "slot_mapping": np.array([9, -1, 2], np.int32),
    }  # fmt: skip


@case
def concat_and_cache_mla_fp8(rng):
    return {
        **concat_and_cache_mla(rng), "kv_cache": np.zeros((BLOCKS, BLOCK, 576), np.uint8), "kv_cache_dtype": "fp8",
        "scale": np.array([0.5], np.float32),
    }  # fmt: skip


@case
def gather_cache(rng):
    return {
        "src_cache": rows(rng, BLOCKS, BLOCK, 576), "dst": rows(rng, 12, 576), "block_table": page_table(rng),
        "cu_seq_lens": np.array([0, 3, 8, 10], np.int32), "batch_size": 3, "seq_starts": np.array([1, 0, 4], np.int32),
    }  # fmt: skip


@case
def sparse_mla_decode(rng):
    return {
        "q": rows(rng, 3, 2, 4, 512), "k_cache": fp8_cache(rng, cumla.DSV4_FP8),
        "indices": ints(rng, 25, 3, 2, 6) - 1, "layout": cumla.DSV4_FP8, "topk_length": np.array([6, 0, 3], np.int32),
        "extra_k_cache": fp8_cache(rng, cumla.DSV4_FP8), "extra_indices": ints(rng, 25, 3, 2, 4) - 1,
        "attn_sink": rng.standard_normal(4).astype(np.float32), "softmax_scale": 0.05,
    }  # fmt: skip


@case
def sparse_mla_decode_v32(rng):
    return {
        "q": rows(rng, 2, 1, 3, 576), "k_cache": fp8_cache(rng, cumla.V32_FP8), "indices": ints(rng, 25, 2, 1, 6) - 1,
    }  # fmt: skip


@case
def sparse_mla_prefill(rng):
    return {
        "q": rows(rng, 5, 3, 512), "kv": rows(rng, 10, 512), "indices": ints(rng, 12, 5, 6) - 1,
        "topk_length": ints(rng, 7, 5),
    }  # fmt: skip


@case
def merge_attn_states(rng):
    part = {"output": rows(rng, 5, 3, 64), "output_lse": np.zeros((3, 5), np.float32)}
    for side in ("prefix", "suffix"):
        part[f"{side}_output"] = rows(rng, 5, 3, 64)
        part[f"{side}_lse"] = rng.standard_normal((3, 5)).astype(np.float32)
    return part


@case
def mha_varlen(rng):
    return {
        "q": rows(rng, 6, 3, 64), "k": rows(rng, 9, 3, 48), "v": rows(rng, 9, 3, 32), "k_pe": rows(rng, 9, 16),
        "cu_seqlens_q": np.array([0, 2, 6], np.int32), "cu_seqlens_k": np.array([0, 5, 9], np.int32), "causal": True,
    }  # fmt: skip


@case
def dense_mla_decode(rng):
    return {
        "q": rows(rng, 3, 2, 4, 576), "k_cache": rows(rng, BLOCKS, BLOCK, 576), "block_table": page_table(rng),
        "cache_seqlens": np.array([5, 8, 2], np.int32), "softmax_scale": 0.05,
    }  # fmt: skip


class _Recorded(BaseException):
    """What an example calls its operation with."""


def arguments_of(example, seed):
    """The arguments of a case of cumla.cli.check_cases by name: NumPy arrays, and what is none."""
    signature = inspect.signature(getattr(cumla, example.op))

    def record(*arguments, **keywords):
        raise _Recorded(signature.bind(*arguments, **keywords).arguments)

    with mock.patch.object(cumla, example.op, record):
        try:
            example.run(Bench("reference", seed))
        except _Recorded as recorded:
            return {name: x for name, x in recorded.args[0].items() if name != "backend"}
    raise AssertionError(f"{example.op} is not called")


def public(example):
    """The operation of a case."""
    return getattr(cumla, example.op)


def identifier(example):
    return f"{example.op}-{example.variant.replace(', ', '-').replace(' ', '-')}".rstrip("-")


EXAMPLES = {identifier(example): example for example in check_cases.CASES}


def operation(case):
    """The name of the operation that a case calls."""
    return case.removesuffix("_fp8").removesuffix("_v32")


def expected(case, arguments, writes, put=np.array):
    """What an eager call on arrays made by `put` writes and returns, in that order."""
    arrays = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    results = getattr(cumla, operation(case))(**arrays)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return [arrays[name] for name in writes if arrays.get(name) is not None] + list(results)


def same_bits(got, want):
    """Whether two arrays on the host have the same dtype, shape and bits."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def assert_same_bits(got, want):
    """The same of two arrays, and if it is not so, where and how they differ."""
    if same_bits(got, want):
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    unsigned = f"u{got.itemsize}" if got.dtype != np.bool_ else "u1"
    got_bits, want_bits = (np.ascontiguousarray(x).view(unsigned) for x in (got, want))
    places = np.argwhere(got_bits != want_bits)
    first = [f"{tuple(map(int, at))}: {got_bits[tuple(at)]:#x} for {want_bits[tuple(at)]:#x}" for at in places[:4]]
    raise AssertionError(f"{len(places)} of {got.size} values have other bits: {'; '.join(first)}")
