"""Every layer accepts every kind of batch: a token's output is the same as alone, and padding changes nothing."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest

import cumla
from cumla.layers import SparseMLALayer
from cumla.layers.selection import IndexerInputs
from cumla.layers.sparse import CompressedCache
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from cumla.models.step import StepBuilder, StepIndexerMetadataBuilder, V41IndexerMetadataBuilder
from support.backends import only
from support.batch_kinds import CAPACITY, KINDS, padded
from support.bounds import assert_within
from support.lab import BF16, Lab, to_float
from support.models import GoldenLayer, PagedRequests, V4Layer, V32Layer, relative_rms
from support.v41_stack import Stack

HEADS, INDEX_HEADS, TOPK, WINDOW, BLOCK, COMPRESSED = 3, 32, 6, 16, 8, 128
LONGEST = 48
RATIOS = {"window": 0, "c1a": 1, "c2a": 2, "c4a": 4, "c128a": 128}
LAYERS = [
    ("window", None),
    ("c128a", None),
    *(("c4a", builder) for builder in (DeepseekV32IndexerMetadataBuilder, StepIndexerMetadataBuilder)),
    *((name, V41IndexerMetadataBuilder) for name in ("c1a", "c2a")),
    ("c1a", DeepseekV32IndexerMetadataBuilder),
]


class Served:
    """A layer over caches with all rows of CAPACITY requests; queries by request and position."""

    def __init__(self, lab, name, indexer):
        rng = np.random.default_rng(3)
        self.lab, self.ratio, self.indexer, self.known = lab, RATIOS[name], indexer, {}
        self.paged = PagedRequests(CAPACITY, LONGEST, {"window": BLOCK}, put=lab.put)
        layout = cumla.DSV41_FP8 if name in ("c1a", "c2a") else cumla.DSV4_FP8
        self.layer = SparseMLALayer(self.ratio, TOPK, layout=layout)
        rows = rng.standard_normal((CAPACITY, LONGEST, 512)).astype(BF16)
        self.largest = np.abs(to_float(rows)).max()
        self.window = lab.put(layout.allocate(self.paged.num_blocks["window"], BLOCK))
        self.insert(rows, self.window, BLOCK, self.paged.tables["window"], layout)
        self.q = rng.standard_normal((CAPACITY, LONGEST, HEADS, 512)).astype(BF16)
        if not self.ratio:
            return
        page = COMPRESSED // self.ratio
        self.table = rng.permutation(CAPACITY).astype(np.int32)[:, None]
        rows = rng.standard_normal((CAPACITY, LONGEST // self.ratio, 512)).astype(BF16)
        self.compressed = lab.put(layout.allocate(CAPACITY, page))
        self.insert(rows, self.compressed, page, self.table, layout)
        if indexer is None:
            return
        self.index_q = rng.integers(0, 120, (CAPACITY, LONGEST, INDEX_HEADS, 128)).astype(np.uint8)  # e4m3, finite
        self.weights = rng.standard_normal((CAPACITY, LONGEST, INDEX_HEADS)).astype(np.float32)
        self.keys = lab.put(cumla.INDEXER_FP8.allocate(CAPACITY, page))
        keys = rng.standard_normal((CAPACITY, LONGEST // self.ratio, 128)).astype(BF16)
        self.insert(keys, self.keys, page, self.table, None)

    def insert(self, rows, cache, page, table, layout):
        for its, pages in zip(rows, table, strict=True):
            at = np.arange(len(its))
            slots = self.lab.put(pages[at // page].astype(np.int64) * page + at % page)
            if layout is None:
                cumla.indexer_k_quant_and_cache(self.lab.put(its), cache, slots, backend=self.lab.backend)
            else:
                cumla.quantize_and_insert_k_cache(
                    self.lab.put(its), cache, slots, page, layout=layout, backend=self.lab.backend
                )

    def step(self, kind, replay_start=None, prefill_path=None):
        """out [tokens + padding, heads, 512] of 7 where nothing was written."""
        lab, scheduled = self.lab, kind.scheduled
        config = ServingConfig(
            window_size=WINDOW, compress_ratios=(0, self.ratio or 4), block_size=BLOCK, index_topk=TOPK,
            compressed_block_size=COMPRESSED, num_speculative_tokens=kind.drafts, max_num_batched_tokens=64,
            max_num_seqs=CAPACITY, max_model_len=256, has_c1a=self.ratio in (1, 2), num_sms=3,
        )  # fmt: skip
        batch = padded(self.paged.batch(scheduled)[0], kind.padding, lab.put, lab.get)
        table, compressed = None, None
        if self.ratio:
            table = lab.put(np.ascontiguousarray(self.table[[r for r, _, _ in scheduled]].reshape(-1, 1)))
        c128a = table if self.ratio == 128 else None
        metadata = DeepseekSparseSWAMetadataBuilder(config, lab.backend).build(
            0, batch, c128a_block_table=c128a, replay_start=lab.put(replay_start)
        )
        if self.ratio:
            inputs = None
            if self.indexer is not None:
                built = self.indexer(config, lab.backend, self.ratio).build(0, batch, block_table=table)
                q, weights = (self.of(x, kind) for x in (self.index_q, self.weights))
                inputs = IndexerInputs(q, weights, self.keys, built)
            compressed = CompressedCache(self.compressed, table, indexer=inputs)
        out = lab.put(np.full((batch.num_actual_tokens, HEADS, 512), 7, BF16))
        with only(lab.backend):
            self.layer.step(
                self.of(self.q, kind), None, self.window, metadata, compressed, out=out, backend=lab.backend,
                prefill_path=prefill_path,
            )  # fmt: skip
        return to_float(lab.get(out))

    def of(self, values, kind):
        """The values of the batch's tokens, and NaN for padding (e4m3's NaN, too)."""
        of_padding = 0x7F if values.dtype == np.uint8 else np.nan
        tokens = [values[r, first : first + count] for r, first, count in kind.spans]
        padding = np.full((kind.padding, *values.shape[2:]), of_padding, values.dtype)
        return self.lab.put(np.concatenate([*tokens, padding]))

    def alone(self, request, position):
        """A token's output [heads, 512] as the only decode of a batch."""
        if (request, position) not in self.known:
            self.known[request, position] = self.step(Alone(request, position))[0]
        return self.known[request, position]


