"""How long work takes on the host or on a device, and what would disturb such a measurement."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np


def limit_blas_threads() -> None:
    """Keep BLAS's threads off the cores, for the whole process: matrices of one token's size are one thread's work.

    They spin for milliseconds after each call and push others aside: four times slower on two cores, and more where
    another process runs.
    """
    importlib.import_module("threadpoolctl").threadpool_limits(1, "blas")


class Stopwatch:
    """Seconds by key. On the host by its clock; on a device between two CUDA events.

    Events count what the device does between them and, where it has nothing queued, its waiting for the host;
    inside `queued` it has, but for ranks.

    holds  whether a device may be held. Not those of several ranks: one that is held holds up what others exchange
           with it, and two ranks of a process were seen to wait for each other for good
    """

    def __init__(self, xp: Any, holds: bool = True) -> None:
        self._xp = xp
        self._gate = Gate() if holds and xp is not np else None
        self._seconds: dict[Any, float] = defaultdict(float)
        self._spans: list[tuple[Hashable, Any, Any]] = []

    @contextlib.contextmanager
    def measure(self, key: Hashable) -> Iterator[None]:
        if self._xp is np:
            start = time.perf_counter()
            yield
            self._seconds[key] += time.perf_counter() - start
        else:
            begin, end = self._xp.cuda.Event(), self._xp.cuda.Event()
            begin.record()
            yield
            end.record()
            self._spans.append((key, begin, end))

    def queued(self) -> contextlib.AbstractContextManager[None]:
        """Let a device begin with what is inside only when the host has queued all of it."""
        return contextlib.nullcontext() if self._gate is None else self._gate.closed()

    def collect(self) -> dict[Any, float]:
        """The seconds since the last call. Waits for the device."""
        for key, begin, end in self._spans:
            end.synchronize()
            self._seconds[key] += self._xp.cuda.get_elapsed_time(begin, end) / 1e3
        seconds, self._seconds, self._spans = dict(self._seconds), defaultdict(float), []
        return seconds


class Gate:
    """Holds CuPy's current stream. Each hold has a number; the device goes on once `opened` has reached it.

    longest  nanoseconds after which it goes on in any case, should the host wait for it meanwhile
    """

    def __init__(self, longest: int = 5_000_000) -> None:
        self.longest = longest
        self._hold = importlib.import_module("cumla.kernels.cuda.compile").kernel("common/hold.cu", "hold")
        self._opened = importlib.import_module("cupyx").zeros_pinned(1, np.int64)
        self._ticket = 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        self._ticket += 1
        self._hold((1,), (1,), (self._opened.ctypes.data, self._ticket, self.longest))
        try:
            yield
        finally:
            self._opened[0] = self._ticket
