"""What only the CPU's attention has: threads of its own, and float64 for tokens that leave float32."""

import concurrent.futures
import subprocess
import sys

import numpy as np
import pytest
import threadpoolctl

import cumla
from cumla.kernels.cpu import dense_attention
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
    """Products of these leave float32; the reference has them in float64 and the result is within bfloat16."""
    q, kv, indices = problem(rng, 6, q_size=sizes[0], kv_size=1.0)
    kv[7] = np.where(rng.random(512) < 0.5, sizes[1], -sizes[1])  # of one row alone: the other tokens stay in float32
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
    """Queries go a few at a time where their scores would take much memory: each sees up to its own key."""
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
