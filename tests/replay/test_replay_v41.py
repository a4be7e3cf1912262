"""Small runs of V4.1's layers: shared rows and selections, rings of running requests, every part timed and checked."""

from dataclasses import replace

import numpy as np
import pytest

from cumla.__main__ import main
from cumla.models.caches import V41_FORMATS
from cumla.replay.engine import Engine
from cumla.replay.options import V41_CACHE_FORMATS, V41_RATIOS, ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest
from cumla.replay.verify import CHOICE_BOUND
from cumla.replay.whole_v41_exact import gap
from support import wrong_calls

OPTIONS = ReplayOptions(
    backend="cpu", layers=parse_layers("v41"), heads=2, window=128, topk=8, batch_tokens=300, cache_tokens=4096,
    max_len=None, seed=1,
)  # fmt: skip
REQUESTS = [TraceRequest(0.0, 600, 2, (0, 1)), TraceRequest(0.0, 41, 3, (2,)), TraceRequest(5000.0, 690, 2, (0, 3))]
EVERY = {"projections", "insert", "decode", "output", "activations"}
PARTS = {
    "v41 window": EVERY, "v41 c2a full": EVERY | {"compress", "select"}, "v41 c2a reuse": EVERY,
    "v41 c1a full": EVERY | {"compress", "select"}, "v41 c1a reindex": EVERY | {"select"}, "v41 c1a reuse": EVERY,
}  # fmt: skip


def run(requests=REQUESTS, change=lambda engine: None, **options):
    engine = Engine(replace(OPTIONS, **options), requests)
    change(engine)
    return engine, list(engine.steps())


def failures_of(records):
    return [sample.failure for record in records for sample in record.samples if sample.failure is not None]


@pytest.fixture(scope="module")
def finished():
    return run()


def test_every_part_is_timed_and_its_bytes_are_counted(finished):
    _, records = finished
    for layer, parts in PARTS.items():
        timed = {part for record in records for name, part in record.seconds if name == layer}
        assert parts <= timed <= parts | {"map", "gather", "prefill"}
        for record in records:
            counted = {part for name, part in record.bytes if name == layer}
            assert {part for name, part in record.seconds if name == layer} - {"activations", "map"} <= counted
            assert all(count > 0 for (name, _), count in record.bytes.items() if name == layer)


def test_every_layer_is_checked_against_float64(finished):
    _, records = finished
    assert failures_of(records) == []
    for layer in PARTS:
        samples = [sample for record in records for sample in record.samples if sample.layer == layer]
        assert len(samples) >= len(records)
        assert 0 < max(sample.layer_rms for sample in samples) < 2.0**-19
        assert 0.01 < np.mean([sample.fp8_rms for sample in samples]) < (0.05 if layer == "v41 window" else 0.12)
        assert {sample.fp4 for sample in samples} == {layer != "v41 window"}
        gaps = {sample.choice_gap for sample in samples}
        assert (None not in gaps) == ("select" in PARTS[layer])
        for found in (sample.key_rms for sample in samples), (sample.query_rms for sample in samples):
            assert {x is None for x in found} == {"select" not in PARTS[layer]}
        assert max(x for x in gaps | {0.0} if x is not None) < CHOICE_BOUND


@pytest.mark.parametrize("layout", [name for name in V41_CACHE_FORMATS if name != OPTIONS.v41_layout])
def test_other_formats(layout):
    engine, records = run(REQUESTS[1:2], v41_layout=layout)
    assert failures_of(records) == []
    assert [layer.caches.compressed.shape[2] for layer in engine.layers[1:]] == [288 if "FP4" in layout else 528] * 5
    assert {sample.fp4 for record in records for sample in record.samples} == {False, "FP4" in layout}


def test_index_keys_and_queries_may_be_mxfp4():
    engine, records = run(REQUESTS[1:2], index_keys="mxfp4")
    assert failures_of(records) == []
    assert [layer.caches.indexer.shape[2] for layer in engine.layers[1:]] == [68] * 5
    samples = [sample for record in records for sample in record.samples if sample.query_rms is not None]
    for found in ([sample.key_rms for sample in samples], [sample.query_rms for sample in samples]):
        assert 0.05 < np.mean(found) < 0.2  # e4m3: 0.03


def test_layers_share_rows_and_selections(finished):
    engine, _ = finished
    caches = [layer.caches for layer in engine.layers]
    for number, owner in enumerate((None, 1, 1, 3, 3, 3)):
        for name in ("compressed", "indexer"):
            assert owner is None or getattr(caches[number], name) is getattr(caches[owner], name)
    assert caches[1].compressed is not caches[3].compressed
    assert [x.ring is not None for x in caches] == [False, True, False, False, False, False]
    assert len({id(layer.shared.selection) for layer in engine.layers}) == 1
    rings = sum(array.nbytes for array in (caches[1].ring, caches[1].restart_rows, caches[1].restart_positions))
    windows, blocks = [cache.window.shape[0] * cache.window.strides[0] for cache in caches], engine.pool.num_blocks
    assert [layer.cache_bytes for layer in engine.layers] == [
        windows[0], windows[1] + blocks * 128 * (288 + 132) + rings + blocks * padding(128), windows[2],
        windows[3] + blocks * 256 * (288 + 132) + blocks * padding(256), *windows[4:],
    ]  # fmt: skip


