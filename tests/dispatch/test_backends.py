"""Backends that can run here, also next to folders with the names of packages that they need."""

import importlib
import os
import signal
import subprocess
import sys
import types

import pytest

from cumla.__main__ import main
from cumla.dispatch import backends


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.setattr(backends, "_usable", set())


def module(name, **contents):
    made = types.ModuleType(name)
    made.__spec__ = types.SimpleNamespace(origin=f"{name}.py")
    vars(made).update(contents)
    return made


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    """`python -m cumla info` next to a checkout of CuPy."""
    (tmp_path / "a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not backends.is_installed("a_package")
    (tmp_path / "a_package" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert backends.is_installed("a_package")


@pytest.mark.parametrize("stand_in", [types.ModuleType("cupy"), module("cupy"), None])
def test_a_stand_in_for_cupy(stand_in, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    assert "pip install 'cupy" in backends.unavailable("cuda")
    assert main(["info"]) == 0
    assert "no CUDA device that CuPy can use" in capsys.readouterr().out


def test_an_error_of_the_driver_is_not_remembered(monkeypatch):
    """The cause may be temporary: no memory, or a device in use."""
    errors = [RuntimeError("out of memory")]

    def count():
        if errors:
            raise errors.pop()
        return 1

    runtime = types.SimpleNamespace(getDeviceCount=count, CUDARuntimeError=RuntimeError)
    monkeypatch.setitem(sys.modules, "cupy", module("cupy", cuda=types.SimpleNamespace(runtime=runtime)))
    assert backends.unavailable("cuda") == "no CUDA device can be used (out of memory)"
    assert backends.unavailable("cuda") is None


FIRST_CALL = """
import os, signal, sys
import numpy as np
import cumla

class TimeLimit(Exception):
    pass

def raise_limit(*signal_and_frame):
    raise TimeLimit

class Finder:
    modules = 0

    def find_spec(self, name, path=None, target=None):
        self.modules += name.startswith("numba.")
        if self.modules % 20 == 10:
            os.kill(os.getpid(), signal.SIGALRM)

signal.signal(signal.SIGALRM, raise_limit)
sys.meta_path.insert(0, Finder())
arguments, limits = (np.array([[1.0, 3.0, 2.0]], np.float32), 2), 0
while True:
    try:
        found = cumla.top_k_per_row(*arguments)
        break
    except TimeLimit:
        limits += 1
assert limits
assert found.tolist() == [[1, 2]]
print("right")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs signals")
def test_a_time_limit_while_numba_is_imported():
    """Limits reach the caller, and a later call works: Numba cannot be imported again after half of an import."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, env=os.environ, timeout=200
    )
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr
