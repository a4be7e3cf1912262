"""Measures the time of work on the host or on a device, and keeps BLAS threads and launch gaps out of it."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np


def limit_blas_threads() -> None:
    """Limit BLAS to one thread in the whole process: a product with one token needs no more.

    BLAS's other threads spin for milliseconds after each call. On two cores they made other work four times slower,
    and more where another process ran.
    """
    importlib.import_module("threadpoolctl").threadpool_limits(1, "blas")


class Stopwatch:
    """Seconds by key: by the host's clock, or on a device between two CUDA events.

    The time between events includes the device's waits for work that the host has not queued yet. Inside `queued`
    there are no such waits, unless `holds` is False.

    Args:
        holds: whether the device may be held. False for several ranks: a held device blocks the exchanges of the other
            ranks, and two ranks of one process were seen to deadlock
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
        """A context whose work the device begins only once the host has queued all of it."""
        return contextlib.nullcontext() if self._gate is None else self._gate.closed()

    def collect(self) -> dict[Any, float]:
        """The seconds since the last call. Waits for the device."""
        for key, begin, end in self._spans:
            end.synchronize()
            self._seconds[key] += self._xp.cuda.get_elapsed_time(begin, end) / 1e3
        seconds, self._seconds, self._spans = dict(self._seconds), defaultdict(float), []
        return seconds


class Gate:
    """Holds CuPy's current stream. Each hold has a number; the device continues once `_opened` has reached it.

    Args:
        longest: nanoseconds after which the device continues in any case, so that a host that waits for it does not
            hang
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
