"""A call of a public function without the memory of its arrays: every check, and no kernel.

    with rehearsed(device=0) as rehearsal:
        cumla.sparse_mla_decode(ghost((2, 1, 64, 512), bfloat16), ...)
    rehearsal.asked  # what would have run, with which arguments

It tells before anything exists whether a call will be taken (`cumla.supports`), and a tracer of JAX what its own
shapes and dtypes are going to meet.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAP_NORESERVE = 0x4000  # of Linux; in Python's mmap from 3.12 on


@dataclass(frozen=True)
class Asked:
    """A function of kernels/<backend>/<file>.py and what it would have been called with."""

    backend: str | None
    file: str
    function: str
    arguments: tuple[Any, ...]


@dataclass
class Rehearsal:
    """device: the CUDA device that all arrays are taken to be on; -1: in host memory, None: somewhere."""

    device: int | None
    asked: list[Asked] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        return self.device is not None and self.device >= 0

    def kernels(self, backend: str | None, file: str) -> Any:
        return _Stand(self, backend, file)


class _Stand:
    """What stands in for a file of kernels."""

    def __init__(self, rehearsal: Rehearsal, backend: str | None, file: str) -> None:
        self._rehearsal, self._backend, self._file = rehearsal, backend, file

    def __getattr__(self, function: str) -> Callable[..., None]:
        def note(*arguments: Any, **keywords: Any) -> None:
            asked = Asked(self._backend, self._file, function, (*arguments, *keywords.values()))
            self._rehearsal.asked.append(asked)

        return note


_current: contextvars.ContextVar[Rehearsal | None] = contextvars.ContextVar("rehearsal", default=None)
current = _current.get


@contextlib.contextmanager
def rehearsed(device: int | None = None) -> Iterator[Rehearsal]:
    """Calls of this context launch nothing. See `Rehearsal`."""
    rehearsal = Rehearsal(device)
    token = _current.set(rehearsal)
    try:
        yield rehearsal
    finally:
        _current.reset(token)


def ghost(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A writable array of zeros whose memory is nowhere until somebody touches it."""
    dtype = np.dtype(dtype)
    size = max(math.prod(shape) * dtype.itemsize, 1)
    if sys.platform == "linux":
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    else:
        memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, np.uint8, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
