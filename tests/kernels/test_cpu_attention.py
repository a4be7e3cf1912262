"""The CPU's attention only: its threads, and float64 for tokens that overflow float32."""

import concurrent.futures
import functools
import subprocess
import sys

import numpy as np
import pytest
import threadpoolctl

import cumla
from cumla.kernels.cpu import dense_attention, shards, softmax, sparse_attention
from support.bounds import assert_prefill, assert_within
from support.lab import BF16, to_float


def problem(rng, tokens, heads=3, rows=50, width=40, q_size=1.0, kv_size=1.0):
    q = (rng.standard_normal((tokens, heads, 512)) * q_size).astype(BF16)
    kv = (rng.standard_normal((rows, 512)) * kv_size).astype(BF16)
    return q, kv, rng.integers(-3, rows + 3, (tokens, width), dtype=np.int32)


def assert_right(arguments, results):
    want = cumla.sparse_mla_prefill(*arguments, backend="reference")
    assert_prefill(*(to_float(x) for x in (*results, *want)))


def blas_threads():
    return {x["filepath"]: x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"}


@pytest.mark.parametrize("sizes", [(1e20, 1e20), (1e-3, 3e38)], ids=["scores", "values"])
def test_numbers_beyond_float32_between(rng, sizes):
    """Products of these overflow float32; the reference has them in float64 and the result is within bfloat16."""
    q, kv, indices = problem(rng, 6, q_size=sizes[0], kv_size=1.0)
    kv[7] = np.where(rng.random(512) < 0.5, sizes[1], -sizes[1])  # in one row only: the other tokens stay in float32
    indices[3:] = np.where(indices[3:] == 7, 8, indices[3:])
    results = cumla.sparse_mla_prefill(q, kv, indices)
    assert_right((q, kv, indices), results)


def test_nan_stays_with_the_tokens_that_attend_to_it(rng):
    q, kv, indices = problem(rng, 4)
    kv[5, 17] = np.nan
    indices[:] = np.where(indices == 5, 6, indices)
    indices[2, 0] = 5
    out, max_logits, lse = cumla.sparse_mla_prefill(q, kv, indices)
    assert np.isnan(to_float(lse)).all(axis=1).tolist() == [False, False, True, False]
    assert np.isnan(max_logits).all(axis=1).tolist() == [False, False, True, False]
    assert np.isnan(to_float(out)).any(axis=(1, 2)).tolist() == [False, False, True, False]


def test_blas_keeps_its_threads(rng):
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = blas_threads()
        assert 2 in before.values()
        cumla.sparse_mla_prefill(*problem(rng, 5))
        assert blas_threads() == before


@pytest.mark.parametrize("accumulate", [False, True])
def test_causal_attention_in_several_steps(rng, monkeypatch, accumulate):
    """If scores would take much memory, queries are processed in groups: each query sees keys up to its own."""
    q, k, v = (rng.standard_normal((n, 2, 64)).astype(BF16) for n in (23, 40, 40))
    starts, ends = np.array([0, 11, 23], np.int32), np.array([0, 25, 40], np.int32)
    options = {"causal": True, "accumulate": accumulate}
    given = rng.standard_normal((23, 2, 64)).astype(np.float32), rng.standard_normal((2, 23)).astype(np.float32)
    want = cumla.mha_varlen(q, k, v, starts, ends, backend="reference", **options, **results(accumulate, given))
    for scores in (1, 4 * 2 * 25, 1 << 20):  # one query at a time, a few, and all
        monkeypatch.setattr(dense_attention, "SCORES_AT_ONCE", scores)
        got = cumla.mha_varlen(q, k, v, starts, ends, backend="cpu", **options, **results(accumulate, given))
        assert_within("out", to_float(got[0]), to_float(want[0]), 1e-3, 2.01 / 128)
        assert_within("lse", got[1], want[1], 1e-6, 2.01 / 65536)


def results(accumulate, given):
    return dict(zip(("out", "lse"), (x.copy() for x in given), strict=True)) if accumulate else {}


def subnormal(x):
    return (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)


def spread(rng, *shape):
    """Scores of two such arrays have a standard deviation of 25: a quarter of the weights would be subnormal."""
    return (rng.standard_normal(shape) * 5).astype(BF16)


def sparse_prefill(rng):
    q, kv = spread(rng, 3, 4, 576), spread(rng, 400, 576)
    return cumla.sparse_mla_prefill, (q, kv, rng.integers(0, 400, (3, 300), dtype=np.int32)), {}


def sparse_decode(rng):
    cache = cumla.DSV4_FP8.allocate(8, 64)
    cumla.quantize_and_insert_k_cache(spread(rng, 512, 512), cache, np.arange(512))
    return (
        cumla.sparse_mla_decode,
        (spread(rng, 2, 1, 4, 512), cache, np.arange(512, dtype=np.int32).reshape(2, 1, 256)),
        {},
    )


def dense_decode(rng):
    tables = np.arange(8, dtype=np.int32).reshape(2, 4)
    lens = np.array([256, 200], np.int32)
    return cumla.dense_mla_decode, (spread(rng, 2, 2, 4, 576), spread(rng, 8, 64, 576), tables, lens), {}


def dense_prefill(rng):
    q, k, v = spread(rng, 60, 4, 192), spread(rng, 200, 4, 192), spread(rng, 200, 4, 128)
    starts, ends = np.array([0, 25, 60], np.int32), np.array([0, 120, 200], np.int32)
    return cumla.mha_varlen, (q, k, v, starts, ends), {"causal": True}


@pytest.mark.parametrize("problem", [sparse_prefill, sparse_decode, dense_decode, dense_prefill])
def test_no_weight_of_a_product_is_subnormal(rng, monkeypatch, problem):
    """A product with subnormal weights takes a hundred times as long."""
    call, arguments, options = problem(rng)
    want = call(*arguments, **options, backend="reference")
    products, matmul = [], np.matmul

    def recorded(a, b, **keywords):
        products.append(np.array(a))
        return matmul(a, b, **keywords)

    monkeypatch.setattr(np, "matmul", recorded)
    out, *_, lse = call(*arguments, **options, backend="cpu")
    weights = [a for a in products if a.max() == 1 and a.min() == 0]  # the largest score, and one far below
    assert len(weights) >= 2
    assert not any(subnormal(a).any() for a in products)
    assert_within("out", to_float(out), to_float(want[0]), 8e-4, 2.01 / 128)
    assert_within("lse", to_float(lse), to_float(want[-1]), 1e-6, 2.01 / 65536)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials(dtype):
    """Equal to NumPy's where those are normal numbers, else 0; NaN stays."""
    least = {np.float32: softmax.LEAST_FLOAT32, np.float64: softmax.LEAST_FLOAT64}[dtype]
    near = least + np.linspace(-1e-3, 1e-3, 41).astype(dtype)
    differences = np.concatenate([np.linspace(0, 1.3 * least, 999), near, [least, -np.inf, np.nan]]).astype(dtype)
    with np.errstate(under="ignore"):
        want = np.exp(differences)
    want[want < np.finfo(dtype).tiny * 1.0001] = 0
    results = [np.array([softmax.exponential(difference, least) for difference in differences], dtype)]
    if dtype == np.float32:
        results.append(softmax.exponentials(differences.copy()))
    for got in results:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=np.finfo(dtype).tiny * 1.0001)
        assert not subnormal(got).any()


