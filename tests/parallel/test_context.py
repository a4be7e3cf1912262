"""Attention over a sharded context gives the result of one device, for every number of ranks."""

import functools

import numpy as np
import pytest

import cumla
from cumla.parallel import (
    Agreement,
    ContextAttention,
    MemoryStore,
    ThreadCommunicator,
    local_window,
    run_threads,
)
from cumla.parallel.context import is_merged_by_heads
from support import ranks
from support.attention import make_cache
from support.ranks import Context

SIZES = range(1, 9)
SECONDS = 30
BLOCK = ranks.BLOCK


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["everything", "by-heads", "own-heads"])
def test_dense(rng, size, way, monkeypatch):
    split_heads = way == "own-heads"
    monkeypatch.setattr(cumla.parallel.context, "WORTH_A_CALL", -1 if way == "by-heads" else 1 << 30)
    heads = 5 if way == "everything" else size
    context = Context.make(rng, [37, 0, 5, 64, 1], heads, 576, s_q=2)
    sink = rng.standard_normal(heads).astype(np.float32)
    want = ranks.dense_on_one(context, sink)
    got = run_threads(
        size, lambda comm: ranks.dense_on(comm, context, 1 + size % 3, split_heads, sink, max_seqlen=70), SECONDS
    )
    ranks.check(got, want, split_heads, size)