class Alone(NamedTuple):
    """Like `Kind`, a batch of one token."""

    request: int
    position: int
    padding: int = 0
    drafts: int = 0

    @property
    def scheduled(self):
        return [(self.request, self.position, 1)]

    spans = scheduled


@functools.cache
def served(backend, emulated, name, indexer):
    assert not emulated
    return Served(Lab(backend, False), name, indexer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "indexer"), LAYERS, ids=lambda x: x if isinstance(x, str) else "-" if x is None else x.__name__
)
@pytest.mark.attention
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("name") != "c4a" or "beyond" not in x.get("kind")))
def test_sparse_layers(lab, name, indexer, kind):
    kind = KINDS[kind]
    its = Served(lab, name, indexer) if lab.on_device else served(lab.backend, lab.emulated, name, indexer)
    out = its.step(kind)
    tokens = [(r, p) for r, first, count in kind.spans for p in range(first, first + count)]
    assert len(out) == len(tokens) + kind.padding
    for got, (request, position) in zip(out, tokens, strict=False):
        assert_within(f"request {request}, position {position}", got, its.alone(request, position), 2e-3, 3.01 / 128)
    rest = out[len(tokens) :]
    assert ((rest == 0) | (rest == 7)).all()


PATHS = {"pages": (0, "pages"), "rows": (0, "rows"), "a path for each chunk": (0, None), "decodes": (19, None)}


