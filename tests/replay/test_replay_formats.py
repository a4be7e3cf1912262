"""Replays whose caches have DeepSeek V4.1's formats: one for windows, another for compressed rows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cumla
from cumla.replay.engine import Engine
from cumla.replay.options import FORMATS, ReplayOptions
from cumla.replay.ranks import run_on_ranks
from cumla.replay.summary import summarize, summarize_ranks
from cumla.replay.trace import TraceRequest
from cumla.replay.traffic import bytes_moved

PAIR = "DSV41_FP8,DSV41_FP4"
OPTIONS = ReplayOptions(
    backend="cpu", layers=("swa", "c4a", "c128a"), heads=2, window=16, topk=8, batch_tokens=150, cache_tokens=1024,
    max_len=None, seed=1, layout=PAIR,
)  # fmt: skip
REQUESTS = [TraceRequest(0.0, 260, 2, (0,)), TraceRequest(0.0, 40, 3, (1,))]


def run(options, comm=None, broken=lambda layer: None, requests=REQUESTS):
    engine, records = Engine(options, requests, comm=comm), []
    for record in engine.steps():
        records.append(record)
        for layer in engine.layers:
            broken(layer)
    return engine, records


@pytest.mark.parametrize("layout", [name for name in FORMATS if name != "DSV4_FP8"])
@pytest.mark.parametrize("path", ["pages", "rows"])
def test_samples_are_within_bounds(layout, path):
    engine, records = run(replace(OPTIONS, layout=layout, prefill_path=path))
    checked = summarize(engine, records, 1.0)["verification"]
    assert checked["failures"] == []
    assert set(checked["exactness"]) == {"decode", "prefill"}
    assert {name: x["fp4"] for name, x in checked["fp8"].items()} == {
        "swa": False, "c4a": "FP4" in layout, "c128a": "FP4" in layout
    }  # fmt: skip
    assert 0 < checked["fp8"]["swa"]["rms_mean"] < 0.04
    for layer in engine.layers:
        assert layer.swa_cache.shape[2] == 528
        assert layer.ratio == 1 or layer.compressed_cache.shape[2] == (288 if "FP4" in layout else 528)


def test_the_host_s_other_backend_has_the_same_samples():
    few = replace(OPTIONS, layers=("c4a",))
    ran = [run(replace(few, backend=name), requests=REQUESTS[1:])[1] for name in ("reference", "cpu")]
    for one, other in zip(*ran, strict=True):
        assert [x.fp8_rms for x in one.samples] == pytest.approx([x.fp8_rms for x in other.samples], rel=0.05)


def test_wrong_bytes_of_compressed_rows_are_found():
    """Kernels agree over them with attention in float64; the rows before quantisation do not."""

    def broken(layer):
        if layer.compressed_cache is not None:
            layer.compressed_cache[..., 256:] = 0x70  # scales of 128

    _, records = run(replace(OPTIONS, layers=("c4a",)), broken=broken)
    failures = [sample.failure for record in records for sample in record.samples if sample.failure]
    assert failures
    assert all("through FP4" in failure for failure in failures)


def test_ranks_have_their_part_of_the_compressed_rows():
    options = replace(OPTIONS, ranks=2)
    runs = run_on_ranks(options, lambda comm: run(options, comm))
    for engine, records in runs:
        assert summarize(engine, records, 1.0)["verification"]["failures"] == []
    blocks = options.num_blocks
    for rank in summarize_ranks(runs):
        assert rank["compressed_bytes_on_one"] == blocks * (64 + 2) * 288
        assert rank["compressed_bytes"] == blocks * (32 + 1) * 288


def test_bytes_that_a_step_moves():
    """A decode at position 99 and a prefill of 8 tokens at 40 to 47, with a window of 16 and 8 selected rows."""
    prefill = SimpleNamespace(count=8, start=40, end=48)
    batch = SimpleNamespace(
        positions=np.array([99, *range(40, 48)]), num_decodes=1, num_tokens=9, scheduled=[None, prefill]
    )
    groups = SimpleNamespace(slots=np.zeros(3))

    def moved(over_pages, layout=PAIR, **more):
        formats = FORMATS[layout]
        return bytes_moved(batch, 4, 2, 16, 8, groups, [over_pages], formats, **more)

    q_and_out = 2 * 2 * 1024
    rows, pages = moved(False), moved(True)
    assert rows["insert"] == 9 * (1024 + 528 + 8) + 3 * (1024 + 288 + 8)
    assert rows["decode"] == 16 * (528 + 4) + 8 * (288 + 4) + q_and_out
    assert rows["gather"] == (8 + 15) * (528 + 1024) + 12 * (288 + 1024)
    assert rows["prefill"] == 8 * ((16 + 8) * (1024 + 4) + q_and_out)
    assert "gather" not in pages
    assert pages["prefill"] == 8 * (16 * (528 + 4) + 8 * (288 + 4) + q_and_out)
    assert moved(True, "DSV4_FP8")["prefill"] == 8 * (24 * (584 + 4) + q_and_out)
    some = moved(False, with_decodes=3)
    assert some["decode"] == 4 * rows["decode"]
    assert (some["prefill"], some["gather"]) == (rows["prefill"] * 5 // 8, rows["gather"])
    assert moved(True, with_decodes=8)["decode"] == 9 * rows["decode"]


def test_formats_are_those_that_layers_take():
    assert FORMATS["DSV4_FP8"] == (cumla.DSV4_FP8, cumla.DSV4_FP8)
    assert FORMATS[PAIR] == OPTIONS.formats == (cumla.DSV41_FP8, cumla.DSV41_FP4)
    assert set(FORMATS) == {"DSV4_FP8", "DSV41_FP8", PAIR, "DSV41_FP8_SPLIT", "DSV41_FP8_SPLIT,DSV41_FP4_SPLIT"}
