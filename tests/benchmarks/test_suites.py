"""`python -m benchmarks.suites`: further suites, with the options of `cumla bench`."""

import json
import subprocess
import sys

import pytest
import suites

from cumla.bench import NAMES, rows
from cumla.bench.problem import Sizes

TINY = ["--backend", "cpu", "--heads", "2", "--batch", "1", "--tokens", "7", "--context", "128", "--topk", "16"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("cumla.cli.bench.limit_blas_threads", lambda: None)
    monkeypatch.setattr("cumla.bench.rows.call_times", lambda calls: [(call(), 3.0)[1] for call in calls] * 5)


def run(capsys, *options):
    """Rows of suites."""
    assert suites.main([*options, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_names_are_none_of_cumla_bench():
    assert not set(suites.SUITES) & set(NAMES)


@pytest.mark.slow
def test_every_suite_runs(capsys):
    found = run(capsys, *TINY)
    assert {row["op"] for row in found} >= {
        "compute_global_topk_indices_and_lens", "compress_and_insert", "compress_latents", "qnorm_rope_and_insert",
        "apply_rope", "merge_attn_states", "sparse_swa.build", "fp8_block_linear", "layer", "call: decode",
    }  # fmt: skip
    assert all(row["us"] > 0 for row in found)


@pytest.mark.parametrize(("layout", "name"), [("DSV4_FP8", ""), ("DSV41_FP8", "DSV41_FP8 "), ("V32_NOPE_FP8", "")])
def test_layers_of_each_kind_and_format(layout, name, capsys):
    """Layers have V4.1's formats, too; with formats of other models they are V4's layers."""
    found = run(capsys, "layers", *TINY, "--layout", layout)
    kinds = [f"{name}{kind} h2 b1 of 128" for kind in ("window", "C4A", "C128A")]
    assert [(row["op"], row["config"]) for row in found] == [("layer", x) for x in (*kinds, "dense h2 b1 of 128")]


def test_batch_invariant_layers_beside_the_default(capsys):
    found = run(capsys, "invariant", *TINY)
    layers = [row["impl"] for row in found if row["op"] == "batch-invariant layer"]
    assert layers == 3 * ["cumla", "default"]
    attention = [row for row in found if row["op"] in ("sparse_mla_decode", "dense_mla_decode")]
    assert [row["impl"] for row in attention] == 3 * ["cumla", "batch_invariant=True"]
    assert {row["config"] for row in attention} == {
        "DSV4_FP8 h2 b1 s1 16+512, lengths", "V32_FP8 h2 b1 s1 2048, lengths", "h2 b1 of 128, full lists",
    }  # fmt: skip
    assert len(found) == len(layers) + len(attention)


def test_frameworks_are_rows_of_their_own():
    pytest.importorskip("torch")
    sizes = Sizes("cpu", heads=2, batch=(1,), topk=16)
    found = list(rows.measured(["frameworks"], sizes, suites=suites.SUITES))
    assert {row["impl"] for row in found if row["op"] == "call: decode"} >= {"numpy", "torch", "torch operator"}
    assert {row["impl"] for row in found if row["op"] == "call: insert"} >= {"numpy", "torch", "torch operator"}


def test_inverse_rope_does_not_grow(recwarn):
    _, case = suites.SUITES["norms"](Sizes("reference", heads=2, batch=(1,)))
    back = case.problem(Sizes("reference"))
    for _ in range(200):
        back.impls["cumla"][1][0]()
    assert not [str(warning.message) for warning in recwarn]


@pytest.mark.parametrize("start", [["-m", "benchmarks.suites"], ["benchmarks/suites.py"]], ids=["module", "script"])
def test_a_suite_that_does_not_exist(start):
    done = subprocess.run([sys.executable, *start, "attention"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cumla: error: argument SUITE: got 'attention', expected indices, compressor" in done.stderr


@pytest.mark.gpu
def test_on_a_device(capsys):
    found = run(capsys, "--heads", "64", "--batch", "1", "--tokens", "64", "--context", "1024")
    assert {row["op"] for row in found} > {"compress_and_insert", "merge_attn_states", "apply_rope", "layer"}
    assert all((row["us_graph"] is None) == row["op"].startswith("call") for row in found)
