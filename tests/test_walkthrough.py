"""The blocks of docs/adding-an-op.md, applied to a copy of the repository, add an operation that passes its tests."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(
    r"^`(?P<path>[^`\n]+)`, (?P<how>a new file|at the end|after|before)(?: `(?P<anchor>[^`\n]+)`)?:\n\n"
    r"```\w+\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
COPIED = ("cumla", "interop", "kernels", "tests", "docs", "benchmarks", "pyproject.toml")
MOST_FILES = 10
CHECK = """
import sys
sys.path.insert(0, "benchmarks")
from any_operation import cases
from cumla.bench.problem import Sizes
from cumla.specs.self_test import CASES, check_case
(case,) = (case for case in CASES if case.op == "count_valid_slots")
print(check_case(case, "cpu", 0))
(measured,) = cases("count_valid_slots", {"tokens": 9, "topk": 512})
assert (measured.op, str(measured)) == ("count_valid_slots", "tokens 9, topk 512")
problem = measured.problem(Sizes("cpu"))
for name, (_, calls) in problem.impls.items():
    assert problem.check(calls[0]()) == 0, name
"""


def blocks():
    return [found.groupdict() for found in BLOCK.finditer((ROOT / "docs" / "adding-an-op.md").read_text())]


def put(tree, block):
    path = tree / block["path"]
    if block["how"] == "a new file":
        assert not path.exists(), path
        path.write_text(block["code"])
        return
    text = path.read_text()
    if block["how"] == "at the end":
        path.write_text(text + ("\n\n" if path.suffix == ".py" else "\n") + block["code"])
        return
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if block["anchor"] in line)
    after = block["how"] == "after"
    lines.insert(at + after, block["code"] + ("" if after else "\n\n"))
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with the page's operation."""
    copy = tmp_path_factory.mktemp("walkthrough")
    links = shutil.ignore_patterns("__pycache__", "results", "*.svg")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=links)
        else:
            shutil.copy(ROOT / name, copy / name)
    for block in blocks():
        put(copy, block)
    return copy


def run(tree, *arguments):
    """Output of a program of this Python in the copy; skips if all of its tests are skipped."""
    environment = dict(os.environ, PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=200
    )
    if done.returncode == 5 and re.search(r"\d skipped", done.stdout):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_an_operation_is_in_few_files():
    assert len({block["path"] for block in blocks()}) <= MOST_FILES


def test_every_block_is_of_a_file():
    assert len(blocks()) == (ROOT / "docs" / "adding-an-op.md").read_text().count("\n```") // 2


@pytest.mark.slow
def test_the_operation_runs_on_every_backend(tree):
    said = run(tree, "-m", "pytest", "-n", "0", "-rA", "-q", "tests/ops/test_valid_slots.py")
    for backend in ("reference", "cpu", "numba_cuda"):
        assert f"PASSED tests/ops/test_valid_slots.py::test_count_valid_slots[{backend}]" in said
    assert re.search(r"(PASSED|SKIPPED).*(cuda-emulated|lab.py)", said), said  # skipped if emulation is not possible
    assert run(tree, "-c", "import cumla; print(cumla.__file__)").strip() == str(tree / "cumla" / "__init__.py")


@pytest.mark.slow
def test_the_operation_is_self_tested_measured_and_documented(tree):
    said = run(tree, "-c", CHECK)
    assert said.startswith("Outcome(passed=True"), said
    run(tree, "-m", "pytest", "-n", "0", "-q", "tests/test_docs.py", "-k", "public_name")
    run(tree, "-m", "pytest", "-n", "0", "-q", "tests/ops/test_registry.py")


@pytest.mark.slow
def test_the_kernel_compiles(tree):
    run(tree, "-m", "pytest", "-n", "0", "-q", "tests/kernels/test_compile.py", "-k", "slot_counts and not slow")
