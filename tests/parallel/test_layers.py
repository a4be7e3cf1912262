"""Layers on several ranks: golden outputs from any number of ranks, and errors before anything is written."""

import dataclasses

import numpy as np
import pytest

import cumla
from cumla.layers import MLACommonImpl
from cumla.layers.sparse import not_observed
from cumla.metadata.builder import ServingConfig
from cumla.metadata.sparse_swa import DeepseekSparseSWAMetadataBuilder
from cumla.parallel import (
    RankRows,
    Shard,
    ShardedCompressedCache,
    ShardedDeepseekV4Attention,
    ShardedDeepseekV32Attention,
    ShardedMLALayer,
    ShardedSparseMLALayer,
    local_seq_lens,
    local_slot_mapping,
    run_threads,
)
from support.backends import only
from support.batch_kinds import KINDS, padded
from support.lab import BF16
from support.models import GoldenLayer, PagedRequests, V4Layer, V32Layer, relative_rms

SECONDS = 60
PAGE = 3  # rows of a rank's page, which need not divide anything
INTERLEAVE = 2


class Ranked:
    """A golden layer whose compressed or latent rows are sharded across ranks."""

    def __init__(self, case, comm, requests=1, backend="cpu"):
        golden = GoldenLayer(case)
        self.is_v32 = golden.record["model"] == "v32"
        self.whole = (V32Layer if self.is_v32 else V4Layer)(golden, requests, backend=backend)
        self.layer = self.whole.layer
        self.ratio = 1 if self.is_v32 else self.layer.ratio
        self.shard = Shard(comm.rank, comm.size, INTERLEAVE)
        sharded = ShardedDeepseekV32Attention if self.is_v32 else ShardedDeepseekV4Attention
        self.sharded = sharded(self.layer, comm)
        self.name = "rows" if self.is_v32 else "compressed"
        self.caches = self.whole.caches
        if self.is_v32 or self.ratio > 1:
            columns = -(-golden.tokens // self.ratio // (PAGE * comm.size)) + 1
            pages = np.random.default_rng(comm.rank).permutation(requests * columns).astype(np.int32)
            self.table = pages.reshape(requests, columns)
            rows = np.zeros((len(pages), PAGE, getattr(self.caches, self.name).shape[2]), np.float32)
            self.caches = dataclasses.replace(self.caches, **{self.name: rows})

    def arguments(self, first, count):
        """Arguments of `step`, for tokens of the one request."""
        golden = self.whole.golden
        topk = None if golden.topk is None else golden.topk[first : first + count]
        return self.batch([(0, first, count)]) | {"topk_indices": topk}

    def batch(self, scheduled, padding=0):
        """The same for (request, first position, tokens), which select for themselves; `padding` tokens are NaN."""
        golden, whole = self.whole.golden, self.whole
        batch, tables = whole.paged.batch(scheduled)
        tokens, batch, rows = batch.num_actual_tokens, padded(batch, padding), None
        hidden = np.full((tokens + padding, golden.hidden.shape[1]), np.nan, np.float32)
        spans = [golden.hidden[first : first + count] for _, first, count in scheduled]
        hidden[:tokens] = np.concatenate([hidden[:0], *spans])
        if self.is_v32 or self.ratio > 1:
            table = self.table[[request for request, _, _ in scheduled]]
            slots = local_slot_mapping(
                batch.query_start_loc, batch.seq_lens, table, PAGE, self.shard, num_tokens=len(hidden),
                compress_ratio=self.ratio, backend=self.layer.backend,
            )  # fmt: skip
            rows = RankRows(self.shard, table, slots)
        return {
            "hidden_states": hidden, "layer_caches": self.caches, "metadata": whole.build(batch, tables), "rows": rows
        }  # fmt: skip

    def run(self, splits):
        parts, first = [], 0
        for count in splits:
            parts.append(self.sharded.step(**self.arguments(first, count)))
            first += count
        return np.concatenate(parts)


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
@pytest.mark.parametrize("case", [1, 3, 8, 13])
def test_every_kind_of_batch(case, kind):
    """Each token's output is transformers', on both ranks, whatever is padding."""
    kind, golden = KINDS[kind], GoldenLayer(case)

    def on(comm):
        ranked = Ranked(case, comm, 4)
        builder = ranked.whole.builder
        for request, first, _ in kind.spans:
            ranked.sharded.step(**ranked.batch([(request, 0, first)]))
        config = dataclasses.replace(builder.config, num_speculative_tokens=kind.drafts)
        ranked.whole.builder = type(builder)(config, ranked.layer.backend)
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
    13: ["project", "insert", "select", *ATTENDS["decode"], "output"],
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


def changed(arguments, name, value):
    """Arguments with one of them, or a field of one ("rows.shard"), replaced."""
    name, _, field = name.partition(".")
    return arguments | {name: dataclasses.replace(arguments[name], **{field: value}) if field else value}


WHOLE = [
    ("rows", None, "rows: got None"),
    ("rows.shard", Shard(0, 2), "rows.shard: got rank 0 of 2, expected the communicator's, rank 0 of 1"),
    ("rows.shard", None, "rows.shard: got None"),
    ("rows.block_table", np.zeros((1, 2)), "rows.block_table: got dtype float64"),
    ("rows.block_table", np.zeros((0, 2), np.int32), "rows.block_table: got 0 requests"),
    ("rows.block_table", np.zeros((1, 4), np.int32), "rows.block_table: got 4 columns, pages of 3 rows each"),
    ("rows.slot_mapping", np.zeros(3, np.int64), "rows.slot_mapping: got 3 tokens"),
    ("rows.slot_mapping", np.zeros(61, np.int64), "rows.slot_mapping: got 61 slots"),
    ("layer_caches", None, "layer_caches: got NoneType"),
    ("topk_indices", np.zeros((60, 4)), "topk_indices: got dtype float64"),
    ("metadata", None, "metadata: got NoneType"),
]


@pytest.mark.parametrize(("name", "value", "says"), WHOLE)
@pytest.mark.parametrize("case", [8, 13])
def test_whole_layers_name_what_is_wrong_before_they_write(case, name, value, says):
    def on(comm):
        ranked = Ranked(case, comm)
        arguments = ranked.arguments(0, 60)
        arrays = [x for x in vars(ranked.caches).values() if x is not None]
        before = [x.copy() for x in arrays]
        with pytest.raises((TypeError, ValueError), match=says):
            ranked.sharded.step(**changed(arguments, name, value))
        for array, old in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, old)

    run_threads(1, on, SECONDS)


