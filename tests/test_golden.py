"""Every backend against results of the peers' code."""

import numpy as np
import pytest

import cumla
from support import golden
from support.bounds import assert_decode, assert_prefill
from support.lab import BF16, bfloat16, to_float


def golden_cases(function):
    return pytest.mark.parametrize("number", golden.cases(function))


def few(lab, number):
    """Number of tokens to check: all, or `number` if each token is slow."""
    return number if lab.tiny else 10**6


@golden_cases("quantize_and_insert_k_cache")
def test_quantize_and_insert(lab, number):
    case = golden.case("quantize_and_insert_k_cache", number)
    cache = lab.put(case["cache_before"])
    k, slots = bfloat16(case["k"]), case["slot_mapping"]
    tokens = slice(-few(lab, 6), None)
    if lab.tiny:  # the reference computes the earlier tokens
        before = slice(None, tokens.start)
        cumla.quantize_and_insert_k_cache(k[before], cache, slots[before], case["block_size"], backend="reference")
    cumla.quantize_and_insert_k_cache(
        lab.put(k[tokens]), cache, lab.put(slots[tokens]), case["block_size"], backend=lab.backend
    )
    np.testing.assert_array_equal(lab.get(cache), case["cache_after"])


@golden_cases("dequantize_and_gather_k_cache")
def test_dequantize_and_gather(lab, number):
    case = golden.case("dequantize_and_gather_k_cache", number)
    rows = slice(case["offset"] + few(lab, 4))  # of each request
    want = case["out"][:, rows]
    out = lab.put(np.full(want.shape, 7.0, BF16))
    gather_lens = case["gather_lens"] if case["gather_lens"].size else None
    cumla.dequantize_and_gather_k_cache(
        out, lab.put(case["k_cache"]), lab.put(case["seq_lens"]), lab.put(gather_lens), lab.put(case["block_table"]),
        case["block_size"], case["offset"], backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(out).view(np.uint16), want)


@golden_cases("decode_swa")
def test_swa_indices(lab, number):
    case = golden.case("decode_swa", number)
    indices, lens = cumla.compute_swa_indices_and_lens(
        lab.put(case["query_start_loc"]), lab.put(case["seq_lens"]), lab.put(case["token_to_req_indices"]),
        lab.put(case["is_valid_token"]), lab.put(case["block_table"]),
        case["block_size"], case["window_size"], case["num_decode_tokens"], backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(lens), case["decode_swa_lens"])
    padding = case["decode_swa_lens"] == 0  # the peer does not write these rows; cumla clears them
    np.testing.assert_array_equal(lab.get(indices)[~padding], case["decode_swa_indices"][~padding])
    assert (lab.get(indices)[padding] == -1).all()


@golden_cases("compute_global_topk_indices_and_lens")
def test_global_topk(lab, number):
    case = golden.case("compute_global_topk_indices_and_lens", number)
    tokens = slice(few(lab, 8))
    indices, lens = cumla.compute_global_topk_indices_and_lens(
        lab.put(case["topk_indices"][tokens]), lab.put(case["token_to_req_indices"]), lab.put(case["block_table"]),
        case["block_size"], lab.put(case["is_valid_token"]), backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(indices), case["global_topk_indices"][tokens])
    np.testing.assert_array_equal(lab.get(lens), case["topk_lens"][tokens])


@golden_cases("combine_topk_swa_indices")
def test_combine(lab, number):
    case = golden.case("combine_topk_swa_indices", number)
    tokens = slice(few(lab, 8))
    indices, lens = cumla.combine_topk_swa_indices(
        lab.put(case["topk_indices"][tokens]),
        *(lab.put(case[name]) for name in ("query_start_loc", "seq_lens", "gather_lens")),
        *(case[name] for name in ("window_size", "compress_ratio", "topk", "M", "N")), backend=lab.backend,
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(indices), case["combined_indices"][tokens])
    np.testing.assert_array_equal(lab.get(lens), case["combined_lens"][tokens])


@golden_cases("build_flashinfer_mixed_sparse_indices")
def test_mixed_sparse_indices(lab, number):
    case = golden.case("build_flashinfer_mixed_sparse_indices", number)
    names = (
        "decode_swa_indices", "decode_compressed_indices", "decode_compressed_topk_lens", "prefill_topk_indices",
        "query_start_loc", "seq_lens", "token_to_req_indices", "swa_block_table", "swa_block_size",
        "compressed_block_table", "compressed_block_size", "window_size", "compress_ratio", "topk", "local",
        "decode_is_valid_token",
    )  # fmt: skip
    case["prefill_topk_indices"] = case["prefill_topk_indices"][: few(lab, 8)]
    tokens = slice(len(case["decode_swa_indices"]) + len(case["prefill_topk_indices"]))
    arguments = [lab.put(case[name]) if isinstance(case[name], np.ndarray) else case[name] for name in names]
    indices, lens = cumla.build_flashinfer_mixed_sparse_indices(*arguments, backend=lab.backend)
    np.testing.assert_array_equal(lab.get(indices), case["sparse_indices"][tokens])
    np.testing.assert_array_equal(lab.get(lens), case["sparse_topk_lens"][tokens])


@pytest.mark.attention
@golden_cases("sparse_decode_dsv4")
def test_sparse_decode_dsv4(lab, number):
    case = golden.case("sparse_decode_dsv4", number)
    out, lse = cumla.sparse_mla_decode(
        lab.put(bfloat16(case["q"])), lab.put(case["k_cache"]), lab.put(case["indices"]),
        layout=cumla.DSV4_FP8, block_size=case["block_size"], topk_length=lab.put(case["topk_length"]),
        extra_k_cache=lab.put(case["extra_k_cache"]), extra_indices=lab.put(case["extra_indices"]),
        extra_topk_length=lab.put(case["extra_topk_length"]), extra_block_size=case["extra_block_size"],
        attn_sink=lab.put(case["attn_sink"]), softmax_scale=case["sm_scale"], backend=lab.backend,
    )  # fmt: skip
    assert_decode(to_float(lab.get(out)), lab.get(lse), to_float(bfloat16(case["out"])), case["lse"])


@pytest.mark.attention
@golden_cases("sparse_decode_v32")
def test_sparse_decode_v32(lab, number):
    case = golden.case("sparse_decode_v32", number)
    out, lse = cumla.sparse_mla_decode(
        lab.put(bfloat16(case["q"])), lab.put(case["k_cache"]), lab.put(case["indices"]),
        softmax_scale=case["sm_scale"], backend=lab.backend,
    )  # fmt: skip
    assert_decode(to_float(lab.get(out)), lab.get(lse), to_float(bfloat16(case["out"])), case["lse"])


@pytest.mark.attention
@golden_cases("sparse_prefill")
def test_sparse_prefill(lab, number):
    case = golden.case("sparse_prefill", number)
    out, max_logits, lse = cumla.sparse_mla_prefill(
        lab.put(bfloat16(case["q"])), lab.put(bfloat16(case["kv"])), lab.put(case["indices"]),
        softmax_scale=case["sm_scale"], attn_sink=lab.put(case["attn_sink"]),
        topk_length=lab.put(case["topk_length"]), backend=lab.backend,
    )  # fmt: skip
    # The peer's own rounding puts 1 to 12 of these 65,536 values beyond the bound around float64.
    assert_prefill(
        to_float(lab.get(out)), lab.get(max_logits), lab.get(lse),
        to_float(bfloat16(case["out"])), case["max_logits"], case["lse"], rounded_sides=2,
    )  # fmt: skip
