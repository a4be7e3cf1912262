"""The safety tests once more where an index out of bounds is an error: the cpu kernels as interpreted code."""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent.parent


def test_no_array_is_left():
    files = [str(TESTS / name) for name in ("test_safety_indices.py", "test_safety_cache.py")]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-k", "cpu and not large")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, cwd=TESTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
