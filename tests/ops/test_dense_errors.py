"""Wrong arguments of dense attention are errors that name them."""

import numpy as np
import pytest

import cumla
from support.lab import BF16


def test_packed_sequences(rng):
    q = rng.standard_normal((4, 2, 192)).astype(BF16)
    v, cu = rng.standard_normal((4, 2, 128)).astype(BF16), np.array([0, 4], np.int32)
    for changes, message in (
        ({"q": q.astype(np.float32)}, "q: got dtype float32"),
        ({"k": q[:3]}, r"v: got shape \(4, 2, 128\)"),
        ({"k_pe": v[:, 0]}, r"k: got shape \(4, 2, 192\)"),
        ({"k_pe": q[:, 0]}, "k_pe: got 192 values a key, expected fewer than q's 192"),
        ({"v": v.astype(np.float16)}, "v: got dtype float16"),
        ({"cu_seqlens_k": np.array([0, 2, 4], np.int32)}, "cu_seqlens_k: got shape"),
        ({"cu_seqlens_q": cu[:0], "cu_seqlens_k": cu[:0]}, "cu_seqlens_q: got no entries"),
        ({"softmax_scale": np.nan}, "softmax_scale: got nan"),
        ({"softmax_scale": 3e38}, r"softmax_scale: got 3e\+38, expected a product"),
        ({"accumulate": True}, "out: got None"),
        ({"accumulate": True, "out": np.zeros((4, 2, 128), np.float32)}, "lse: got None"),
        (
            {"accumulate": True, "out": v, "lse": np.zeros((2, 4), np.float32)},
            "out: got dtype bfloat16, expected float32",
        ),
    ):
        arguments = {"q": q, "k": q, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu} | changes
        with pytest.raises((TypeError, ValueError), match=message):
            cumla.mha_varlen(**arguments)


def test_paged_rows(rng):
    q = (5 * rng.standard_normal((2, 1, 4, 576))).astype(BF16)
    cache, table, lens = np.zeros((3, 16, 576), BF16), np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    for changes, message in (
        ({"q": q[..., :512]}, "q: got shape"),
        ({"k_cache": cache.astype(np.float16)}, "k_cache: got dtype float16, expected bfloat16 as q has, or uint8"),
        ({"block_table": table[:1]}, "block_table: got 1 requests, expected at least 2"),
        ({"cache_seqlens": lens[:1]}, "cache_seqlens: got 1 requests, expected at least 2"),
        ({"max_seqlen": -1}, "max_seqlen: got -1"),
        ({"softmax_scale": 3e38}, r"softmax_scale: got 3e\+38, expected a product"),
        ({"k_cache": np.zeros((3, 16, 576), np.uint8), "scale": 1e38}, r"scale: got 1e\+38, expected at most 7.6e\+35"),
        (
            {"k_cache": np.zeros((3, 16, 576), np.uint8), "scale": 1e35, "softmax_scale": 1e4},
            r"softmax_scale: got 10000 times the cache's 1e\+35",
        ),
    ):
        arguments = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lens} | changes
        with pytest.raises((TypeError, ValueError), match=message):
            cumla.dense_mla_decode(**arguments)
