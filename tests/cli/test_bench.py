"""`cumla bench`: rows of cases that run here; files of rows compared and plotted."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from cumla.__main__ import main
from cumla.bench import NAMES, peers, plot, rows
from cumla.bench.problem import Sizes, first
from cumla.bench.rows import SUITES
from support.command_line import error_line

TINY = ["--backend", "cpu", "--heads", "2", "--batch", "1,2", "--tokens", "7", "--context", "128", "--topk", "16"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("cumla.cli.bench.limit_blas_threads", lambda: None)
    monkeypatch.setattr("cumla.bench.rows.call_times", lambda calls: [(call(), 3.0)[1] for call in calls] * 5)


def results(tmp_path, name, times, spread=0.0):
    found = [
        {"op": "decode", "config": config, "impl": "cumla", "us": us, "us_low": us - spread, "us_high": us + spread}
        for config, us in times.items()
    ]
    path = tmp_path / name
    path.write_text("\ufeff" + json.dumps({"environment": {"device": "D"}, "rows": found}))
    return path


@pytest.mark.slow
def test_every_suite_runs_and_is_named(tmp_path, capsys):
    numbers, picture = tmp_path / "x.json", tmp_path / "x.svg"
    assert tuple(SUITES) == NAMES
    assert main(["bench", *TINY, "--json", str(numbers), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()[1:] if not line.endswith(("lists", "steps"))) <= 60
    record = json.loads(numbers.read_text())
    assert {row["op"] for row in record["rows"]} >= {
        "quantize_and_insert_k_cache",
        "qnorm_rope_and_insert",
        "dequantize_and_gather_k_cache",
        "sparse_mla_decode",
        "sparse_mla_prefill",
        "indexer_topk decode",
        "dense_mla_decode",
    }
    assert all(row["us"] > 0 for row in record["rows"])
    decodes = [row for row in record["rows"] if row["op"] == "sparse_mla_decode"]
    assert [row["config"].partition("DSV4_FP8 h2 ")[2] for row in decodes] == [
        "b1 s1 16+512, lengths", "b2 s1 16+512, lengths", "b1 s1 16+512, full lists", "b2 s1 16+512, full lists",
    ]  # fmt: skip
    assert all(row["checked"] and row["max_abs_err"] < 1e-2 and row["us_again"] == 3.0 for row in decodes)
    assert picture.read_text().count("DSV4_FP8") or "<svg" in picture.read_text()


def test_a_suite_alone_as_json_for_a_program(capsys):
    assert main(["bench", "gather", *TINY, "--layout", "V32_FP8", "--json", "-"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert [row["config"] for row in rows] == ["V32_FP8 4 x 7, lengths", "V32_FP8 1 x 7, full lists"]
    assert "V32_FP8 1 x 7" in captured.err


@pytest.mark.parametrize(
    ("layout", "decode"),
    [("DSV41_FP8", "16+512, lengths"), ("DSV41_FP8_SPLIT", "16+512, lengths"), ("V32_NOPE_FP8", "16, full lists")],
)
def test_formats_of_newer_models(capsys, layout, decode):
    assert main(["bench", "insert", "decode", *TINY, "--batch", "1", "--layout", layout, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    configs = [(row["op"], row["config"]) for row in rows]
    assert ("quantize_and_insert_k_cache", f"{layout} T=7") in configs
    assert ("sparse_mla_decode", f"{layout} h2 b1 s1 {decode}") in configs


@pytest.mark.parametrize("made", [tuple, list])
def test_results_of_peers_that_are_several(made):
    rows_of_it = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(first(made([rows_of_it, None]), 2), rows_of_it[:2])


def test_what_a_peer_prints_is_no_result(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (tmp_path / "talkative_peer.py").write_text("print('hello')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.module("talkative_peer") is not None
    assert capsys.readouterr() == ("", "hello\n")


def test_no_peers_where_none_can_be_imported(monkeypatch):
    monkeypatch.setattr(Sizes, "with_peers", True)
    case, _ = SUITES["decode"](Sizes("cpu", heads=64, batch=(1,), topk=16, extra=16))
    assert list(case.problem(Sizes("cpu")).impls) == ["cumla"]


def test_changes_beyond_noise(tmp_path, capsys):
    old = results(tmp_path, "old.json", {"a": 100.0, "b": 100.0, "c": 100.0, "gone": 1.0}, spread=1.0)
    new = results(tmp_path, "new.json", {"a": 101.5, "b": 110.0, "c": 90.0, "come": 1.0}, spread=1.0)
    assert main(["bench", "--compare", str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "3 rows: 1 slower, 1 faster, the others within noise" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("decode")] == ["1.015", "slower", "faster"]
    wide = results(tmp_path, "wide.json", {"a": 110.0}, spread=15.0)
    assert main(["bench", "--compare", str(old), str(wide)]) == 0


@pytest.mark.parametrize(("again", "slower"), [(1.001, 1), (1.03, 0)])
def test_a_difference_is_beyond_the_noise_of_the_control(again, slower, tmp_path, capsys):
    """Where the control varies by 3%, a change of 5% is not significant, whichever row varies."""
    old = results(tmp_path, "old.json", {"a": 100.0, "b": 100.0})
    new = results(tmp_path, "new.json", {"a": 105.0, "b": 100.0})
    for path, control in ((old, 1.001), (new, again)):
        record = json.loads(path.read_text("utf-8-sig"))
        record["rows"][0]["us_again"] = record["rows"][0]["us"] * 1.001
        record["rows"][1]["us_again"] = record["rows"][1]["us"] * control
        path.write_text(json.dumps(record))
    assert main(["bench", "--compare", str(old), str(new)]) == slower
    assert f"2 rows: {slower} slower, 0 faster" in capsys.readouterr().out


def test_the_control_is_measured_after_the_next_problem(monkeypatch):
    measured = []

    def times(problem, on_device):
        measured.append(problem.config)
        return {"cumla": [1.0] * 5}

    monkeypatch.setattr(rows, "_times", times)
    list(rows.measured(["gather"], Sizes("cpu", tokens=(3, 4))))
    first, second, third, fourth = dict.fromkeys(measured)
    assert measured == [first, second, first, third, second, fourth, third, fourth]


def test_results_from_stdin(tmp_path, capsys, monkeypatch):
    old = results(tmp_path, "old.json", {"a": 100.0})
    monkeypatch.setattr("sys.stdin", io.StringIO(old.read_text().lstrip("\ufeff")))
    assert main(["bench", "--compare", str(old), "--results", "-", "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_results_alone_are_printed(tmp_path, capsys):
    numbers = tmp_path / "x.json"
    assert main(["bench", "gather", *TINY, "--json", str(numbers)]) == 0
    measured = capsys.readouterr().out.splitlines()
    assert main(["bench", "--results", str(numbers)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == measured
    assert printed[-1].startswith("2 rows. --plot draws them")
    assert main(["bench", "--results", str(results(tmp_path, "bare.json", {"a": 100.0}))]) == 0
    assert "decode a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--compare", "none.json"], "cannot read none.json"),
        (["--results", __file__], "is no file of results"),
        (["--compare", "a", "b", "c"], "--compare: got 3 files"),
        (["attention"], "argument SUITE: got 'attention', expected insert, gather"),
        (["--heads", "129"], "expected an integer from 1 to 128"),
        (["--plot", "x.doc"], "--plot: got x.doc"),
    ],
)
def test_what_cannot_be_done(options, line, capsys):
    assert line in error_line(capsys, ["bench", *options])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"rows": [], "environment": 5}, "is no file of results"),
        ({"rows": [{"op": "a", "config": "b", "us": float("nan")}]}, "row 0: us: got nan, expected microseconds"),
        ({"rows": [{"op": "a", "config": "b", "us": 10**400}]}, "row 0: us: got"),
        ({"rows": [{"op": "a", "config": "b", "us_graph": "3"}]}, "row 0: us_graph: got '3', expected microseconds"),
        ({"rows": [{"op": "a", "config": "b", "us": 1, "us_low": -1}]}, "row 0: us_low: got -1, expected"),
        ({"rows": [{"op": "a", "config": "b", "us": None}]}, "--plot: the results have no times to draw"),
        ({"rows": [{"op": "a", "config": "b", "us": 1, "gbps": "2"}]}, "row 0: gbps: got '2', expected a number"),
        ({"rows": []}, "--plot: the results have no times to draw"),
    ],
)
def test_times_that_are_none(record, says, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(record))
    assert says in error_line(capsys, ["bench", "--results", path, "--plot", tmp_path / "x.png"])


def test_files_are_read_with_care_without_asserts_too(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"rows": [{"op": 1, "config": "c"}]}')
    done = subprocess.run(
        [sys.executable, "-O", "-m", "cumla", "bench", "--results", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "is no file of results" in done.stderr


def test_files_without_a_common_row(tmp_path, capsys):
    files = [results(tmp_path, name, {name: 1.0}) for name in "ab"]
    assert "no row in common" in error_line(capsys, ["bench", "--compare", *files])


@pytest.mark.gpu
def test_on_a_device(capsys):
    sizes = ["--heads", "64", "--batch", "1", "--tokens", "64", "--context", "1024"]
    assert main(["bench", *sizes, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert {row["op"] for row in found} > {"sparse_mla_decode", "quantize_and_insert_k_cache", "dense_mla_decode"}
    assert all(row["us"] > 0 and row["us_graph"] > 0 for row in found)


def test_a_library_has_one_color_in_every_picture():
    figure = pytest.importorskip("matplotlib.figure")

    def colors(*impls):
        rows = [{"op": "a", "config": "b", "impl": impl, "us": 10.0 * (i + 1)} for i, impl in enumerate(impls)]
        legend = plot.draw(rows, "", figure.Figure()).axes[0].get_legend()
        return dict(zip(impls, [handle.get_color() for handle in legend.legend_handles], strict=True))

    found = (
        colors("copy", "cumla", "vllm", "mine"),
        colors("cumla", "flash_mla", "copy"),
        colors("vllm", "yours", "cumla"),
    )
    assert found[0]["cumla"] == found[1]["cumla"] == found[2]["cumla"]
    assert (found[0]["vllm"], found[0]["copy"]) == (found[2]["vllm"], found[1]["copy"])
    assert all(len(set(one.values())) == len(one) for one in found)
