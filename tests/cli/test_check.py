"""`cumla check`: its cases, its output and its failures."""

import inspect
import io

import numpy as np
import pytest
from rich.console import Console

import cumla
from cumla.__main__ import main
from cumla.bounds import EQUAL, Bound
from cumla.cli import check
from cumla.specs.self_test import Case
from cumla.specs.spec import OperationSpec, Variant
from support.command_line import error_line
from support.operations import NO_OPERATIONS


def test_check(capsys):
    assert main(["check", "--backend", "cpu", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "all within bounds" in out
    for name in cumla.__all__:
        if inspect.isfunction(getattr(cumla, name)) and name not in NO_OPERATIONS:
            assert name in out, f"{name} is not checked"


def test_check_names_what_a_backend_lacks(monkeypatch, capsys):
    monkeypatch.setattr("cumla.dispatch.backends.is_installed", lambda module: module not in ("cupy", "numba.cuda"))
    monkeypatch.setattr("cumla.dispatch.backends._usable", set())
    line = error_line(capsys, ["check", "--backend", "cuda"])
    assert "cupy is not installed: pip install" in line
    assert line.endswith("what can be checked: cpu")


def test_check_shows_what_is_allowed_beside_errors(capsys):
    assert main(["check", "--backend", "cpu"]) == 0
    cells = [line.split("│")[-2].split() for line in capsys.readouterr().out.splitlines() if "sparse_mla_d" in line]
    assert len(cells) > 3
    assert all(float(error) <= float(limit) for error, of, limit in cells)


def case_of(name, kernels, bound, result):
    """A case of an operation that returns result(backend)."""

    def function(*, backend):
        return result(backend)

    function.__name__ = name
    return Case(OperationSpec(function, kernels, {}, (), bounds=(bound,)), Variant("variant", lambda x: {}))


@pytest.mark.parametrize(("width", "tables"), [(60, 2), (120, 1)])
def test_check_gives_each_backend_a_table_where_numbers_would_not_fit(width, tables, monkeypatch):
    case = case_of("op", "sparse_cache", Bound(1e-3), lambda backend: np.ones(1))
    monkeypatch.setattr(check, "CASES", (case,))
    monkeypatch.setattr(check, "check_case", lambda case, name, *rest: check.Outcome(True, 1.5e-5, allowed=1e-3))
    monkeypatch.setattr(check.backends, "available", lambda: ["reference", "cpu", "cuda"])
    console = Console(width=width, file=io.StringIO())
    assert check.run(console, None, 0) == 0
    text = console.file.getvalue()
    assert text.count("1.5e-05 of 0.001") == 2
    assert text.count("Largest error") == tables
    assert "all within bounds on cpu, cuda" in text


def test_check_fails(monkeypatch):
    wrong = case_of("wrong", "sparse_cache", EQUAL, lambda backend: np.array([backend == "cpu"]))
    broken = case_of("broken", "sparse_cache", EQUAL, lambda backend: np.ones(1) / [1][backend == "cpu"])
    lacking = case_of("lacking", "no_such_file", EQUAL, lambda backend: np.ones(1))
    monkeypatch.setattr(check, "CASES", (wrong, broken, lacking))
    console = Console(width=120, record=True, quiet=True)
    assert check.run(console, "cpu", 0) == 1
    outcomes = [check.outcome_of(case, "cpu", 0) for case in check.CASES]
    assert outcomes == [
        check.Outcome(False, 1.0),
        check.Outcome(False, None, "IndexError: list index out of range"),
        check.Outcome(True, None),
    ]
