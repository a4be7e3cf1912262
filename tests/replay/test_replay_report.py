"""The report of a replay: tables that fit, counts of tokens, and the summary."""

import io
import re

import pytest
from rich.console import Console

from cumla.__main__ import main
from cumla.replay.tables import NumberTable

NUMBER = re.compile(r"[0-9][0-9,.]*[0-9]|[0-9]")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("columns", [1, 4, 12])
def test_no_number_is_split_and_no_line_is_too_long(width, columns):
    names = [f"a long heading {i}" for i in range(columns)]
    table = NumberTable("Title", ["what it is", *names], "A caption of some words.")
    numbers = [f"{10_000_000 + 1111 * i:,}" for i in range(columns)]
    table.add_row("a label of words", *numbers, end_section=True)
    table.add_row("b", *reversed(numbers))
    console = Console(width=width, file=io.StringIO())
    table.print(console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    found = [number for number in NUMBER.findall(text) if len(number) > 2]
    assert sorted(found) == sorted(2 * numbers)
    assert text.count("Title") == 1
    parts = text.count("what")
    assert (parts == 1) == (width >= 200 or columns == 1 or (columns == 4 and width >= 60))


def test_numbers_stay_with_the_column_that_they_are_attached_to():
    table = NumberTable("Title", ["op", "swa ms", "GB/s", "c4a ms", "GB/s"], attached=[2, 4])
    table.add_row("insert", "1,234.5", "1.11", "9,876.5", "2.22")
    console = Console(width=34, file=io.StringIO())
    table.print(console)
    lines = [line.split() for line in console.file.getvalue().splitlines() if "insert" in line]
    assert lines == [["insert", "1,234.5", "1.11"], ["insert", "9,876.5", "2.22"]]


RUN = ["replay", "--backend", "cpu", "--heads", "2", "--batch-tokens", "256"]


def test_tokens_that_ran_that_were_shared_and_that_were_dropped_are_all(capsys):
    assert main([*RUN, "--requests", "4", "--layers", "swa", "--window", "16"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    ran, hits, last, total = (
        int(part.replace(",", ""))
        for part in re.search(
            r"([\d,]+) \+ ([\d,]+) prefix hits \+ ([\d,]+) last outputs.* = ([\d,]+) layers", out
        ).groups()
    )
    assert hits > 0
    assert last == 4
    assert ran + hits + last == total == int(re.search(r"their tokens ([\d,]+) of", out)[1].replace(",", ""))


def test_the_last_line_says_what_a_run_means(capsys, monkeypatch):
    small = [*RUN, "--requests", "1", "--max-len", "40"]
    assert main([*small, "--layers", "swa"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"All \d+ sampled outputs are right on backend cpu. Next: --json", last)
    assert main([*small, "--layers", "v32"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"All \d+ sampled outputs are right on backend cpu. Next: --json", out.splitlines()[-1])
    assert "GB/s" not in out  # of layers of models
    assert main([*small, "--layers", "v4", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Outputs of v4 swa, v4 c4a, v4 c128a were not checked: with --ranks no rank")
    monkeypatch.setattr("cumla.replay.verify.FP8_RMS_BOUND", -1.0)
    assert main([*small, "--layers", "swa"]) == 1
    assert "Results are wrong on backend cpu: do not serve" in capsys.readouterr().out.splitlines()[-1]
