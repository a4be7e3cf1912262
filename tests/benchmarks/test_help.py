"""Programs in benchmarks/ say what they do, also without a GPU and CuPy."""

import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
PROGRAMS = [file.name for file in sorted(FOLDER.glob("*.py")) if "parse_args()" in file.read_text()]


def test_programs_are_found():
    assert {"interop.py", "layers.py", "operations.py", "parallel.py"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_needs_no_gpu(name):
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
    assert len(done.stdout.splitlines()) > 3
