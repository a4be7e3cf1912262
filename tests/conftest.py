"""Every test that takes `lab` runs on each backend; device backends are marked gpu.

Without a device, numba_cuda runs in Numba's simulator on host arrays, which must be asked for before Numba
is imported.
"""

import os

import pytest


def wants_gpu(config):
    expression = config.getoption("-m") or ""
    return "gpu" in expression and "not gpu" not in expression


def pytest_configure(config):
    if not wants_gpu(config):
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


BACKENDS = [
    "reference",
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def lab(request):
    """A backend and the way to move arrays to it and back."""
    from support.lab import Lab

    return Lab(request.param, on_device=request.node.get_closest_marker("gpu") is not None)


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name: fresh numbers for each test, the same at each run."""
    import numpy as np

    return np.random.default_rng(list(request.node.nodeid.encode()))
