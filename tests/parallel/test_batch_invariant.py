"""Batch-invariant layers on ranks: with the same ranks, a token's bits in any step of its request."""

import numpy as np
import pytest

import cumla
from cumla.layers import MLACommonImpl, SparseMLALayer
from cumla.parallel import RankError, ShardedMLALayer, ShardedSparseMLALayer, run_threads
from support.lab import BF16
from support.operations import assert_same_bits
from support.ranked import PAGE, Ranked, sparse_arguments

SECONDS = 60
TOKENS = 70
STEPS = [[(0, 0, 30)], [(0, 30, 1), (1, 0, 17)], [(1, 17, 2), (0, 31, 38)], [(0, 69, 1), (1, 19, 51)]]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_any_schedule_gives_the_same_bits(case, size):
    """A whole prompt alone; then the same tokens of two requests in chunks and decodes, prefills beside decodes."""

    def on(comm):
        whole = Ranked(case, comm, 2, batch_invariant=True)
        want = whole.sharded.step(**whole.batch([(0, 0, TOKENS)]))
        run, parts = Ranked(case, comm, 2, batch_invariant=True, speculative=2), {0: [], 1: []}
        for step in STEPS:
            out = run.sharded.step(**run.batch(step))
            ends = np.cumsum([count for *_, count in step])[:-1]
            for (request, _, _), own in zip(step, np.split(out, ends), strict=True):
                parts[request].append(own)
        return want, [np.concatenate(parts[request]) for request in parts]

    for want, found in run_threads(size, on, SECONDS):
        for got in found:
            assert_same_bits(got, want)


@pytest.mark.parametrize("split_heads", [False, True], ids=["all-heads", "own-heads"])
def test_dense_tokens_alone_and_in_a_step(rng, split_heads):
    tokens, heads, pages = 23, 4, 9
    q = rng.standard_normal((tokens, heads, 192)).astype(BF16)
    rows, weight = rng.standard_normal((tokens, 576)).astype(BF16), rng.standard_normal((heads * 256, 512)) / 20
    tables = rng.integers(0, pages, (2, tokens, 5)).astype(np.int32)
    lens = rng.integers(0, 5 * PAGE + 1, (2, tokens)).astype(np.int32)
    caches = rng.standard_normal((2, pages, PAGE, 576)).astype(BF16)

    def on(comm):
        own = slice(comm.rank * 2, comm.rank * 2 + 2) if split_heads else slice(None)
        of_rank = weight.reshape(heads, 256, 512)[own].reshape(-1, 512).astype(BF16)
        layer = MLACommonImpl(len(of_rank) // 256, 576, 0.1, kv_b_proj=of_rank, batch_invariant=True)
        layer.process_weights_after_loading()
        sharded = ShardedMLALayer(layer, comm, split_heads=split_heads)

        def step(some):
            return sharded.forward(
                np.ascontiguousarray(q[some, own]), rows[some, :512], rows[some, 512:], caches[comm.rank],
                tables[comm.rank, some], lens[comm.rank, some], np.full(len(q[some]), -1),
            )  # fmt: skip

        together = step(slice(None))
        return together, [step(slice(token, token + 1))[0] for token in range(tokens)]

    for together, alone in run_threads(2, on, SECONDS):
        assert_same_bits(np.stack(alone), together)


def test_metadata_of_the_other_mode_is_refused_before_anything_is_written(rng):
    arguments = sparse_arguments(rng)
    before = [np.array(arguments["swa_cache"]), np.array(arguments["compressed"].cache)]

    def on(comm):
        layer = SparseMLALayer(4, 4, np.zeros(8, np.float32), batch_invariant=True)
        ShardedSparseMLALayer(layer, comm).step(**arguments)

    with pytest.raises(RankError) as error:
        run_threads(1, on, SECONDS)
    message = "metadata: got batch_invariant=False in the builder's config, expected True, as the layer has"
    assert message in str(error.value.__cause__)
    for array, want in zip((arguments["swa_cache"], arguments["compressed"].cache), before, strict=True):
        np.testing.assert_array_equal(array, want)


def test_the_merge_by_heads_gives_the_bits_of_the_merge_of_everything(rng, monkeypatch):
    """The number of tokens decides how ranks exchange results; no token's bits depend on it."""
    from cumla.parallel import context

    layout = cumla.DSV4_FP8
    q = rng.standard_normal((5, 4, 512)).astype(BF16)
    caches = [layout.allocate(3, 64) for _ in range(2)]
    for cache in caches:
        keys = rng.standard_normal((192, 512)).astype(BF16)
        cumla.quantize_and_insert_k_cache(keys, cache, np.arange(192), layout=layout)
    indices, lens = rng.integers(0, 192, (2, 5, 100)).astype(np.int32), rng.integers(0, 101, (2, 5)).astype(np.int32)
    found = []
    for by_heads in (False, True):
        monkeypatch.setattr(context, "is_merged_by_heads", lambda *sizes, by_heads=by_heads: by_heads)

        def on(comm):
            attention = context.ContextAttention(comm)
            return attention.sparse_decode(
                q, caches[comm.rank], indices[comm.rank], lens[comm.rank], layout=layout, batch_invariant=True
            )  # fmt: skip

        found.append(run_threads(2, on, SECONDS))
    for ours, others in zip(*found, strict=True):
        for got, want in zip(ours, others, strict=True):
            assert_same_bits(got, want)
