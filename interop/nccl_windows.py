"""Symmetric windows: memory registered with NCCL on every rank, which kernels of other GPUs read without a copy.

In NCCL 2.28 windows differ from other memory in three ways. `ncclCommAbort` does not end the kernels for windows: they
always wait for other ranks. Sending from a window to one rank (ncclSend) crashes the process when the communicator is
aborted. And the kernels for windows, launched with programmatic stream serialisation, do not wait for the preceding
kernel (griddepcontrol.wait): they may send the window's old content.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .nccl_library import SYMMETRIC, Communicator, call, has_windows

GRANULARITY = 2 << 20  # bytes; shareable memory is allocated in multiples of it

# Versions of NCCL (src/device/symmetric, src/scheduler/symmetric_sched.cc). From NOT_WAITING to before WAITING_AGAIN
# the kernels for windows lack cudaGridDependencySynchronize. From FOR_ALL_MEMORY on they may also serve plain memory,
# if the environment asks for that (NCCL_SYM_NOWIN_ENABLE, NCCL_SYM_KERNEL).
NOT_WAITING, FOR_ALL_MEMORY, WAITING_AGAIN = 22800, 22900, 23007


def starts_early(version: int, windows: bool) -> bool:
    """Whether an exchange may read memory before the preceding kernel in the stream has stored its results.

    Args:
        version: of NCCL, 22809 for 2.28.9
        windows: whether the communicator may have windows
    """
    return NOT_WAITING <= version < WAITING_AGAIN and (windows or version >= FOR_ALL_MEMORY)


class Windows:
    """A communicator's windows on one rank, until the communicator is closed."""

    def __init__(self, comm: Communicator, wanted: bool) -> None:
        self._comm, self._wanted = comm, wanted
        self._allocated: list[int | None] = []
        self._windows: list[int | None] = []
        self._spans: list[range] = []

    def memory(self, nbytes: int) -> Any:
        """uint8 [nbytes] in a new window, on CuPy's current device. All ranks call this together.

        Returns None if windows are not wanted or NCCL has none. Raises NcclError if NCCL fails.
        """
        import cupy

        if not (self._wanted and has_windows()):
            return None
        size, address, window = -(-nbytes // GRANULARITY) * GRANULARITY, ctypes.c_void_p(), ctypes.c_void_p()
        call("ncclMemAlloc", ctypes.byref(address), size)
        self._allocated.append(address.value)
        call("ncclCommWindowRegister", self._comm.handle, address.value, size, ctypes.byref(window), SYMMETRIC)
        self._windows.append(window.value)
        self._spans.append(range(address.value or 0, (address.value or 0) + size))
        memory = cupy.cuda.UnownedMemory(address.value, size, self)
        return cupy.ndarray((nbytes,), "uint8", cupy.cuda.MemoryPointer(memory, 0))

    def __bool__(self) -> bool:
        """Whether any window was created."""
        return bool(self._spans)

    def has(self, address: int) -> bool:
        return any(address in span for span in self._spans)

    def deregister(self) -> None:
        """Deregister the windows. Call it when no work on the device uses them, and before NCCL ends."""
        while self._windows:
            call("ncclCommWindowDeregister", self._comm.handle, self._windows.pop())

    def free(self) -> None:
        """Free the memory. Call it after NCCL has ended on this rank."""
        while self._allocated:
            call("ncclMemFree", self._allocated.pop())