def padding(rows):
    """Bytes after each page of the indexer's keys."""
    return -(rows * 132) % 576


@pytest.mark.parametrize(
    ("what", "layer", "found"),
    [
        ("cumla.models.output_projection.apply_rope", "v41 window", "the layer's output"),
        ("cumla.models.deepseek_v41.compress_latents", "v41 c2a full", "of the selected rows' keys"),
        ("cumla.models.deepseek_v41.indexer_k_quant_and_cache", "v41 c1a full", "of the selected rows' keys"),
        ("cumla.layers.selection.candidate_topk", "v41 c1a reindex", "gap of the selected rows"),
        ("cumla.models.deepseek_v41.apply_rope", "v41 c2a reuse", "the layer's output"),
        ("cumla.models.selection.fused_indexer_q_rope_quant", "v41 c1a reindex", "of the index queries"),
    ],
)
def test_a_wrong_operation_is_found(monkeypatch, what, layer, found):
    wrong_calls.make(monkeypatch, what)
    failures = wrong_calls.failures(OPTIONS)
    assert any(found in failure and layer in failure for failure in failures), failures


def test_the_gap_of_a_choice():
    scores = np.array([3.0, 1, 2, 0])
    assert gap(scores, np.array([0, 2]), 2) == 0
    assert gap(scores, np.array([0, 1, 2, 3]), 8) == 0
    assert gap(scores, np.array([0, 1]), 2) == pytest.approx(1 / scores.std())
    for wrong in ([0], [0, 0], [2, 0], [0, 4], [0, 1, 2]):
        assert gap(scores, np.array(wrong), 2) == float("inf")


def test_layouts_are_those_of_the_caches():
    for layout, cache_format in V41_CACHE_FORMATS.items():
        formats = V41_FORMATS[cache_format]
        assert ",".join(dict.fromkeys((formats.window.name, formats.compressed.name))) == layout
    assert set(V41_FORMATS) - set(V41_CACHE_FORMATS.values()) == {"bfloat16", "float32"}


def test_rings_are_kept_for_a_request_s_life_and_reused():
    """Requests wait for room, so that some begin when others have ended; both parities of positions are saved."""
    requests = [TraceRequest(0.0, 250 + i, 3, (10 + i,)) for i in range(5)]
    seen = {}

    def watch(engine):
        rings = engine._v41_metadata.rings

        def watched(batch):
            found = rings(batch)
            for scheduled, ring in zip(batch.scheduled, found.tolist(), strict=True):
                assert seen.setdefault(scheduled.sequence.index, ring) == ring
            assert len(set(found.tolist())) == len(found)
            return found

        engine._v41_metadata.rings = watched

    _, records = run(requests, watch, cache_tokens=512)
    assert failures_of(records) == []
    assert set(seen) == set(range(5))
    assert max(seen.values()) < 2


def test_a_request_after_a_shared_prefix_has_the_outputs_of_a_run_alone(finished):
    """Its ring is another one than that of the request that wrote the prefix."""
    engine, _ = finished
    assert next(s for s in engine.scheduler.finished if s.index == 2).shared == 512


def test_the_command(capsys):
    small = ["replay", "--requests", "1", "--max-len", "40", "--batch-tokens", "64", "--backend", "cpu"]
    assert main([*small, "--layers", "v41"]) == 0
    shown = capsys.readouterr().out
    for text in (*V41_RATIOS, "projections", "compress", "select", "output", "gap, worst", "bound, FP4 rows"):
        assert all(word in shown for word in text.split())
    assert main([*small, "--layers", "v41", "--layout", "DSV41_FP8_SPLIT"]) == 0
    assert "DSV41_FP8_SPLIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--layout", "DSV4_FP8"], "--layout: got DSV4_FP8 with layers of v41, expected one of DSV41_FP8,DSV41_FP4; "),
        (["--ranks", "2"], "--ranks: got 2 with layers of v41, which run on one device"),
        (["--index-keys", "fp4"], "--index-keys: invalid choice"),
        (["--mla-cache", "fp8"], "--mla-cache: does not apply to --layers v41, but to mla"),
        (["--prefill-path", "rows"], "--prefill-path: does not apply to --layers v41"),
    ],
)
def test_options_that_do_not_apply(capsys, options, line):
    assert main(["replay", "--layers", "v41", "--backend", "cpu", *options]) == 2
    assert line in capsys.readouterr().err
