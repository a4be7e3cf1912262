"""Chooses the backend; nothing else does.

The memory of the arrays decides: host arrays run on "cpu", CUDA arrays on "cuda". `backend=` overrides that
for a call with any backend that takes such arrays; nothing falls back silently.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from ..arrays.whole_import import import_whole
from . import dry_run
from .values import shown


@dataclass(frozen=True)
class Backend:
    """name, the modules it needs, the command that installs them, and whether it takes host or device arrays."""

    name: str
    needs: tuple[str, ...]
    install: str
    on_device: bool


# Names of packages on PyPI: cumla's own extras work only in a checkout.
INSTALL_CUPY = "pip install 'cupy-cuda13x[ctk]' (with a driver of CUDA 12: 'cupy-cuda12x[ctk]')"
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", (), "", on_device=False),
        Backend("cpu", ("numba",), "pip install numba", on_device=False),
        Backend("numba_cuda", ("numba.cuda", "cupy"), f"{INSTALL_CUPY}, and numba-cuda", on_device=True),
        Backend("cuda", ("cupy",), INSTALL_CUPY, on_device=True),
    )
}
DEFAULT_ON_HOST = "cpu"
DEFAULT_ON_DEVICE = "cuda"


def unavailable(name: str) -> str | None:
    """Why backend `name` cannot run here, or None if it can: asked again until it can."""
    if name not in _usable:
        reason = _lacks(name)
        if reason is not None:
            return reason
        _usable.add(name)
    return None


_usable: set[str] = set()  # backends


def _lacks(name: str) -> str | None:
    backend = BACKENDS[name]
    on_device = takes_device_arrays(name)
    for module in backend.needs:
        if (on_device or module != "cupy") and not is_installed(module):
            return f"{module.partition('.')[0]} is not installed: {backend.install}"
    if not on_device:
        return None
    try:
        runtime = import_whole("cupy").cuda.runtime
    except (ImportError, AttributeError) as error:  # another package of that name, or libraries that it lacks
        return f"CuPy cannot be imported ({error}): {backend.install}"
    try:
        return None if runtime.getDeviceCount() else "no CUDA device"
    except runtime.CUDARuntimeError as error:
        return f"no CUDA device can be used ({error})"


def available() -> list[str]:
    """The backends that can run here."""
    return [name for name in BACKENDS if unavailable(name) is None]


def takes_device_arrays(name: str) -> bool:
    """Whether backend `name` takes CUDA arrays; under Numba's simulator it takes host arrays instead."""
    return BACKENDS[name].on_device and not (name == "numba_cuda" and simulated())


def default(on_device: bool) -> str:
    """The backend for arrays on a device, or on the host."""
    return DEFAULT_ON_DEVICE if on_device else DEFAULT_ON_HOST


def best() -> str:
    """The default backend of this machine: that of a device if one can be used."""
    return default(on_device=unavailable(DEFAULT_ON_DEVICE) is None)


def array_module(name: str) -> ModuleType:
    """The module, numpy or cupy, whose arrays backend `name` takes; in a dry run of a device elsewhere numpy."""
    return import_whole("cupy" if takes_device_arrays(name) and not _elsewhere() else "numpy")


def _elsewhere() -> bool:
    """Whether calls are a dry run of a device that need not be here."""
    running = dry_run.current()
    return running is not None and running.anywhere


def choose(name: str | None, on_device: bool) -> str:
    """The backend for arrays on a device or on the host; `name` as the caller asked, None for the default.

    Raises ValueError if there is no such backend, it cannot run here, or it takes arrays of the other memory.
    """
    if name is None:
        return default(on_device)
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: got {shown(name)}, expected one of {', '.join(BACKENDS)}")
    reason = None if _elsewhere() else unavailable(name)
    if reason is not None:
        raise ValueError(f"backend: {name!r} is not available ({reason}); available: {', '.join(available())}")
    if takes_device_arrays(name) != on_device:
        have, want = ("CUDA", "host") if on_device else ("host", "CUDA")
        raise ValueError(f"backend: {name!r} takes {want} arrays, got {have} arrays")
    return name


@functools.cache
def kernels(name: str, file: str) -> ModuleType:
    """The module `kernels/<name>/<file>.py`. Raises ValueError if the backend does not have that file yet."""
    module = f"cumla.kernels.{name}.{file}"
    try:
        return import_whole(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(f"backend: {name!r} has no {file} kernels; available: {', '.join(available())}") from None


def simulated() -> bool:
    """Whether Numba's CUDA simulator is on."""
    if not is_installed("numba.cuda"):
        return False
    return bool(import_whole("numba.core.config").ENABLE_CUDASIM)


def is_installed(module: str) -> bool:
    """Whether a module can be found. Not a folder of that name without code, nor a stand-in among the imported ones."""
    try:
        if "." in module:  # find_spec imports the parent
            import_whole(module.rpartition(".")[0])
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # no parent, or a module without a specification
        return False
    return spec is not None and spec.origin is not None
