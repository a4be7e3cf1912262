"""The command line: its output and files, and one line for errors that a user can fix."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import cumla
from cumla.__main__ import main
from cumla.bounds import Bound
from cumla.cli import replay
from cumla.kernels.cpu import threads
from cumla.terminal import Progress
from support.command_line import error_line

ROOT = Path(__file__).parent.parent.parent
TINY = [
    "replay", "--backend", "cpu", "--requests", "2", "--max-len", "600", "--heads", "2", "--batch-tokens", "256",
    "--window", "16", "--topk", "8",
]  # fmt: skip
TINY_SWA, TINY_MLA = [*TINY[:-2], "--layers", "swa"], [*TINY[:-4], "--layers", "mla"]


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    """Numba's threading layer is global to the process, and other tests use it, too."""
    monkeypatch.setattr("cumla.cli.replay.limit_blas_threads", lambda: None)


def test_replay_writes_everything(tmp_path, capsys):
    numbers, picture = tmp_path / "run.json", tmp_path / "run.png"
    assert main([*TINY, "--json", str(numbers), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    for text in ("prefill", "decode", "gather", "c128a", "prefix hits", "What FP8 costs", "scores", "choice"):
        assert text in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    summary = json.loads(numbers.read_text())
    assert summary["config"]["backend"] == "cpu"
    assert summary["machine"]["versions"]["cumla"] == cumla.__version__
    totals, steps = summary["totals"], summary["steps"]
    assert totals["requests"] == 2
    assert totals["steps"] == len(steps)
    assert totals["prefill"]["tokens"] == sum(step["prefill_tokens"] for step in steps)
    assert totals["prefill"]["tokens_per_second"] > 0
    assert summary["verification"]["failures"] == []
    assert summary["verification"]["samples"] == sum(len(step["samples"]) for step in steps) > 0
    ops = {(row["layer"], row["op"]): row for row in summary["ops"]}
    for layer in ("swa", "c4a", "c128a"):
        for op in ("insert", "decode", "gather", "prefill"):
            row = ops[layer, op]
            assert row["gbps"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert 0 < summary["cache"]["held_peak"] <= 1


def test_replay_says_how_much_of_the_trace_it_ran(capsys, tmp_path):
    lines = [
        {"timestamp": 10 * i, "input_length": n, "output_length": 4, "hash_ids": [i]}
        for i, n in enumerate((50, 200, 30, 400))
    ]
    trace, numbers = tmp_path / "trace.jsonl", tmp_path / "run.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ["replay", str(trace), "--backend", "cpu", "--heads", "2", "--layers", "swa", "--window", "16", "--seed", "3"]
    assert main([*run, "--requests", "3", "--max-len", "100", "--json", str(numbers)]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in (
        "3 of the trace's 4 requests, 1 of them cut, to 188 of their 292 tokens", "3 of the trace's 4; 1 left out",
        "1 of the 3 cut to 100 tokens (--max-len)", "188 of 292 (64%); the trace has 696", "16 tokens", "seed 3",
        "tokens/s in attention of 1 layer", "Latency", "a request's first output", "simulated",
    ):  # fmt: skip
        assert text in out, text
    summary = json.loads(numbers.read_text())
    assert summary["share"] == {
        "requests": 3, "tokens": 188, "whole_requests": 2, "tokens_uncut": 292, "trace_requests": 4,
        "trace_tokens": 696,
    }  # fmt: skip
    for latency in summary["latency"].values():
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    assert main([*run, "--requests", "2", "--max-output", "3"]) == 0
    assert "2 of the 2 cut to 1,152 tokens (--max-len) and 3 of output (--max-output)" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )
    assert main([*run, "--requests", "1"]) == 0
    assert "1 of the trace's 4 requests, uncut" in capsys.readouterr().out


def test_replay_of_bf16_caches_speaks_of_no_fp8(capsys):
    options = [*TINY_MLA, "--max-len", "60"]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "FP8" not in out
    assert "──" in out.split("context")[-1].split("activations")[0]  # the line that the caption describes
    assert main([*options, "--mla-cache", "fp8"]) == 0
    assert "What FP8 costs" in capsys.readouterr().out


def test_replay_fails_beyond_bounds(monkeypatch, capsys):
    monkeypatch.setattr("cumla.replay.verify.EXACT_BOUNDS", dict.fromkeys(("decode", "prefill"), Bound(1e-9, 0, 1)))
    assert main([*TINY_SWA, "--max-len", "60"]) == 1
    out = capsys.readouterr().out
    assert "beyond bounds: step 0, request" in out
    assert "more" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param([], "COMMAND", id="no-command"),
        pytest.param(["replya"], "replya", id="unknown-command"),
        pytest.param(["replay", "--head", "x"], "expected an integer from 1 to 128", id="no-number"),
        pytest.param(["replay", "--ranks", "0"], "expected an integer from 1 to 64", id="ranks"),
        pytest.param(
            ["replay", "--ranks", "2", "--prefill-path", "rows"], "--prefill-path: got rows with --ranks", id="path"
        ),
        pytest.param(["replay", "--heads", "129"], "expected an integer from 1 to 128", id="heads"),
        pytest.param(["replay", "--requests", "0"], "from 1 to 2147483647", id="no-requests"),
        pytest.param(["replay", "--max-len", "1"], "from 2 to 2147483647", id="max-len"),
        pytest.param(["replay", "--max-output", "0"], "from 1 to 2147483647", id="max-output"),
        pytest.param(["replay", "--seed", "-1"], "from 0 to 140737488355328", id="seed"),
        pytest.param(["replay", "--layers", "swa,c5a"], "got 'c5a'", id="layers"),
        pytest.param(["replay", "--layers", ""], "got ''", id="no-layers"),
        pytest.param(["replay", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file", id="trace"),
        pytest.param(["replay", "."], "cannot read .: Is a directory", id="folder-as-trace"),
        pytest.param(["replay", "--requests", "301"], "the trace has 300", id="too-many-requests"),
        pytest.param([*TINY, "--cache-tokens", "512"], "one request alone needs 768", id="cache"),
        pytest.param([*TINY, "--cache-tokens", str(2**40)], "from 1 to 2147483647", id="huge-cache"),
        pytest.param([*TINY, "--json", "nowhere/run.json"], "there is no folder nowhere", id="json-folder"),
        pytest.param([*TINY, "--json", "."], "is a folder", id="json-is-folder"),
        pytest.param([*TINY, "--json", "x.svg", "--plot", "./x.svg"], "which --json writes", id="one-file-for-both"),
        pytest.param(["bench", "--json", "nowhere/x.json"], "there is no folder nowhere", id="bench-json-folder"),
        pytest.param(["bench", "--json", "."], "is a folder", id="bench-json-is-folder"),
        pytest.param(["bench", "--plot", "nowhere/x.png"], "there is no folder nowhere", id="bench-plot-folder"),
        pytest.param([*TINY, "--plot", "run.txt"], "ends in .png", id="plot-name"),
        pytest.param([*TINY, "--html", "-"], "--html: got -, expected a file", id="html-stdout"),
        pytest.param([*TINY, "--html", "nowhere/x.html"], "there is no folder nowhere", id="html-folder"),
        pytest.param([*TINY, "--backend", "cdua"], "cdua", id="backend"),
        pytest.param(["check", "--backend", "reference"], "reference", id="check-reference"),
        pytest.param(["warmup", "--topk", str(2**40)], "expected an integer from 1 to 1048576", id="warmup-topk"),
        pytest.param(["warmup", "--block-size", str(2**40)], "an integer from 1 to 65536", id="warmup-block-size"),
        pytest.param(["warmup", "--ranks", "2"], "--ranks: does not apply without --config", id="warmup-ranks"),
        pytest.param(["warmup", "--config", "x", "--head", "8"], "--heads: does not apply", id="heads"),
        pytest.param(["warmup", "--config", "x", "--kind", "v4"], "--kind: does not apply", id="kind"),
        pytest.param(["warmup", "--kind", "mla", "--topk", "8"], "--topk: does not apply to mla", id="topk-of-mla"),
        pytest.param(["warmup", "--config", "x", "--topk", "512"], "--topk: does not apply with", id="topk-of-config"),
        pytest.param(["replay", "--layers", "swa", "--mla-cache", "bf16"], "--mla-cache: does not", id="no-mla"),
        pytest.param(["replay", "--layers", "swa,mla", "--topk", "8"], "--topk: does not apply to", id="no-topk"),
        pytest.param(["replay", "--layers", "mla,v32", "--window", "8"], "--window: does not", id="no-window"),
        pytest.param(["replay", "--layers", "v4", "--prefill-path", "pages"], "--prefill-path: does", id="no-path"),
        pytest.param(["replay", "--layers", "v4", "--layout", "DSV41_FP8"], "--layout: does not", id="no-layout"),
        pytest.param(["replay", "--layout", "DSV41_FP4"], "'DSV41_FP8,DSV41_FP4'", id="layout"),
        pytest.param(["replay", "--layout", "DSV41_FP8,DSV41_FP4_SPLIT"], "--layout: invalid choice", id="pair"),
        pytest.param(["bench", "--layout", "DSV41"], "--layout: invalid choice: 'DSV41'", id="bench-layout"),
        pytest.param(["bench", "--results", "x", "--heads", "2"], "--heads: does not apply with", id="results"),
        pytest.param(["bench", "gather", "--results", "x"], "SUITE: got gather, which does not", id="results-of-suite"),
        pytest.param(["bench", "--compare", "x", "y", "--results", "z"], "--results: does not apply", id="results-too"),
        pytest.param(["bench", "--compare", "x", "y", "--topk", "8"], "--topk: does not apply with", id="compared"),
    ],
)
def test_errors_are_one_line(capsys, argv, message):
    assert message in error_line(capsys, argv)


def test_malformed_trace(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    assert "line 1: input_length is missing" in error_line(capsys, ["replay", trace])


@pytest.mark.parametrize(("option", "says"), [("warmup --config", "is no JSON"), ("bench --results", "is no file of")])
def test_json_of_any_depth(option, says, tmp_path, capsys):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    assert says in error_line(capsys, [*option.split(), path])


def test_out_of_memory_names_what_the_command_has(monkeypatch, capsys):
    def out_of_memory(*args):
        raise MemoryError

    monkeypatch.setattr("cumla.cli.warmup.run", out_of_memory)
    monkeypatch.setattr("cumla.cli.replay.run", out_of_memory)
    assert error_line(capsys, ["warmup"], 1).endswith("out of memory; smaller sizes need less")
    assert "a smaller --cache-tokens" in error_line(capsys, ["replay"], 1)


def test_a_trace_is_not_written_over(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line := '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    link = tmp_path / "link.json"
    link.symlink_to(trace)
    assert "which is read, expected another file" in error_line(capsys, ["replay", trace, "--json", link])
    assert trace.read_text() == line


def test_unavailable_backend(monkeypatch, capsys):
    def unavailable(name):
        return "no CUDA device" if name == "cuda" else None

    monkeypatch.setattr("cumla.dispatch.backends.unavailable", unavailable)
    line = error_line(capsys, ["replay", "--backend", "cuda"])
    assert "--backend cuda: no CUDA device; available: reference, cpu" in line


def test_plot_needs_matplotlib(monkeypatch, capsys):
    find = importlib.util.find_spec  # specs of other packages are unchanged
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert "pip install matplotlib" in error_line(capsys, [*TINY, "--plot", "run.png"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk(capsys):
    argv = [*TINY_SWA, "--max-len", "40", "--json", "/dev/full"]
    assert "cannot write /dev/full: No space left on device" in error_line(capsys, argv, status=1)


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
def test_out_of_memory(monkeypatch, capsys, ranks):
    def allocate(*args):
        raise MemoryError

    monkeypatch.setattr("cumla.cli.replay.warm_up", allocate)
    assert "out of memory" in error_line(capsys, [*TINY, *ranks], status=1)


def test_a_rank_that_does_not_come(monkeypatch, capsys):
    over = threading.Event()

    def warm_up(options, comm):
        if comm.rank == 1:
            over.wait(60)
        comm.all_gather(np.zeros(3))

    monkeypatch.setattr("cumla.cli.replay.warm_up", warm_up)
    monkeypatch.setattr("cumla.replay.ranks.TIME_LIMIT", 1)
    line = error_line(capsys, [*TINY, "--ranks", "2"], status=1)
    over.set()
    assert "rank 1 did not reach call 1 within 1 s" in line


def test_interrupted(monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("cumla.cli.replay.warm_up", interrupt)
    assert main(TINY) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "cumla: interrupted"


@pytest.mark.parametrize("argv", [["--help"], ["replay", "--help"], ["check", "--help"], ["info", "--help"]])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 0
    assert "usage: cumla" in capsys.readouterr().out


def test_help_is_quick():
    """No heavy import happens before a command needs it."""
    code = (
        "import sys\nfrom cumla.__main__ import main\n"
        "try: main(['replay', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'numba', 'cupy', 'torch', 'jax', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for text in ("python", "numpy", cumla.__version__, "reference", "numba_cuda"):
        assert text in out


def test_info_of_a_capability(capsys):
    assert main(["info", "--capability", "8.6"]) == 0
    shown = capsys.readouterr().out
    assert "8.6: 99 KiB" in shown
    assert "hopper" not in shown
    assert main(["info", "--capability", "9.0"]) == 0
    assert "portable" not in capsys.readouterr().out
    assert main(["info", "--capability", "7.5"]) == 2
    assert "--capability: got '7.5', expected one of 8.0, 8.6" in capsys.readouterr().err


def test_info_says_how_to_install(monkeypatch, capsys):
    monkeypatch.setattr("cumla.dispatch.backends.is_installed", lambda module: module not in ("cupy", "numba.cuda"))
    monkeypatch.setattr("cumla.dispatch.backends._usable", set())
    assert main(["info"]) == 0
    assert "pip install 'cupy-cuda13x[ctk]'" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("command", ["info", "check --backend cpu"])
def test_a_closed_stdout_is_one_line(command):
    shell = f"{sys.executable} -m cumla {command} >&-"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "cumla: error: cannot write: stdout is closed\n")


def test_a_closed_stderr_leaves_json_alone(monkeypatch, capsys):
    """Lines of progress, which have nowhere else to go, are not printed to stdout."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr("cumla.terminal.FIRST_SECONDS", 0)
    assert main([*TINY_SWA, "--max-len", "40", "--json", "-"]) == 0
    json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize(
    "command", [["warmup", "--capability", "9.0", "--config", "-"], ["replay", "-"], ["bench", "--results", "-"]]
)
def test_a_closed_stdin_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin has no requests" in (line := error_line(capsys, command)) or "- is no" in line


@pytest.mark.parametrize("columns", ["0", "00"])
def test_a_terminal_of_no_columns(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["info"]) == 0
    assert "numpy" in capsys.readouterr().out


@pytest.mark.parametrize("cores", ["x", "0", "-1", "1.5"])
def test_a_number_of_cores_that_is_none(cores, monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_NUM_THREADS", cores)
    threads.num_cores.cache_clear()
    line = error_line(capsys, ["replay", "--requests", "1"])
    assert f"NUMBA_NUM_THREADS: got {cores!r}, expected a positive integer" in line


def program(*arguments, **options):
    """The command in a separate process, without a terminal."""
    code = "import sys; from cumla_command import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output="stdout" not in options, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=200, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_json_for_a_program_and_a_trace_from_a_pipe(tmp_path):
    line = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}
    trace = ("\ufeff" + json.dumps(line) + "\n").encode()  # a byte order mark, as editors on Windows write it
    done = program(*TINY, "--requests", "1", "-", "--json", "-", input=trace)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["share"]["trace_tokens"] == 23
    assert b"Throughput" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("command", ["info", "--version", "--help"])
def test_a_full_disk_is_one_line(command):
    with open("/dev/full", "w") as full:
        done = program(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"cumla: error: cannot write: No space left on device\n"


def test_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = program("--version", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "interrupt"),
    [
        ("numpy", "raise KeyboardInterrupt"),
        ("datetime", "os.kill(os.getpid(), signal.SIGINT)"),  # during NumPy's import, which raises an ImportError
    ],
)
def test_an_early_interrupt_is_no_traceback(module, interrupt):
    code = (
        "import os, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == '{module}': {interrupt}\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "import cumla_command; sys.exit(cumla_command.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"cumla: interrupted\n")


@pytest.mark.parametrize("command", ["check", "info", "replay"])
def test_tables_fit_sixty_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    arguments = {"check": ["check", "--backend", "cpu"], "info": ["info"], "replay": TINY}[command]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    tables = lines[1:-1] if command == "replay" else lines  # the first line names the work, the last one is a summary
    assert max(map(len, tables)) <= 60
    assert "…" not in out


def test_every_part_of_a_replay_says_what_it_does_without_a_terminal(monkeypatch, tmp_path):
    """Each part goes on until its line is there; with an empty cache of compiled code, compilation takes longest."""
    monkeypatch.setattr("cumla.terminal.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("cumla.terminal.LINE_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    update, read = Progress.update, replay.requests_of

    def wait_for(what):
        while what not in sys.stderr.getvalue():
            time.sleep(0.001)

    def updated(self, what, *of):
        update(self, what, *of)
        wait_for(what)

    def reading(trace):
        wait_for("reading the trace")
        return read(trace)

    monkeypatch.setattr(Progress, "update", updated)
    monkeypatch.setattr(replay, "requests_of", reading)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 300, "output_length": 3, "hash_ids": [1]}))
    assert main([*TINY_SWA, "--requests", "1", str(trace)]) == 0
    lines = sys.stderr.getvalue().splitlines()
    parts = list(dict.fromkeys(re.sub(r"^[\d%, s]*s, ", "", line).partition(" ")[0] for line in lines))
    assert parts == ["reading", "compiling", "step", "writing"]
    steps = [line for line in lines if " step " in line]
    step = r"\d+%, \d+ s, step \d+: \d+ prefill, \d+ decode, \d+ waiting, cache \d+%"
    assert all(re.fullmatch(step, line) for line in steps)
    assert lines[0] == "0 s, reading the trace"


@pytest.mark.slow
def test_replay_on_ranks(capsys):
    small = ["--requests", "1", "--max-len", "300", "--heads", "1"]
    assert main(["replay", *small, "--ranks", "2", "--backend", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks that share the rows of long contexts" in out
    assert "0 beyond bounds" in out
