"""NVRTC, which only developers need: the extra `dev` brings it."""

import pytest


def nvrtc():
    """Its bindings; a module of tests that needs them is skipped where the library is missing."""
    why = "NVRTC is not installed (pip install -e '.[dev]')"
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason=why)
    try:
        bindings.nvrtcVersion()
    except RuntimeError:  # the bindings alone, as numba-cuda brings them
        pytest.skip(why, allow_module_level=True)
    return bindings
