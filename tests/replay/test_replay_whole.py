"""Small runs of whole layers: every part is timed, shared prefixes continue from rows and states."""

from dataclasses import replace

import numpy as np
import pytest

import cumla
from cumla.replay.engine import Engine
from cumla.replay.options import ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest
from support import wrong_calls

OPTIONS = ReplayOptions(
    backend="cpu", layers=parse_layers("v4,v32"), heads=2, window=128, topk=8, batch_tokens=300, cache_tokens=4096,
    max_len=None, seed=1,
)  # fmt: skip
REQUESTS = [TraceRequest(0.0, 600, 2, (0, 1)), TraceRequest(0.0, 40, 3, (2,)), TraceRequest(5000.0, 690, 2, (0, 3))]
EVERY = {"projections", "insert", "decode", "output", "activations"}
PARTS = {
    "v4 swa": EVERY, "v4 c4a": EVERY | {"compress", "select"}, "v4 c128a": EVERY | {"compress"},
    "v32": EVERY | {"map", "select"},
}  # fmt: skip


@pytest.fixture(scope="module")
def finished():
    engine = Engine(OPTIONS, REQUESTS)
    return engine, list(engine.steps())


def test_every_part_is_timed(finished):
    _, records = finished
    assert sum(record.prefill_tokens for record in records) == 600 + 40 + 690 - 512
    for layer, parts in PARTS.items():
        timed = {part for record in records for name, part in record.seconds if name == layer}
        assert parts <= timed
        assert timed <= parts | {"map", "gather", "prefill"}


def test_every_layer_is_checked_against_float64(finished):
    _, records = finished
    for layer in PARTS:
        samples = [sample for record in records for sample in record.samples if sample.layer == layer]
        assert len(samples) >= len(records)
        assert [sample.failure for sample in samples if sample.failure is not None] == []
        assert 0 < max(sample.layer_rms for sample in samples) < 2.0**-19
        assert 0.01 < np.mean([sample.fp8_rms for sample in samples]) < 0.05


@pytest.mark.parametrize(
    ("what", "layer", "found"),
    [
        ("cumla.models.output_projection.apply_rope", "v4 swa", "the layer's output"),
        ("cumla.models.deepseek_v4.qnorm_rope_and_insert", "v4 swa", "through FP8"),
        ("cumla.models.deepseek_v32.concat_and_cache_mla", "v32", "through FP8"),
        ("cumla.layers.selected_attention.compute_global_topk_indices_and_lens", "v32", "of its bound"),
        ("cumla.layers.sparse.sparse_mla_decode", "v4 c128a", "of its bound"),
    ],
)
def test_a_wrong_operation_is_found(monkeypatch, what, layer, found):
    wrong_calls.make(monkeypatch, what)
    failures = wrong_calls.failures(replace(OPTIONS, layers=(layer,)))
    assert any(found in failure for failure in failures), failures


def test_bytes_are_counted_for_every_timed_part(finished):
    _, records = finished
    for record in records:
        for (layer, _), count in record.bytes.items():
            assert layer in PARTS
            assert count > 0
        for layer in PARTS:
            timed = {part for name, part in record.seconds if name == layer} - {"activations", "map"}
            assert timed <= {part for name, part in record.bytes if name == layer}


def test_a_request_after_a_shared_prefix_has_the_rows_of_a_run_alone(finished):
    """Compressed rows right after it are pooled from states that the other request saved."""
    engine, _ = finished
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
            per_block = 256 if ours.name == "v32" else per_block
            count = 690 * per_block // 256
            got, want = (rows(e.caches, name, s, count, per_block) for e, s in ((ours, shared), (theirs, own)))
            # Matrix products of other sizes round differently, and FP8 makes it a whole step.
            error = np.sqrt(np.square(got - want).mean() / np.square(want).mean())
            assert error < 1e-3, (ours.name, name, error)


def rows(caches, name, sequence, count, per_block):
    """The cached first rows of a sequence."""
    cache = getattr(caches, name)
    slots = sequence.slots(np.arange(count), per_block)
    layout = cumla.INDEXER_FP8 if name == "indexer" else cumla.V32_FP8 if name == "rows" else cumla.DSV4_FP8
    every = np.arange(len(cache), dtype=np.int32)[None]
    total = cache.shape[0] * cache.shape[1]
    out = np.empty((1, total, layout.head_dim), np.float32)
    lens = np.array([total], np.int32)
    cumla.dequantize_and_gather_k_cache(out, cache, lens, None, every, cache.shape[1], 0, layout=layout)
    return out[0, slots].astype(np.float64)


def test_windows_and_lengths_are_those_of_the_replay(monkeypatch):
    monkeypatch.setattr("cumla.replay.whole.LEAST_REACH", 64)
    requests = [TraceRequest(0.0, 90, 2, (0,))]
    assert len(list(Engine(replace(OPTIONS, window=16), requests).steps())) == 2


def test_layer_types_stand_for_layers():
    assert parse_layers("v4") == ("v4 swa", "v4 c4a", "v4 c128a")
    assert parse_layers("swa, v32") == ("swa", "v32")


def test_the_command_reports_time_by_part(capsys):
    from cumla.__main__ import main

    assert (
        main(
            [
                "replay",
                "--layers",
                "v4",
                "--requests",
                "1",
                "--max-len",
                "40",
                "--batch-tokens",
                "64",
                "--backend",
                "cpu",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    for part in ("projections", "compress", "select", "output"):
        assert part in shown