@pytest.mark.parametrize("gap", [88, 95, 103])
def test_merged_parts_have_no_subnormal_weight(gap):
    """The larger part is 0 and the smaller 1: the result is the weight of the smaller."""
    parts, lses = np.zeros((2, 3, 2, 512), np.float32), np.zeros((2, 2, 3), np.float32)
    parts[1], lses[1] = 1, -gap
    out, lse = np.ones((3, 2, 512), np.float32), np.ones((2, 3), np.float32)
    sparse_attention.merge_attn_states(out, parts[0], lses[0], parts[1], lses[1], lse)
    assert not out.any()
    out, lse = np.ones((1, 3, 2, 512), np.float32), np.ones((1, 2, 3), np.float32)
    shards.merge_partials(parts[:, None], lses[:, None], None, out, lse)
    assert not out.any()
    assert not lse.any()


def test_a_huge_value_of_a_small_weight_counts():
    """2^-130 of 2^127: the weight would be a subnormal number in float32, and its contribution is not negligible."""
    q, kv = np.zeros((1, 1, 512), BF16), np.zeros((2, 512), BF16)
    q[0, 0, 0], kv[1, 0], kv[1, 1] = 1, -130 * np.log(2), 2.0**127
    call = functools.partial(cumla.sparse_mla_prefill, q, kv, np.array([[0, 1]], np.int32), softmax_scale=1.0)
    results = call(backend="cpu")
    assert 0.1 < to_float(results[0])[0, 0, 1] < 0.2
    assert_prefill(*(to_float(x) for x in (*results, *call(backend="reference"))))


def test_calls_from_several_threads(rng):
    problems = [problem(rng, tokens) for tokens in (1, 2, 17, 33) * 3]
    before = blas_threads()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda arguments: cumla.sparse_mla_prefill(*arguments), problems))
    assert blas_threads() == before
    for arguments, result in zip(problems, results, strict=True):
        assert_right(arguments, result)


FORK = """
import os, numpy as np, ml_dtypes, cumla
q, kv = np.ones((8, 2, 512), ml_dtypes.bfloat16), np.ones((4, 512), ml_dtypes.bfloat16)
call = lambda: cumla.sparse_mla_prefill(q, kv, np.zeros((8, 3), np.int32))
call()
child = os.fork()
if not child:
    os._exit(0 if (call()[0] == 1).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