@pytest.mark.parametrize(("size", "heads"), [(2, 3), (3, 4), (3, 2)])
def test_heads_that_ranks_cannot_share_evenly_are_merged_on_all(rng, size, heads, monkeypatch):
    monkeypatch.setattr(cumla.parallel.context, "WORTH_A_CALL", -1)
    context = Context.make(rng, [20, 9], heads, 576)
    want = ranks.dense_on_one(context)
    got = run_threads(size, lambda comm: ranks.dense_on(comm, context, 1), SECONDS)
    ranks.check(got, want, False, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split_heads", [False, True], ids=["all-heads", "own-heads"])
def test_selected_rows(rng, size, split_heads):
    heads = 2 * size if split_heads else 4
    context = Context.make(rng, [50, 3, 90], heads, 576)
    selected = rng.integers(-5, 95, (3, 40)).astype(np.int32)
    selected[1] = -1  # a query that sees nothing
    # Pages after a request's rows hold no tokens: absent tokens are in no cache.
    selected = np.where(selected < context.lens[context.token_to_req][:, None], selected, -1).astype(np.int32)
    want = ranks.sparse_on_one(context, selected, cumla.V32_FP8)
    got = run_threads(
        size, lambda comm: ranks.sparse_on(comm, context, selected, cumla.V32_FP8, 2, None, split_heads), SECONDS
    )
    ranks.check(got, want, split_heads, size)


@pytest.mark.parametrize("size", SIZES)
def test_compressed_rows_beside_a_window_that_every_rank_has(rng, size):
    """With a sink, which counts once."""
    context = Context.make(rng, [40, 17], 8, 512)
    window = ranks.Window(
        make_cache(rng, cumla.DSV4_FP8, 6, 4),
        rng.integers(0, 24, (2, 10)).astype(np.int32),
        np.array([10, 3], np.int32),
    )
    selected = np.stack([rng.permutation(40)[:17], rng.permutation(17)]).astype(np.int32)
    sink = rng.standard_normal(8).astype(np.float32)
    want = ranks.sparse_on_one(context, selected, cumla.DSV4_FP8, window, sink)
    got = run_threads(
        size,
        lambda comm: ranks.sparse_on(comm, context, selected, cumla.DSV4_FP8, BLOCK, window, False, sink),
        SECONDS,
    )
    ranks.check(got, want, False, size)


@pytest.mark.parametrize("split_heads", [False, True], ids=["all-heads", "own-heads"])
def test_one_rank_on_any_backend(lab, rng, split_heads):
    """The path of device arrays, emulated; with more ranks on a device in test_device.py."""
    context = Context.make(rng, [11, 6], 3, 576)
    selected = np.stack([rng.permutation(11)[:6], rng.permutation(6)]).astype(np.int32)
    for run, want in (
        (functools.partial(ranks.dense_on, context=context, interleave=1), ranks.dense_on_one(context)),
        (
            functools.partial(ranks.sparse_on, context=context, selected=selected, layout=cumla.V32_FP8, interleave=1),
            ranks.sparse_on_one(context, selected, cumla.V32_FP8),
        ),
    ):
        comm = ThreadCommunicator(Agreement(MemoryStore(), 0, 1))
        out, lse = run(comm, split_heads=split_heads, put=lab.put, backend=lab.backend)
        ranks.check([(lab.get(out), lab.get(lse))], want, split_heads, 1)


@pytest.mark.parametrize("given", [lambda x: x, lambda x: x[:, None]], ids=["[T, W]", "[T, 1, W]"])
@pytest.mark.parametrize("width", [1, 10])
def test_windows_are_sharded_once(width, given):
    indices, lens = np.arange(3 * width, dtype=np.int32).reshape(3, width), np.array([width, width // 2, 0], np.int32)
    for size in SIZES:
        seen = [[], [], []]
        for rank in range(size):
            columns, counts = local_window(given(indices), lens, rank, size)
            assert columns.base is not None  # no copy
            for row, count, entries in zip(columns, counts, seen, strict=True):
                entries += row[:count].tolist()
        assert seen == [row[:count].tolist() for row, count in zip(indices, lens, strict=True)]


@pytest.mark.parametrize("shape", [(3,), (3, 2, 10), (3, 0, 10), (3, 1, 10, 1)])
def test_windows_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"swa_indices: got shape .*, expected \[T, W\] or \[T, 1, W\]"):
        local_window(np.zeros(shape, np.int32), np.zeros(3, np.int32), 0, 2)


def test_outputs_and_queries_in_place(rng):
    """q written to `queries` is the gathered q; results are written to the given outputs, and are the same."""
    context = Context.make(rng, [20, 9], 4, 576)
    tokens = len(context.seen)

    def on(comm):
        first = ranks.dense_on(comm, context, 1, True)
        out, lse = np.empty((tokens, 2, 512), context.q.dtype), np.empty((tokens, 2), np.float32)
        again = ranks.dense_on(comm, context, 1, True, out=out, lse=lse)
        assert again[0] is out
        assert again[1] is lse
        attention = ContextAttention(comm, split_heads=True)
        q = attention.queries(tokens, 2, 576, context.q)
        q[...] = context.q[:, context.own_heads(comm)]
        assert np.shares_memory(q, attention.queries(tokens, 2, 576, context.q))
        assert attention._gathered(q).tobytes() == context.q.tobytes()
        return np.array_equal(out, first[0]) and np.array_equal(lse, first[1])

    assert run_threads(2, on, SECONDS) == [True, True]


def test_exchanges_that_save_less_than_they_cost_are_not_made():
    """Ranks merge some heads each where everything to all would send more than 4 MiB more."""
    for size, heads, bytes_, merged in (
        (3, 3, 6 << 20, False), (3, 3, (6 << 20) + 3, True), (3, 4, 1 << 30, False), (2, 2, 1 << 30, False),
        (4, 8, 1 << 30, True),
    ):  # fmt: skip
        assert is_merged_by_heads(size, heads, bytes_) == merged


def test_a_plan_that_is_given_is_made(here, rng):
    """By a device's kernels, with one rank; the instance's own where none is given."""
    context = Context.make(rng, [11, 6], 3, 576)
    selected = np.stack([rng.permutation(11)[:6], rng.permutation(6)]).astype(np.int32)
    comm, plan = ThreadCommunicator(Agreement(MemoryStore(), 0, 1)), cumla.DecodePlan()
    for _ in range(2):
        ranks.sparse_on(comm, context, selected, cumla.V32_FP8, 1, put=here.put, backend=here.backend, plan=plan)
        assert plan.made_for is not None
