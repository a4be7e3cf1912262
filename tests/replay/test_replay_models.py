"""Small runs of layers of V4, V3.2, GLM, Mistral Large 4 and Hy4.

Parts are timed and checked, shared prefixes continue.
"""

from dataclasses import replace

import numpy as np
import pytest

import cumla
from cumla.replay.activations import token_rows
from cumla.replay.engine import Engine
from cumla.replay.options import MODEL_LAYERS, ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest
from cumla.timing import Stopwatch
from support import replay_oracle, wrong_calls

OPTIONS = ReplayOptions(
    backend="cpu", layers=parse_layers("v4,v32,glm52,glm53,mistral4,hy4"), heads=2, window=128, topk=8,
    batch_tokens=300, cache_tokens=4096, max_len=None, seed=1,
)  # fmt: skip
REQUESTS = [TraceRequest(0.0, 600, 2, (0, 1)), TraceRequest(0.0, 40, 3, (2,)), TraceRequest(5000.0, 690, 2, (0, 3))]
EVERY = {"projections", "insert", "decode", "output", "activations"}
PARTS = {
    "v4 swa": EVERY, "v4 c4a": EVERY | {"compress", "select"}, "v4 c128a": EVERY | {"compress"},
    "v32": EVERY | {"map", "select"}, "glm52 full": EVERY | {"map", "select"}, "glm52 shared": EVERY | {"map"},
    "glm53": EVERY | {"map", "select"}, "hy4 full": EVERY | {"map", "select"}, "hy4 shared": EVERY | {"map"},
    "mistral4 full": EVERY | {"map", "select"}, "mistral4 shared": EVERY | {"map"}, "mistral4 nope": EVERY | {"map"},
    "mistral4 nope reindex": EVERY | {"map", "select"},
}  # fmt: skip


# Values compared with float64 in each layer, in addition to its attention.
EVERYWHERE = {"window rows", "cost", "direction", "output"}
INDEXER, LATENT = {"queries", "keys", "selection"}, {"rows", "cost", "direction", "output"}
COMPARED = {
    "v4 swa": EVERYWHERE, "v4 c4a": EVERYWHERE | INDEXER | {"rows"}, "v4 c128a": EVERYWHERE | {"rows"},
    **dict.fromkeys(("v32", "glm52 full", "glm53", "hy4 full", *MODEL_LAYERS["mistral4"][::3]), INDEXER | LATENT),
    **dict.fromkeys(("glm52 shared", "hy4 shared", *MODEL_LAYERS["mistral4"][1:3]), LATENT),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished():
    return replay_oracle.run(OPTIONS, REQUESTS)


def test_every_part_is_timed(finished):
    _, records, _ = finished
    assert sum(record.prefill_tokens for record in records) == 600 + 40 + 690 - 512
    for layer, parts in PARTS.items():
        timed = {part for record in records for name, part in record.seconds if name == layer}
        assert parts <= timed
        assert timed <= parts | {"map", "gather", "prefill"}
        assert all(name != layer for record in records for name, _ in record.bytes)


def test_every_layer_is_checked_against_float64(finished):
    _, records, found = finished
    assert replay_oracle.failures(records, found) == []
    for layer in PARTS:
        samples = [sample for record in records for sample in record.samples if sample.layer == layer]
        assert len(samples) >= len(records)
        assert {sample.fp8_rms for sample in samples} == {None}
        errors = {what: [check.error for check in found if (check.layer, check.what) == (layer, what)]
                  for what in COMPARED[layer]}  # fmt: skip
        assert {check.what for check in found if check.layer == layer} == COMPARED[layer]
        assert all(len(of) >= len(records) // 2 for of in errors.values())
        assert 0 < max(errors["output"]) < 2.0**-19
        assert 0.01 < np.mean(errors["cost"]) < 0.05
        for what in {"window rows", "rows", "queries", "keys"} & errors.keys():
            assert 0.02 < np.mean(errors[what]) < 0.03  # e4m3


@pytest.mark.parametrize(
    ("what", "layer", "found"),
    [
        ("cumla.models.output_projection.apply_rope", "v4 swa", "what='output'"),
        ("cumla.models.rows.qnorm_rope_and_insert", "v4 swa", "what='window rows'"),
        ("cumla.models.pooled.compress_and_insert", "v4 c4a", "what='rows'"),
        ("cumla.models.pooled.compress_and_insert", "v4 c4a", "what='keys'"),
        ("cumla.models.selection.fused_indexer_q_rope_quant", "v4 c4a", "what='queries'"),
        ("cumla.models.rows.concat_and_cache_mla", "v32", "what='rows'"),
        ("cumla.models.keys.indexer_knorm_rope_and_insert", "v32", "what='keys'"),
        ("cumla.layers.selection.indexer_topk", "v32", "what='selection'"),
        ("cumla.layers.selected_attention.compute_global_topk_indices_and_lens", "v32", "of its bound"),
        ("cumla.layers.sparse.sparse_mla_decode", "v4 c128a", "of its bound"),
        ("cumla.models.keys.indexer_kpool_and_insert", "glm53", "what='keys'"),
        ("cumla.layers.selection.indexer_topk", "glm53", "what='selection'"),
        ("cumla.models.rows.apply_rope", "hy4 full", "what='rows'"),
        ("cumla.models.queries.apply_rope", "mistral4 full", "what='output'"),
        ("cumla.models.selection.fused_indexer_q_rope_quant", "mistral4 full", "what='queries'"),
        ("cumla.models.rows.quantize_and_insert_k_cache", "mistral4", "what='rows'"),
        ("cumla.layers.selection.indexer_topk", "glm52 full", "what='selection'"),
    ],
)
def test_a_wrong_operation_is_found(monkeypatch, what, layer, found):
    """The replay finds the last ones, the tests' comparison from hidden states on the others."""
    wrong_calls.make(monkeypatch, what)
    layers = parse_layers(layer) if layer == "mistral4" else (layer,)
    failures = wrong_calls.failures(replace(OPTIONS, layers=layers))
    assert any(found in failure for failure in failures), failures


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["v4", "v32", "glm52", "glm53", "mistral4", "hy4"])
def test_layers_on_a_device(layers):
    """A tiny model in bfloat16; layers are checked in turn."""
    requests = [replace(request, output_length=12) for request in REQUESTS]
    options = replace(OPTIONS, backend="cuda", layers=parse_layers(layers), heads=8, tiny=True)
    _, records, found = replay_oracle.run(options, requests)
    assert replay_oracle.failures(records, found) == []
    for layer in options.layers:
        assert {check.what for check in found if check.layer == layer} == COMPARED[layer]


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["v4", "v32", "v41", "glm52", "glm53", "mistral4", "hy4"])
def test_layers_of_published_sizes_on_a_device(layers):
    options = replace(OPTIONS, backend="cuda", layers=parse_layers(layers), heads=64, topk=64)
    requests = [TraceRequest(0.0, 290, 14, (0,)), TraceRequest(0.0, 40, 8, (2,))]
    _, records, found = replay_oracle.run(options, requests)
    assert replay_oracle.failures(records, found) == []
    assert {check.layer for check in found if check.what == "output"} == set(options.layers)