@pytest.mark.parametrize(
    ("case", "rows", "says"),
    [
        (2, RankRows(Shard(0, 1), np.zeros((1, 9), np.int32), np.zeros(9, np.int64)), "got RankRows, expected None"),
        (3, None, "got NoneType, expected RankRows for ratio 128"),
        (8, None, "got NoneType, expected RankRows for ratio 4"),
    ],
)
def test_rows_are_of_compressed_layers(case, rows, says):
    def on(comm):
        ranked = Ranked(case, comm)
        with pytest.raises(ValueError, match=f"rows: {says}"):
            ranked.sharded.step(**ranked.batch([(0, 0, 9)]) | {"rows": rows})

    run_threads(1, on, SECONDS)


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
        narrow = changed(arguments, "rows.block_table", ranked.table[:, : pages - 1])
        with pytest.raises(ValueError, match=f"rows.block_table: got {pages - 1} columns, .* at least {pages} for"):
            ranked.sharded.step(**narrow)
        name = "compressed" if case == 8 else "rows"
        few = getattr(arguments["layer_caches"], name)[: pages - 1]
        with pytest.raises(ValueError, match=f"layer_caches.{name}: got {pages - 1} pages, expected at least {pages}"):
            ranked.sharded.step(**changed(arguments, f"layer_caches.{name}", few))
        return ranked.sharded.step(**changed(arguments, "rows.block_table", ranked.table[:, :pages]))

    want = GoldenLayer(case).out[:61]
    for got in run_threads(3, on, SECONDS):
        assert relative_rms(got, want) < 1e-5


