"""Memory that NCCL knows of on every rank (symmetric windows): kernels read another GPU's without a copy between."""

from __future__ import annotations

import ctypes
from typing import Any

from .nccl_library import SYMMETRIC, Communicator, call, has_windows

GRANULARITY = 2 << 20  # bytes, of memory that can be shared


class Windows:
    """A communicator's windows on one rank, until it is closed."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._held: list[int | None] = []
        self._windows: list[int | None] = []

    def memory(self, nbytes: int) -> Any:
        """uint8 [nbytes] in a new window, on CuPy's current device. All ranks call this together.

        None where NCCL has no windows. Raises NcclError where it fails.
        """
        import cupy

        if not has_windows():
            return None
        size, address, window = -(-nbytes // GRANULARITY) * GRANULARITY, ctypes.c_void_p(), ctypes.c_void_p()
        call("ncclMemAlloc", ctypes.byref(address), size)
        self._held.append(address.value)
        call("ncclCommWindowRegister", self._comm.handle, address.value, size, ctypes.byref(window), SYMMETRIC)
        self._windows.append(window.value)
        memory = cupy.cuda.UnownedMemory(address.value, size, self)
        return cupy.ndarray((nbytes,), "uint8", cupy.cuda.MemoryPointer(memory, 0))

    def deregister(self) -> None:
        """Nothing on this rank's device uses the memory any more, and NCCL has not ended yet."""
        while self._windows:
            call("ncclCommWindowDeregister", self._comm.handle, self._windows.pop())

    def free(self) -> None:
        """Give the memory back. NCCL has ended on this rank by then."""
        while self._held:
            call("ncclMemFree", self._held.pop())
