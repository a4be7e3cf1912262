"""Commands wrap lines between words, and report progress of long work, with and without a terminal."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cumla import terminal
from cumla.__main__ import main
from support.command_line import PROGRESS

CUMLA = Path(terminal.__file__).parent
TEXT = (
    "100 of the trace's 300 requests, 32 of them cut, to 13,824 of their 218,562 tokens, swa+c4a+c128a layers, "
    "8 heads, backend cpu; trace: shipped with cumla"
)


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 81, 120, 200])
def test_lines_are_wrapped_between_words(width):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    terminal.say(console, TEXT)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == TEXT


def test_without_a_terminal_a_line_is_a_line():
    console = Console(width=40, file=io.StringIO())
    terminal.say(console, TEXT)
    assert console.file.getvalue() == f"{TEXT}\n"


def test_no_command_leaves_wrapping_to_the_terminal():
    """A terminal breaks lines within words: commands print by `say`."""
    for path in CUMLA.rglob("*.py"):
        assert "soft_wrap=True" not in path.read_text(), path


@pytest.mark.parametrize("width", [30, 60, 100])
def test_errors_are_wrapped_between_words(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["replay", "--ranks", "2", "--prefill-path", "rows"]) == 2
    lines = stderr.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).startswith("cumla: error: --prefill-path: got rows with --ranks, expected pages")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
@pytest.mark.parametrize("total", [None, 100])
def test_no_number_of_a_bar_is_cut(width, total):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    bar = terminal._bar(console)
    bar.add_task("step 1234: 2048 prefill, 132 decode, 12 waiting, cache 45%", total=total, completed=30)
    console.print(bar.get_renderable())
    (line,) = console.file.getvalue().strip().splitlines()
    assert len(line) <= width
    assert "0:00:00" in line
    assert total is None or "30%" in line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stdout", [io.StringIO, Terminal])
def test_a_bar_leaves_results_where_they_belong(stdout, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stdout())
    monkeypatch.setattr(sys, "stderr", Terminal())
    console = Console()
    with terminal.Progress("compiling kernels") as progress:
        progress.update("a [bold] operation", 1, 4)
        progress._bar.refresh()
        with progress.paused():
            terminal.say(console, "a result")
        print("another")
    assert "a result\nanother\n" in sys.stdout.getvalue()
    assert "a [bold] operation" in sys.stderr.getvalue()
    assert "result" not in sys.stderr.getvalue()


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_every_terminal_gets_progress(term, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(terminal, "FIRST_SECONDS", 0.0)
    with terminal.Progress("compiling kernels") as progress:
        progress.update("compiling more")
    assert "compiling" in sys.stderr.getvalue()


COMMANDS = {
    "check": ["--backend", "cpu"],
    "bench": ["insert", "--backend", "cpu", "--tokens", "8", "--batch", "1"],
    "warmup": ["--backend", "cpu", "--kind", "mla", "--heads", "2", "--batch", "1"],
}  # replay: test_cli.py


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_what_they_do(command, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.001)
    assert main([command, *COMMANDS[command]]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) > 1
    assert all(map(PROGRESS.match, lines))


def test_a_closed_stderr_ends_nothing(monkeypatch):
    monkeypatch.setattr(terminal, "FIRST_SECONDS", 0.0)
    with terminal.Progress("compiling kernels") as progress:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        sys.stderr.close()
        progress._lines.join(10)
        assert not progress._lines.is_alive()