def sparse_arguments(rng, tokens=5, page=64):
    config = ServingConfig(
        compress_ratios=(4,), block_size=page, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256
    )
    paged = PagedRequests(1, 64, {"window": page})
    batch, _ = paged.batch([(0, 0, tokens)])
    compressed = ShardedCompressedCache(
        cumla.DSV4_FP8.allocate(4, PAGE), np.arange(4, dtype=np.int32)[None], Shard(0, 1),
        rng.standard_normal((1, 512)).astype(BF16), np.array([0]), np.zeros((tokens, 4), np.int32),
    )  # fmt: skip
    return {
        "q": rng.standard_normal((tokens, 8, 512)).astype(BF16), "k": rng.standard_normal((tokens, 512)).astype(BF16),
        "swa_cache": cumla.DSV4_FP8.allocate(64 // page + 1, page),
        "metadata": DeepseekSparseSWAMetadataBuilder(config).build(0, batch), "compressed": compressed,
    }  # fmt: skip


SPARSE = [
    ("compressed.topk_indices", np.zeros((5, 4)), "compressed.topk_indices: got dtype float64"),
    ("compressed.topk_indices", None, "compressed.topk_indices: got None"),
    ("compressed.cache", cumla.DSV4_FP8.allocate(1, PAGE)[:0], "compressed.cache: got 0 pages, expected at least 1"),
    ("swa_cache", cumla.DSV4_FP8.allocate(1, 64)[:0], "swa_cache: got 0 pages, expected at least 1"),
    ("compressed.block_table", np.zeros(3, np.int32), "compressed.block_table: got shape"),
    ("compressed.block_table", np.zeros((1, 0), np.int32), "compressed.block_table: got 0 columns"),
    ("compressed.slot_mapping", np.zeros(2, np.int64), "compressed.slot_mapping: got 2 entries, expected 1"),
    ("compressed.k", np.zeros((2, 512), BF16), "compressed.slot_mapping: got 1 entries, expected 2"),
    ("compressed.shard", Shard(1, 2), "compressed.shard: got rank 1"),
    ("compressed.slot_mapping", None, "compressed.slot_mapping: got"),
    ("compressed", None, "compressed: got None, expected rows"),
    ("q", np.zeros((5, 8, 500), BF16), "q: got shape"),
    ("q", np.zeros((5, 8, 512), np.float16), "q: got dtype float16"),
    ("out", np.zeros((5, 8, 512), np.float32), "out: got dtype float32"),
    ("metadata", 5, "metadata: got 5 of type int"),
]


@pytest.mark.parametrize(("name", "value", "says"), SPARSE)
def test_sparse_layers_name_what_is_wrong_before_they_write(name, value, says, rng):
    def on(comm):
        arguments = sparse_arguments(rng)
        layer = ShardedSparseMLALayer(cumla.layers.SparseMLALayer(4, 4, np.zeros(8, np.float32)), comm)
        with pytest.raises((TypeError, ValueError), match=says):
            layer.step(**changed(arguments, name, value))
        assert not arguments["swa_cache"].any()
        assert not arguments["compressed"].cache.any()
        layer.step(**arguments)

    run_threads(1, on, SECONDS)


def test_raw_pages_of_the_window_are_its_cache(rng):
    """Window pages of any size: the metadata has the page size."""

    def on(comm):
        layer = ShardedSparseMLALayer(cumla.layers.SparseMLALayer(4, 4, np.zeros(8, np.float32)), comm)
        arguments = sparse_arguments(rng, page=16)
        want = layer.step(**arguments)
        pages = np.zeros((len(arguments["swa_cache"]), cumla.DSV4_FP8.page_bytes(16)), np.uint8)
        got = layer.step(**changed(arguments, "swa_cache", pages))
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))

    run_threads(1, on, SECONDS)


def dense_arguments(rng, layer, tokens=3):
    def rows(*shape):
        return rng.standard_normal(shape).astype(BF16)

    return {
        "q": rows(tokens, 2, 192), "k_c_normed": rows(tokens, 512), "k_pe": rows(tokens, 64),
        "kv_cache": np.zeros((2, PAGE, 576), BF16), "block_table": np.zeros((tokens, 2), np.int32),
        "cache_seqlens": np.arange(1, tokens + 1, dtype=np.int32), "slot_mapping": np.arange(tokens),
    }  # fmt: skip


DENSE = [
    ("block_table", np.zeros((3, 2)), "block_table: got dtype float64"),
    ("block_table", np.zeros((2, 2), np.int32), "block_table: got 2 rows, expected at least 3"),
    ("cache_seqlens", np.zeros(3, np.int64), "cache_seqlens: got dtype int64"),
    ("cache_seqlens", None, "cache_seqlens: got NoneType"),
    ("kv_cache", np.zeros((0, PAGE, 576), BF16), "kv_cache: got 0 pages, expected at least 1"),
    ("slot_mapping", np.zeros(4, np.int64), "slot_mapping: got 4 slots"),
    ("output", np.zeros((3, 256), np.float32), "output: got dtype float32"),
    ("output", np.zeros((3, 255), BF16), "output: got shape"),
    ("max_seqlen", -1, "max_seqlen: got -1"),
    ("q", np.zeros((3, 2, 192), np.float32), "q: got dtype float32, expected bfloat16"),
    ("k_pe", np.zeros((2, 64), BF16), "k_pe: got shape"),
]


@pytest.mark.parametrize(("name", "value", "says"), DENSE)
def test_dense_layers_name_what_is_wrong_before_they_write(name, value, says, rng):
    def on(comm):
        weight = rng.standard_normal((2 * 256, 512)).astype(BF16)
        layer = MLACommonImpl(2, 576, 0.1, kv_b_proj=weight)
        arguments = dense_arguments(rng, layer)
        sharded = ShardedMLALayer(layer, comm)
        with pytest.raises(ValueError, match="layer: not processed"):
            sharded.forward(**arguments)
        layer.process_weights_after_loading(BF16)
        with pytest.raises((TypeError, ValueError), match=says):
            sharded.forward(**changed(arguments, name, value))
        assert not arguments["kv_cache"].astype(np.float32).any()
        sharded.forward(**arguments)

    run_threads(1, on, SECONDS)