@pytest.mark.parametrize(
    "layers",
    ["v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v4", "v41", "glm53", "mistral4", "hy4"))],
)  # fmt: skip
def test_layers_by_emulated_kernels(here, monkeypatch, layers):
    """Few tokens, on the host's clock, with hidden states that the host made."""
    monkeypatch.setattr("cumla.replay.engine.Stopwatch", lambda xp, holds: Stopwatch(np))
    monkeypatch.setattr("cumla.replay.model_layers.token_rows", lambda *of: here.xp.asarray(token_rows(*of[:-1], np)))
    options = replace(
        OPTIONS, backend="cuda", layers=parse_layers(layers), heads=8, window=16, batch_tokens=12, cache_tokens=1024,
        tiny=True,
    )  # fmt: skip
    _, records, found = replay_oracle.run(options, [TraceRequest(0.0, 13, 4, (0,)), TraceRequest(0.0, 5, 3, (1,))])
    assert replay_oracle.failures(records, found) == []
    assert {check.what for check in found} >= {"rows", "cost", "output", "queries", "keys", "selection"}


def test_a_request_after_a_shared_prefix_has_the_rows_of_a_run_alone(finished):
    """Compressed rows right after it are pooled from states that the other request saved."""
    engine, _, _ = finished
    shared = next(s for s in engine.scheduler.finished if s.index == 2)
    assert shared.shared == 512
    alone = Engine(OPTIONS, [replace(REQUESTS[2])])
    for _ in alone.steps():
        pass
    (own,) = alone.scheduler.finished
    for ours, theirs in zip(engine.layers, alone.layers, strict=True):
        for name, per_block in (("window", 256), ("rows", 256), ("compressed", 64), ("indexer", 64)):
            if getattr(ours.caches, name, None) is None:
                continue
            per_block = 2 if (ours.name, name) == ("v4 c128a", "compressed") else per_block
            if ours.attention.spec.rows == "latent":
                per_block = 256 // (ours.attention.spec.pool if name == "indexer" else 1)
            count = 690 * per_block // 256
            got, want = (rows(e, name, s, count, per_block) for e, s in ((ours, shared), (theirs, own)))
            # Matrix products of other sizes round differently, which FP8 turns into a whole step.
            error = np.sqrt(np.square(got - want).mean() / np.square(want).mean())
            assert error < 1e-3, (ours.name, name, error)


def rows(layer, name, sequence, count, per_block):
    """The cached first rows of a sequence."""
    cache = getattr(layer.caches, name)
    slots = sequence.slots(np.arange(count), per_block)
    layout = cumla.INDEXER_FP8 if name == "indexer" else layer.attention.layouts.rows
    every = np.arange(len(cache), dtype=np.int32)[None]
    total = cache.shape[0] * cache.shape[1]
    out = np.empty((1, total, layout.head_dim), np.float32)
    lens = np.array([total], np.int32)
    cumla.dequantize_and_gather_k_cache(out, cache, lens, None, every, cache.shape[1], 0, layout=layout)
    return out[0, slots].astype(np.float64)


def test_windows_and_lengths_are_those_of_the_replay():
    requests = [TraceRequest(0.0, 90, 2, (0,))]
    assert len(list(Engine(replace(OPTIONS, window=16), requests).steps())) == 2


def test_layer_types_stand_for_layers():
    assert parse_layers("v4") == ("v4 swa", "v4 c4a", "v4 c128a")
    assert parse_layers("swa, v32") == ("swa", "v32")


def test_the_command_reports_time_by_part(capsys):
    from cumla.__main__ import main

    small = ["--requests", "1", "--max-len", "40", "--batch-tokens", "64", "--backend", "cpu"]
    assert main(["replay", "--layers", "v4", *small]) == 0
    shown = capsys.readouterr().out
    for part in ("projections", "compress", "select", "output"):
        assert part in shown
