"""The one place where a backend is chosen.

Where the arrays live decides: host arrays run on "cpu", CUDA arrays on "cuda". `backend=` overrides that
for a call with any backend that can take the arrays as they are; nothing falls back silently.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Backend:
    """name, what it needs, the extra that brings it, and whether it takes host or device arrays."""

    name: str
    needs: tuple[str, ...]
    install: str
    on_device: bool


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", (), "pip install cumla", on_device=False),
        Backend("cpu", ("numba",), "pip install cumla", on_device=False),
        Backend("numba_cuda", ("numba.cuda", "cupy"), "pip install 'cumla[cuda13]' (or cuda12)", on_device=True),
        Backend("cuda", ("cupy",), "pip install 'cumla[cuda13]' (or cuda12)", on_device=True),
    )
}
DEFAULT_ON_HOST = "cpu"
DEFAULT_ON_DEVICE = "cuda"


@functools.cache
def unavailable(name: str) -> str | None:
    """Why backend `name` cannot run here, or None if it can."""
    backend = BACKENDS[name]
    for module in backend.needs:
        if not _importable(module):
            return f"{module.partition('.')[0]} is not installed: {backend.install}"
    if not backend.on_device or (name == "numba_cuda" and simulated()):
        return None
    cupy = importlib.import_module("cupy")
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device can be used ({error})"


def available() -> list[str]:
    """The backends that can run here."""
    return [name for name in BACKENDS if unavailable(name) is None]


def choose(name: str | None, on_device: bool) -> str:
    """The backend for arrays on a device or on the host; `name` as the caller asked, None for the default.

    Raises ValueError if there is no such backend, it cannot run here, or its arrays live elsewhere.
    """
    if name is None:
        return DEFAULT_ON_DEVICE if on_device else DEFAULT_ON_HOST
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, expected one of {', '.join(BACKENDS)}")
    reason = unavailable(name)
    if reason is not None:
        raise ValueError(f"backend: {name!r} is not available ({reason}); available: {', '.join(available())}")
    takes_device_arrays = BACKENDS[name].on_device and not (name == "numba_cuda" and simulated())
    if takes_device_arrays != on_device:
        have, want = ("CUDA", "host") if on_device else ("host", "CUDA")
        raise ValueError(f"backend: {name!r} takes {want} arrays, got {have} arrays")
    return name


@functools.cache
def kernels(name: str, file: str) -> ModuleType:
    """The module `kernels/<name>/<file>.py`. Raises ValueError if the backend does not have that file yet."""
    module = f"{__package__}.kernels.{name}.{file}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(f"backend: {name!r} has no {file} kernels; available: {', '.join(available())}") from None


def simulated() -> bool:
    """Whether Numba's CUDA simulator stands in for a device, on host arrays."""
    if not _importable("numba.cuda"):
        return False
    return bool(importlib.import_module("numba.core.config").ENABLE_CUDASIM)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
