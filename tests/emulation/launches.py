"""Kernels, and schedules of their threads."""

import contextlib
import contextvars
import ctypes
import functools
from typing import NamedTuple

from . import builds, ptx


class EmulationError(AssertionError):
    """A kernel's error that would be undefined behaviour on a device."""


class Schedule(NamedTuple):
    """How a launch orders events whose order a device leaves open.

    Attributes:
        late: asynchronous copies and products are done when they are waited for (or when nothing else can go on) and
            not when they are started
        seed: of random numbers, unless 0: some warps hurry on, as far as they can, while others are kept back, in
            changing order; and each copy and product is late or not
        kept_back: a warpgroup, from 1 on, that runs only when no other can; 0: none. Waits by parity that assume too
            much of a slow warpgroup then fail
    """

    late: bool = False
    seed: int = 0
    kept_back: int = 0


SCHEDULES = {
    "in order": Schedule(),
    "late": Schedule(late=True),
    "random 1": Schedule(seed=1),
    "random 2": Schedule(seed=2),
}

_schedule = contextvars.ContextVar("schedule", default=SCHEDULES["in order"])


@contextlib.contextmanager
def scheduled(schedule):
    """A context in which kernels are launched with this schedule."""
    token = _schedule.set(schedule)
    try:
        yield
    finally:
        _schedule.reset(token)


class Kernel:
    """A kernel of a CUDA source, for devices of a compute capability such as 90."""

    def __init__(self, text, name, capability):
        library = builds.loaded(translated(text, capability))
        function = library[f"emulated_{name}"]
        self.cluster = ctypes.c_uint.in_dll(library, f"emulated_cluster_of_{name}").value  # blocks, or 0
        self.name, self.address = name, ctypes.cast(function, ctypes.c_void_p).value

    def launch(self, grid, block, shared_bytes, arguments):
        """`arguments`: the address of packed arguments. Raises EmulationError."""
        Launch(self, grid, block, shared_bytes, arguments).run()


class Launch:
    """A kernel with its arguments, to be run later under the current schedule.

    Args:
        arguments: the address of packed arguments, which `memory` holds
        ahead: the launch that it may overlap with
    """

    def __init__(self, kernel, grid, block, shared_bytes, arguments, memory=None):
        self._name, self._memory = kernel.name.encode(), memory
        self._sizes = builds.Dim3(*grid), builds.Dim3(*block)
        self._rest = kernel.address, arguments, *self._sizes, shared_bytes, kernel.cluster, *_schedule.get()
        self.ahead = None

    def run(self):
        error = builds.runtime().emulator_launch(ctypes.byref(self.description()))
        if error is not None:
            raise EmulationError(error.decode())

    def description(self):
        ahead = ctypes.pointer(self.ahead.description()) if self.ahead else None
        return builds.LaunchDescription(self._name, *self._rest, ahead)


@functools.cache
def translated(text, capability):
    return f"#define __CUDA_ARCH__ {10 * capability}\n" + ptx.translated(text)