@pytest.mark.parametrize("after", [-(2**31), -20, -3, 0, 1, 5, 20, 2**31 - 1], ids=lambda x: f"from {x}")
@pytest.mark.parametrize("name", ["window", "c2a"])
@pytest.mark.attention
@pytest.mark.thorough(when=lambda x: x.emulated and (x.get("after") != 5 or x.get("name") == "window"))
def test_windows_begin_at_replay_start_on_every_path(lab, name, after):
    """Windows begin `after` positions after each request's first position of the step: earlier rows are excluded."""
    its = Served(lab, name, V41IndexerMetadataBuilder if name == "c2a" else None)
    kind, outs = KINDS["prefills"], {}
    of_requests = [first + after if abs(after) < 2**30 else after for _, first, _ in kind.scheduled]
    replay = np.array(of_requests, np.int32)
    for path, (drafts, prefill_path) in PATHS.items():
        outs[path] = its.step(kind._replace(drafts=drafts), replay, prefill_path)
    exact = served("reference", False, name, its.indexer).step(kind._replace(drafts=19), replay)
    # On Hopper prefill's weights are bfloat16, see assert_prefill.
    largest = its.largest if lab.backend == "cuda" else 1.0
    for path, out in outs.items():
        assert_within(path, out, exact, 1e-3 * largest, 3.01 / 128)
    without, token = its.step(kind), 0
    for request, first, count in kind.spans:
        for position in range(first, first + count):
            start = max(position - WINDOW + 1, 0)
            assert (start < replay[request]) == (not np.allclose(outs["rows"][token], without[token], 1e-2, 1e-2))
            if name == "window" and position < replay[request]:
                assert not outs["rows"][token].any()
            token += 1


MODELS = {"v4 window": 1, "v4 c128a": 3, "v4 c4a": 8, "v32": 13}


@functools.cache
def golden_layer(name, backend, drafts):
    golden = GoldenLayer(MODELS[name])
    made = (V32Layer if name == "v32" else V4Layer)(golden, CAPACITY, backend=backend, speculative=drafts)
    made.step([(0, 0, 1)], given=False)
    return golden, made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.thorough(when=lambda x: x.get("backend") == "reference" and x.get("name") != "v4 c4a")
def test_whole_layers(name, backend, kind):
    """Against transformers' outputs; hidden states of padding are NaN."""
    kind = KINDS[kind]
    golden, made = golden_layer(name, backend, kind.drafts)
    for request, first, _ in kind.spans:
        made.step([(request, 0, first)], given=False)
    batch, tables = made.paged.batch(kind.scheduled)
    tokens, spans = batch.num_actual_tokens, [slice(first, first + count) for _, first, count in kind.spans]
    x = np.full((tokens + kind.padding, golden.hidden.shape[1]), np.nan, np.float32)
    x[:tokens] = np.concatenate([x[:0], *(golden.hidden[span] for span in spans)])
    out = made.layer.step(x, made.caches, made.build(padded(batch, kind.padding), tables))
    assert len(out) == len(x)
    if tokens:
        assert relative_rms(out[:tokens], np.concatenate([golden.out[span] for span in spans])) < 1e-5


@functools.cache
def stack_of(backend):
    """A stack of V4.1's layers, and the outputs of its first request in one step."""
    stack = Stack(0, backend=backend)
    stack.hidden[1:] = stack.hidden[:1] * (len(stack.hidden) - 1)
    return stack, stack.run(0, [LONGEST])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.thorough(when=lambda x: x.get("backend") == "reference")
def test_layers_of_v41(backend, kind):
    """All kinds of layers: window, owners of both ratios, layers that select again or reuse a selection."""
    kind = KINDS[kind]
    stack, want = stack_of(backend)
    kind = kind._replace(counts=kind.counts[: len(stack.hidden)])
    for request, first, _ in kind.spans:
        stack.step([(request, 0, first)])
    serving = dataclasses.replace(stack.serving, num_speculative_tokens=kind.drafts)
    batch, tables = stack.paged.batch(kind.scheduled)
    rings = np.array([request for request, _, _ in kind.scheduled], np.int32)
    builder = StepBuilder(stack.config.specs(), serving, backend)
    metadata = builder.build(padded(batch, kind.padding), tables, rings)
    spans, tokens = [slice(first, first + count) for _, first, count in kind.spans], batch.num_actual_tokens
    np.testing.assert_array_equal(metadata.ring_slot_mapping[tokens:], np.full(kind.padding, -1))
    for number, (layer, caches) in enumerate(zip(stack.layers, stack.caches, strict=True)):
        x = np.full((tokens + kind.padding, stack.config.hidden_size), np.nan, np.float32)
        x[:tokens] = np.concatenate([x[:0], *(stack.hidden[0][number, span] for span in spans)])
        out = layer.step(x, caches, metadata, stack.selection)
        assert len(out) == len(x)
        if tokens:
            assert relative_rms(out[:tokens], np.concatenate([want[number, span] for span in spans])) < 1e-4
