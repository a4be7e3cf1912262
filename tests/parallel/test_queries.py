"""Sharded queries: every token has one rank, work is even, and results equal one device's."""

import numpy as np
import pytest

import cumla
from cumla.parallel import run_threads, shard_queries
from support.bounds import assert_dense_prefill, assert_prefill
from support.lab import BF16, to_float

STARTS = np.array([0, 37, 37, 38, 150], np.int32)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_token_is_one_ranks(size):
    shards = shard_queries(STARTS, size)
    owned = np.concatenate([shards.own(rank) for rank in range(size)])
    np.testing.assert_array_equal(np.sort(owned), np.arange(150))
    np.testing.assert_array_equal(shards.tokens.reshape(-1)[shards.places], np.arange(150))
    for rank in range(size):
        own = np.concatenate([piece.tokens for piece in shards.pieces[rank]])
        np.testing.assert_array_equal(np.sort(own), shards.own(rank))


@pytest.mark.parametrize("size", range(1, 9))
def test_pieces_have_the_keys_that_their_queries_see(size):
    """For requests of any length, some with fewer queries than pieces: a piece without queries has no keys."""
    lens = np.arange(20)
    starts = np.concatenate([[0], np.cumsum(lens)])
    for pieces in shard_queries(starts, size).pieces:
        for piece in pieces:
            assert len(piece.tokens) == piece.cu_seqlens_q[-1]
            assert len(piece.keys) == piece.cu_seqlens_k[-1]
            for request, first in enumerate(starts[:-1]):
                queries, keys = (
                    array[bounds[request] : bounds[request + 1]]
                    for array, bounds in ((piece.tokens, piece.cu_seqlens_q), (piece.keys, piece.cu_seqlens_k))
                )
                want = np.arange(first, queries[-1] + 1) if len(queries) else []
                np.testing.assert_array_equal(keys, want)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_causal_work_is_even(size):
    length = 4096
    shards = shard_queries(np.array([0, length]), size)
    work = [int((shards.own(rank) + 1).sum()) for rank in range(size)]
    assert max(work) < 1.01 * min(work)
    assert max(map(len, map(shards.own, range(size)))) - length // size <= 1


@pytest.mark.parametrize("size", range(1, 9))
def test_dense_prefill(rng, size):
    q, k, v = (rng.standard_normal((150, 2, dim)).astype(BF16) for dim in (48, 48, 32))
    want_out, want_lse = cumla.mha_varlen(q, k, v, STARTS, STARTS, causal=True, backend="reference")
    shards = shard_queries(STARTS, size)

    def on(comm):
        results = []
        for piece in shards.pieces[comm.rank]:
            out, lse = cumla.mha_varlen(
                q[piece.tokens], k[piece.keys], v[piece.keys], piece.cu_seqlens_q, piece.cu_seqlens_k, causal=True
            )
            results.append((piece.tokens, out, lse))
        return results

    for results in run_threads(size, on):
        for tokens, out, lse in results:
            assert_dense_prefill(to_float(out), lse, to_float(want_out)[tokens], want_lse[:, tokens])


@pytest.mark.parametrize("size", range(1, 9))
def test_sparse_prefill(rng, size):
    """Each rank has its tokens' K, gathers all tokens' K, and attends with its queries."""
    q, kv = rng.standard_normal((150, 2, 576)).astype(BF16), rng.standard_normal((150, 576)).astype(BF16)
    indices = rng.integers(-1, 150, (150, 12)).astype(np.int32)
    indices = np.where(indices <= np.arange(150)[:, None], indices, -1).astype(np.int32)
    want = cumla.sparse_mla_prefill(q, kv, indices, backend="reference")
    shards = shard_queries(STARTS, size)

    def on(comm):
        own = shards.own(comm.rank)
        rows = shards.gather(comm, kv[own])
        assert rows.tobytes() == kv.tobytes()
        return own, cumla.sparse_mla_prefill(q[own], rows, indices[own])

    for own, (out, top, lse) in run_threads(size, on):
        assert_prefill(to_float(out), top, lse, to_float(want[0])[own], want[1][own], want[2][own])


def test_rows_of_others_are_refused():
    shards = shard_queries(STARTS, 2)

    def on(comm):
        with pytest.raises(ValueError, match="rows: got 3, expected"):
            shards.gather(comm, np.zeros((3, 4), np.float32))
        return True

    assert run_threads(2, on) == [True, True]
