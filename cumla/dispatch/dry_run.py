"""Dry run: a call of a public function with fake arrays, which makes every check and launches no kernel.

    with dry_running(device=0) as dry_run:
        cumla.sparse_mla_decode(fake_array((2, 1, 64, 512), bfloat16), ...)
    dry_run.asked  # what would have run, with which arguments

It shows without arrays whether a call is served (`cumla.supports`), and checks the shapes and dtypes of JAX's tracers.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kernels.cuda.device import Device, described
from ..kernels.cuda.launch import Launch, recorded_launches
from ..kernels.types.described import DescribedArray, DescribedWorkspace
from ..kernels.types.plan import DecodePlan, DenseDecodePlan

MAP_NORESERVE = 0x4000  # of Linux; in Python's mmap from 3.12 on


@dataclass(frozen=True)
class Asked:
    """A function of kernels/<backend>/<file>.py and the arguments of the call that was not made."""

    backend: str | None
    file: str
    function: str
    arguments: tuple[Any, ...]


@dataclass
class DryRun:
    """device: the CUDA device that all arrays are assumed to be on; -1: host memory, None: unknown.

    anywhere: the device and its backend need not be here
    described: the description of the device, for which the launches of backend "cuda" are recorded, too; or None
    """

    device: int | None
    anywhere: bool = False
    described: Device | None = None
    asked: list[Asked] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    plans: dict[int, Any] = field(default_factory=dict)  # descriptions of plans: a plan that one call made stays made

    @property
    def on_device(self) -> bool:
        return self.device is not None and self.device >= 0

    def kernels(self, backend: str | None, file: str) -> Any:
        return _FakeKernels(self, backend, file)


class _FakeKernels:
    """Replaces a file of kernels and records its calls."""

    def __init__(self, dry_run: DryRun, backend: str | None, file: str) -> None:
        self._dry_run, self._backend, self._file = dry_run, backend, file

    def __getattr__(self, function: str) -> Callable[..., None]:
        def note(*arguments: Any, **keywords: Any) -> None:
            asked = Asked(self._backend, self._file, function, (*arguments, *keywords.values()))
            self._dry_run.asked.append(asked)
            if self._dry_run.described is not None:
                self._dry_run.launches += self._described(self._dry_run.described, function, arguments, keywords)

        return note

    def _described(self, device: Device, function: str, arguments: Any, keywords: Any) -> list[Launch]:
        """The launches of a call with fake arrays on this device."""
        module = importlib.import_module(f"cumla.kernels.cuda.{self._file}")
        number = max(self._dry_run.device or 0, 0)
        with described(device), recorded_launches() as launches:
            plans = self._dry_run.plans
            getattr(module, function)(*_on_device(arguments, number, plans), **_on_device(keywords, number, plans))
        return launches


def _on_device(value: Any, device: int, plans: dict[int, Any]) -> Any:
    """Arguments of kernels whose fake arrays are descriptions of arrays on a device; plans by their id."""
    if isinstance(value, np.ndarray):
        return DescribedArray.of(value, device)
    if isinstance(value, dict):
        return {name: _on_device(item, device, plans) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_on_device(item, device, plans) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, DecodePlan | DenseDecodePlan):
        memory = value.workspace.memory
        if id(value) not in plans:
            memory = None if memory is None else _on_device(memory, device, plans)
            plans[id(value)] = type(value)(DescribedWorkspace(memory))
        return plans[id(value)]
    return value


_current: contextvars.ContextVar[DryRun | None] = contextvars.ContextVar("dry_run", default=None)
current = _current.get


@contextlib.contextmanager
def dry_running(device: int | None = None, anywhere: bool = False, described: Device | None = None) -> Iterator[DryRun]:
    """A context in which calls launch no kernels. See `DryRun`."""
    dry_run = DryRun(device, anywhere, described)
    token = _current.set(dry_run)
    try:
        yield dry_run
    finally:
        _current.reset(token)


def fake_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A writable array of zeros whose memory is not committed until it is touched."""
    dtype = np.dtype(dtype)
    size = max(math.prod(shape) * dtype.itemsize, 1)
    if sys.platform == "linux":
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    else:
        memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, np.uint8, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
