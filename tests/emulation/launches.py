"""Kernels, and how a launch schedules their threads."""

import contextlib
import contextvars
import ctypes
import functools
from typing import NamedTuple

from . import builds, ptx


class EmulationError(AssertionError):
    """A kernel did what no device would forgive."""


class Schedule(NamedTuple):
    """How a launch goes about what a device leaves open.

    late  asynchronous copies and products are done when they are waited for (or when nothing else can go on) and not
          when they are started
    seed  of random numbers, unless 0: some warps hurry on, as far as they can, while others are kept back, in changing
          order; and each copy and product is late or not
    """

    late: bool = False
    seed: int = 0


SCHEDULES = {
    "in order": Schedule(),
    "late": Schedule(late=True),
    "random 1": Schedule(seed=1),
    "random 2": Schedule(seed=2),
}

_schedule = contextvars.ContextVar("schedule", default=SCHEDULES["in order"])


@contextlib.contextmanager
def scheduled(schedule):
    """A context in which kernels are launched like this."""
    token = _schedule.set(schedule)
    try:
        yield
    finally:
        _schedule.reset(token)


class Kernel:
    """A kernel of a CUDA source, for devices of a compute capability such as 90."""

    def __init__(self, text, name, capability):
        function = builds.loaded(translated(text, capability))[f"emulated_{name}"]
        self.name, self._address = name, ctypes.cast(function, ctypes.c_void_p).value

    def launch(self, grid, block, shared_bytes, arguments):
        """`arguments`: the address of the packed ones. Raises EmulationError."""
        sizes = builds.Dim3(*grid), builds.Dim3(*block)
        error = builds.runtime().emulator_launch(self._address, arguments, *sizes, shared_bytes, *_schedule.get())
        if error is not None:
            raise EmulationError(f"{self.name}: {error.decode()}")


@functools.cache
def translated(text, capability):
    return f"#define __CUDA_ARCH__ {10 * capability}\n" + ptx.translated(text)
