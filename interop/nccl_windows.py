"""Memory that NCCL knows of on every rank (symmetric windows): kernels then read another GPU's without a copy between.

CuPy's binding does not have these functions: they are called in the library that it has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
GRANULARITY = 2 << 20  # bytes, of memory that can be shared


@functools.cache
def library() -> Any:
    """NCCL with windows (2.27 and newer), or None."""
    try:
        found = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return None
    return found if hasattr(found, "ncclCommWindowRegister") and hasattr(found, "ncclMemAlloc") else None


class Windows:
    """A communicator's windows on one rank, until it is closed."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm  # CuPy's
        self._held: list[ctypes.c_void_p] = []

    def memory(self, nbytes: int) -> Any:
        """uint8 [nbytes] in a new window, on CuPy's current device. All ranks call this together.

        None where NCCL has no windows. Raises RuntimeError where it fails.
        """
        import cupy

        nccl = library()
        if nccl is None:
            return None
        size, address, window = -(-nbytes // GRANULARITY) * GRANULARITY, ctypes.c_void_p(), ctypes.c_void_p()
        check(nccl.ncclMemAlloc(ctypes.byref(address), ctypes.c_size_t(size)), "ncclMemAlloc")
        self._held.append(address)
        comm, flags = ctypes.c_void_p(self._comm.comm), ctypes.c_int(SYMMETRIC)
        status = nccl.ncclCommWindowRegister(comm, address, ctypes.c_size_t(size), ctypes.byref(window), flags)
        check(status, "ncclCommWindowRegister")
        memory = cupy.cuda.UnownedMemory(address.value, size, self)
        return cupy.ndarray((nbytes,), "uint8", cupy.cuda.MemoryPointer(memory, 0))

    def free(self) -> None:
        """Give the memory back. NCCL has ended on this rank by then, and nothing uses the memory any more."""
        while self._held:
            library().ncclMemFree(self._held.pop())


def check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: NCCL error {status}")
