"""Host or device: arrays back to the host, threads that do not fight, and how to measure what runs there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np


def to_host(array: Any) -> np.ndarray:
    """A NumPy or CuPy array in host memory."""
    return array if isinstance(array, np.ndarray) else array.get()


def share_cores() -> None:
    """Keep Numba's threads and BLAS's from fighting over the cores, for the whole process.

    Both spin for milliseconds after each call and wait for threads that the other has pushed aside: four times
    slower on two cores, and more where another process runs. Numba's own layer of threads sleeps instead
    (without effect once threads have started), and matrices of one token's size are one thread's work.
    """
    importlib.import_module("numba").config.THREADING_LAYER = "workqueue"
    if importlib.util.find_spec("threadpoolctl") is not None:
        importlib.import_module("threadpoolctl").threadpool_limits(1, "blas")


class Stopwatch:
    """Seconds by key. On the host by its clock; on a device between two CUDA events.

    Events count what the device does between them, and where it has nothing queued, its waiting for the host.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
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

    def collect(self) -> dict[Any, float]:
        """The seconds since the last call. Waits for the device."""
        for key, begin, end in self._spans:
            end.synchronize()
            self._seconds[key] += self._xp.cuda.get_elapsed_time(begin, end) / 1e3
        seconds, self._seconds, self._spans = dict(self._seconds), defaultdict(float), []
        return seconds
