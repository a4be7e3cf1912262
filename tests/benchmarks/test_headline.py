"""The headline's program and its container: what they measure, and with what."""

import json
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib

import headline
import trace_steps

ROOT = pathlib.Path(headline.__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "h200"
CHART = runpy.run_path(str(ROOT / "tools" / "chart.py"))


def test_the_parts_measure_what_the_chart_shows(tmp_path):
    """The chart needs no row that the commands leave out."""
    for file, options in headline.PARTS.items():
        record = json.loads((RECORDS / file).read_text())
        words = shlex.split(options)
        if "--only" in words:
            wanted = words[words.index("--only") + 1]
            record["rows"] = [row for row in record["rows"] if wanted in row["op"] or wanted in row["config"]]
        else:
            heads, steps = words[words.index("--heads") + 1], words[words.index("--steps") + 1].split(",")
            assert [trace_steps.parsed(name) for name in steps]
            record["table"] = [x for x in record["table"] if x["heads"] == f"h{heads}" and x["steps"] in steps]
        (tmp_path / file).write_text(json.dumps(record))
    assert CHART["panels"](tmp_path) == CHART["panels"](RECORDS)


def test_commands_are_programs_of_the_benchmarks(tmp_path):
    for command in headline.commands(tmp_path):
        assert command[:2] == [sys.executable, "-m"]
        assert (ROOT / (command[2].replace(".", "/") + ".py")).exists()
        done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_the_records_chart_is_drawn_and_printed(tmp_path, capsys, monkeypatch):
    for file in headline.PARTS:
        (tmp_path / file).write_bytes((RECORDS / file).read_bytes())
    monkeypatch.setattr(sys, "argv", ["chart.py", "--records", str(tmp_path)])
    CHART["main"]()
    assert (tmp_path / "speed.svg").read_text() == (ROOT / "docs" / "speed.svg").read_text()
    assert "  1.81  V4, 64 heads, 1 request" in capsys.readouterr().out.splitlines()


def test_without_peers_the_program_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(headline, "missing", lambda: ["FlashMLA", "DeepGEMM", "vLLM"])
    assert headline.main([str(tmp_path / "results")]) == 1
    assert "headline: got no FlashMLA" in (said := capsys.readouterr().err)
    assert "pip install -r benchmarks/peers.txt" in said
    assert not (tmp_path / "results").exists()


def test_the_container_copies_files_that_exist_and_pins_every_peer():
    lines = (ROOT / "benchmarks" / "Containerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY"):
            assert (ROOT / line.split()[1]).exists(), line
    entry = json.loads(next(line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")))
    assert entry == ["python", "-m", "benchmarks.headline"]
    pins = [line for line in (ROOT / "benchmarks" / "peers.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", line).groups() for line in pins)
    assert {"vllm", "torch", "triton", "nvidia-cutlass-dsl"} <= pinned.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["cuda13"]]:
        name, _, bound = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(>=|<)([\d.]+)", requirement).groups()
        if name in pinned:
            assert sorted([pinned[name], bound], key=version)[">=" in requirement] == pinned[name], requirement


def version(text):
    return [int(part) for part in text.split(".")]
