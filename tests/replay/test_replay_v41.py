"""Small runs of V4.1's layers: shared rows and selections, rings of running requests, every part timed and checked."""

from dataclasses import replace

import numpy as np
import pytest

from cumla.__main__ import main
from cumla.models.caches import FORMATS
from cumla.replay.options import V41_CACHE_FORMATS, V41_RATIOS, ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest
from support import replay_oracle, wrong_calls
from support.replay_oracle import failures

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


# Values compared with float64 in each layer, in addition to its attention.
EVERYWHERE = {"window rows", "cost", "direction", "output"}
COMPARED = {
    layer: EVERYWHERE | ({"rows"} if layer != "v41 window" else set())
    | ({"queries", "keys", "selection"} if "select" in parts else set())
    for layer, parts in PARTS.items()
}  # fmt: skip


def run(requests=REQUESTS, change=lambda engine: None, **options):
    return replay_oracle.run(replace(OPTIONS, **options), requests, change)


def errors_of(found, what, layer=None):
    return [check.error for check in found if check.what == what and layer in (None, check.layer)]


@pytest.fixture(scope="module")
def finished():
    return run()


def test_every_part_is_timed(finished):
    _, records, _ = finished
    for layer, parts in PARTS.items():
        timed = {part for record in records for name, part in record.seconds if name == layer}
        assert parts <= timed <= parts | {"map", "gather", "prefill"}


def test_every_layer_is_checked_against_float64(finished):
    _, records, found = finished
    assert failures(records, found) == []
    for layer, compared in COMPARED.items():
        samples = [sample for record in records for sample in record.samples if sample.layer == layer]
        assert len(samples) >= len(records)
        assert {check.what for check in found if check.layer == layer} == compared
        assert all(len(errors_of(found, what, layer)) >= len(records) // 2 for what in compared)
        assert 0 < max(errors_of(found, "output", layer)) < 2.0**-19
        assert 0.01 < np.mean(errors_of(found, "cost", layer)) < (0.05 if layer == "v41 window" else 0.12)
        assert 0.02 < np.mean(errors_of(found, "window rows", layer)) < 0.03  # e4m3
        if "rows" in compared:
            assert 0.08 < np.mean(errors_of(found, "rows", layer)) < 0.12  # e2m1
        if "keys" in compared:
            for what in ("keys", "queries"):
                assert 0.02 < np.mean(errors_of(found, what, layer)) < 0.03


@pytest.mark.parametrize("layout", [name for name in V41_CACHE_FORMATS if name != OPTIONS.v41_layout])
def test_other_formats(layout):
    engine, records, found = run(REQUESTS[1:2], v41_layout=layout)
    assert failures(records, found) == []
    assert [layer.caches.compressed.shape[2] for layer in engine.layers[1:]] == [288 if "FP4" in layout else 528] * 5
    assert {check.bound for check in found if check.what == "rows"} == {2.0**-2 if "FP4" in layout else 2.0**-4}


def test_index_keys_and_queries_may_be_mxfp4():
    engine, records, found = run(REQUESTS[1:2], index_keys="mxfp4")
    assert failures(records, found) == []
    assert [layer.caches.indexer.shape[2] for layer in engine.layers[1:]] == [68] * 5
    for what in ("keys", "queries"):
        assert 0.05 < np.mean(errors_of(found, what)) < 0.2  # e4m3: 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("index_keys", ["fp8", "mxfp4"])
def test_layers_on_a_device(index_keys):
    """A tiny model in bfloat16; layers are checked in turn."""
    requests = [replace(request, output_length=16) for request in REQUESTS]
    _, records, found = run(requests, backend="cuda", heads=8, tiny=True, index_keys=index_keys)
    assert failures(records, found) == []
    for layer, compared in COMPARED.items():
        assert {check.what for check in found if check.layer == layer} == compared


def test_layers_share_rows_and_selections(finished):
    engine, _, _ = finished
    caches = [layer.caches for layer in engine.layers]
    for number, owner in enumerate((None, 1, 1, 3, 3, 3)):
        for name in ("compressed", "indexer"):
            assert owner is None or getattr(caches[number], name) is getattr(caches[owner], name)
    assert caches[1].compressed is not caches[3].compressed
    assert [x.ring is not None for x in caches] == [False, True, False, False, False, False]
    assert len({id(layer.selection) for layer in engine.layers}) == 1
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
        ("cumla.models.output_projection.apply_rope", "v41 window", "output"),
        ("cumla.models.rows.norm_rope_and_insert", "v41 window", "window rows"),
        ("cumla.models.pooled.compress_latents", "v41 c2a full", "rows"),
        ("cumla.models.keys.indexer_k_quant_and_cache", "v41 c1a full", "keys"),
        ("cumla.layers.selection.candidate_topk", "v41 c1a reindex", "selection"),
        ("cumla.layers.selection.indexer_topk", "v41 c1a full", "selection"),
        ("cumla.models.rows.apply_rope", "v41 c2a reuse", "output"),
        ("cumla.models.selection.fused_indexer_q_rope_quant", "v41 c1a reindex", "queries"),
    ],
)
def test_a_wrong_operation_is_found(monkeypatch, what, layer, found):
    wrong_calls.make(monkeypatch, what)
    layers = OPTIONS.layers[: OPTIONS.layers.index(layer) + 1]  # which share latents and selections
    found_by = wrong_calls.failures(replace(OPTIONS, layers=layers))
    assert any(f"what='{found}'" in failure and f"'{layer}'" in failure for failure in found_by), found_by


