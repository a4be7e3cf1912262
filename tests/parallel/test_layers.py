"""Layers on several ranks: golden outputs from any number of ranks, and errors before anything is written."""

import dataclasses

import numpy as np
import pytest

import cumla
from cumla.layers import MLACommonImpl
from cumla.layers.sparse import not_observed
from cumla.parallel import (
    ShardedMLALayer,
    ShardedSparseMLALayer,
    local_seq_lens,
    run_threads,
)
from support.backends import only
from support.batch_kinds import KINDS
from support.lab import BF16
from support.models import GoldenLayer, V4Layer, V32Layer, relative_rms
from support.ranked import PAGE, Ranked, dense_arguments, sparse_arguments
from support.refused import replaced

SECONDS = 60
CASES = [1, 3, 8, 13]  # of layers


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("case", "splits"), [(1, [70, 1, 63]), (3, [129, 1, 130]), (8, [65, 1, 3, 61]), (13, [64, 1, 65])]
)
def test_whole_layers_give_what_transformers_gives(case, splits, size):
    want = GoldenLayer(case).out[: sum(splits)]
    for got in run_threads(size, lambda comm: Ranked(case, comm).run(splits), SECONDS):
        assert relative_rms(got, want) < 1e-5


STEPS = ([(0, 0, 70)], [(0, 70, 1), (1, 0, 9)], [(0, 71, 1), (1, 9, 62)], [(1, 71, 1), (0, 72, 59)])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", [8, 13])
def test_ranks_select_what_one_device_selects(case, size):
    """With an indexer whose keys are replicated, for decodes and prefills of two requests in a step."""
    golden = GoldenLayer(case)

    def on(comm):
        ranked, parts, chosen = Ranked(case, comm, 2), {0: [], 1: []}, []
        select = ranked.layer.indexer.select
        ranked.layer.indexer.select = lambda *arguments: chosen.append(select(*arguments).copy()) or chosen[-1]
        for scheduled in STEPS:
            ends = np.cumsum([count for *_, count in scheduled])[:-1]
            out = ranked.sharded.step(**ranked.batch(scheduled))
            for (request, first, count), rows, own in zip(
                scheduled, np.split(chosen.pop(), ends), np.split(out, ends), strict=True
            ):
                for row, want, token in zip(
                    rows, golden.topk[first : first + count], range(first, first + count), strict=False
                ):
                    seen = token + 1 if ranked.is_v32 else (token + 1) // 4
                    assert set(row[row >= 0]) == set(want[(want >= 0) & (want < seen)])
                parts[request].append(own)
        return [np.concatenate(parts[request]) for request in parts]

    for outs in run_threads(size, on, SECONDS):
        for out in outs:
            assert relative_rms(out, golden.out[: len(out)]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough(when=lambda x: (list(KINDS).index(x.get("kind")) + CASES.index(x.get("case"))) % 2)
def test_every_kind_of_batch(case, kind):
    """Each token's output is transformers', on both ranks, whatever is padding."""
    kind, golden = KINDS[kind], GoldenLayer(case)

    def on(comm):
        ranked = Ranked(case, comm, 4)
        builder = ranked.whole.builder
        for request, first, _ in kind.spans:
            ranked.sharded.step(**ranked.batch([(request, 0, first)]))
        config = dataclasses.replace(builder.config, num_speculative_tokens=kind.drafts)
        ranked.whole.builder = type(builder)(builder.specs, config, ranked.layer.backend)
        return ranked.sharded.step(**ranked.batch(kind.scheduled, kind.padding))

    tokens = sum(kind.counts)
    want = np.concatenate([golden.out[:0], *(golden.out[first : first + count] for _, first, count in kind.spans)])
    for out in run_threads(2, on, SECONDS):
        assert len(out) == tokens + kind.padding
        if tokens:
            assert relative_rms(out[:tokens], want) < 1e-5


@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_every_operation_on_ranks_is_on_the_layers_backend(case):
    with only("reference"):
        for out in run_threads(2, lambda comm: Ranked(case, comm, 1, "reference").run([9, 1]), SECONDS):
            assert relative_rms(out, GoldenLayer(case).out[:10]) < 1e-5


ATTENDS = {kind: ["map", kind, "exchange", "merge"] for kind in ("decode", "prefill")}
BOTH = ["insert", *ATTENDS["decode"], *ATTENDS["prefill"], "output"]
PARTS = {
    2: ["project", "project", "insert", *BOTH],
    3: ["compress", "project", "project", "insert", *BOTH],
    8: ["compress", "project", "select", "select", "project", "insert", "select", *BOTH],
    13: [
        "select",
        "project",
        "insert",
        "project",
        "select",
        "project",
        "insert",
        "select",
        *ATTENDS["decode"],
        "output",
    ],
}


@pytest.mark.parametrize("case", PARTS)
def test_an_observer_is_called_for_each_part_of_a_step_on_ranks(case):
    """The order of events: attention of V4's decodes and of its prefills, each with its exchange and its merge."""

    def on(comm):
        ranked, called = Ranked(case, comm, 2), []
        ranked.sharded.step(**ranked.batch([(0, 0, 9)]))
        batch = ranked.batch([(0, 9, 1), (1, 0, 5)])
        ranked.sharded.step(**batch, observe=lambda part: called.append(part) or not_observed(part))
        return called

    assert run_threads(2, on, SECONDS) == [PARTS[case]] * 2


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", [8, 13])
def test_rows_that_a_token_may_not_see_are_left_out_on_ranks(case, size, rng):
    """A selection of any rows of the request, later ones among them, gives the result of one device."""
    tokens = 140
    rows = tokens if case == 13 else tokens // 4
    chosen = np.stack([rng.permutation(np.arange(-3, rows + 3))[:16] for _ in range(tokens)]).clip(-1).astype(np.int32)
    chosen[:, 0] = np.arange(tokens) + 1 if case == 13 else (np.arange(tokens) + 1) // 4  # the next row there will be
    golden = GoldenLayer(case)
    one = (V32Layer if case == 13 else V4Layer)(golden)
    spans = [slice(0, tokens - 1), slice(tokens - 1, tokens)]

    def one_step(span):
        batch, tables = one.paged.batch([(0, span.start, span.stop - span.start)])
        return one.layer.step(golden.hidden[span], one.caches, one.build(batch, tables), topk_indices=chosen[span])

    def on(comm):
        ranked = Ranked(case, comm)
        return [
            ranked.sharded.step(**ranked.batch([(0, span.start, span.stop - span.start)]), topk_indices=chosen[span])
            for span in spans
        ]

    want = [one_step(span) for span in spans]
    for got in run_threads(size, on, SECONDS):
        for out, expected in zip(got, want, strict=True):
            assert relative_rms(out, expected) < 1e-5


@pytest.mark.parametrize("case", [8, 13])
def test_sequences_that_rope_does_not_reach_are_refused_on_ranks(case):
    def on(comm):
        ranked = Ranked(case, comm)
        ranked.layer.cos_sin = ranked.layer.cos_sin[:50]
        with pytest.raises(ValueError, match="metadata: got sequences of up to 60 tokens, expected at most the 50"):
            ranked.sharded.step(**ranked.arguments(0, 60))

    run_threads(1, on, SECONDS)


@pytest.mark.parametrize("case", [8, 13])
def test_a_rank_needs_the_pages_of_its_rows_and_no_more(case):
    """Ranks have different numbers of rows, and separate memory requirements."""

    def on(comm):
        ranked = Ranked(case, comm)
        arguments = ranked.arguments(0, 61)
        length = np.array([61 // ranked.ratio], np.int32)
        pages = -(-int(local_seq_lens(length, ranked.shard)[0]) // PAGE)
        narrow = replaced(arguments, "rows.block_table", ranked.table[:, : pages - 1])
        with pytest.raises(ValueError, match=f"rows.block_table: got {pages - 1} columns, .* at least {pages} for"):
            ranked.sharded.step(**narrow)
        name = "compressed" if case == 8 else "rows"
        few = getattr(arguments["layer_caches"], name)[: pages - 1]
        with pytest.raises(ValueError, match=f"layer_caches.{name}: got {pages - 1} pages, expected at least {pages}"):
            ranked.sharded.step(**replaced(arguments, f"layer_caches.{name}", few))
        return ranked.sharded.step(**replaced(arguments, "rows.block_table", ranked.table[:, :pages]))

    want = GoldenLayer(case).out[:61]
    for got in run_threads(3, on, SECONDS):
        assert relative_rms(got, want) < 1e-5


def test_raw_pages_of_the_window_are_its_cache(rng):
    """Window pages of any size: the metadata has the page size."""

    def on(comm):
        layer = ShardedSparseMLALayer(cumla.layers.SparseMLALayer(4, 4, np.zeros(8, np.float32)), comm)
        arguments = sparse_arguments(rng, page=16)
        want = layer.step(**arguments)
        pages = np.zeros((len(arguments["swa_cache"]), cumla.DSV4_FP8.page_bytes(16)), np.uint8)
        got = layer.step(**replaced(arguments, "swa_cache", pages))
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))

    run_threads(1, on, SECONDS)


def test_weights_of_a_dense_layer_are_processed_first(rng):
    layer = MLACommonImpl(2, 576, 0.1, kv_b_proj=rng.standard_normal((2 * 256, 512)).astype(BF16))

    def on(comm):
        with pytest.raises(ValueError, match="layer: not processed"):
            ShardedMLALayer(layer, comm).forward(**dense_arguments(rng, layer))

    run_threads(1, on, SECONDS)