def test_layouts_are_those_of_the_caches():
    for layout, cache_format in V41_CACHE_FORMATS.items():
        formats = FORMATS["v41"][cache_format]
        assert ",".join(dict.fromkeys((formats.rows.name, formats.compressed.name))) == layout
    assert set(FORMATS["v41"]) - set(V41_CACHE_FORMATS.values()) == {"bfloat16", "float32"}


def test_rings_are_kept_for_a_request_s_life_and_reused():
    """Requests wait for free rings, so that some begin when others have ended; states of both parities are saved."""
    requests = [TraceRequest(0.0, 250 + i, 3, (10 + i,)) for i in range(5)]
    seen = {}

    def watch(engine):
        ((metadata, _),) = engine.groups
        rings = metadata.rings

        def watched(batch):
            found = rings(batch)
            for scheduled, ring in zip(batch.scheduled, found.tolist(), strict=True):
                assert seen.setdefault(scheduled.sequence.index, ring) == ring
            assert len(set(found.tolist())) == len(found)
            return found

        metadata.rings = watched

    _, records, found = run(requests, watch, cache_tokens=512)
    assert failures(records, found) == []
    assert set(seen) == set(range(5))
    assert max(seen.values()) < 2


def test_a_request_after_a_shared_prefix_has_the_outputs_of_a_run_alone(finished):
    """Its ring differs from the ring of the request that wrote the prefix."""
    engine, _, _ = finished
    assert next(s for s in engine.scheduler.finished if s.index == 2).shared == 512


def test_the_command(capsys):
    small = ["replay", "--requests", "1", "--max-len", "40", "--batch-tokens", "64", "--backend", "cpu"]
    assert main([*small, "--layers", "v41"]) == 0
    shown = capsys.readouterr().out
    for text in (*V41_RATIOS, "projections", "compress", "select", "output"):
        assert all(word in shown for word in text.split())
    assert main([*small, "--layers", "v41", "--layout", "DSV41_FP8_SPLIT"]) == 0
    assert "DSV41_FP8_SPLIT" in capsys.readouterr().out


def test_pools_divide_the_selection(capsys):
    assert main(["replay", "--layers", "glm53", "--backend", "cpu", "--topk", "10"]) == 2
    assert "--topk: got 10 with layers of glm53, expected a multiple of 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--layout", "DSV4_FP8"], "--layout: got DSV4_FP8 with layers of v41, expected one of DSV41_FP8,DSV41_FP4; "),
        (["--index-keys", "fp4"], "--index-keys: invalid choice"),
        (["--mla-cache", "fp8"], "--mla-cache: does not apply to --layers v41, but to mla"),
        (["--prefill-path", "rows"], "--prefill-path: does not apply to --layers v41"),
    ],
)
def test_options_that_do_not_apply(capsys, options, line):
    assert main(["replay", "--layers", "v41", "--backend", "cpu", *options]) == 2
    assert line in capsys.readouterr().err
