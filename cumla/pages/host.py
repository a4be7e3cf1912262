"""Memory for pages on the host: the one place where host and device memory meet."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from ..arrays.memory import reach
from ..dispatch.values import check_integers, check_kind
from ..layout import MAX_BYTES

PORTABLE_MAPPED = 1 | 2  # cudaHostAllocPortable: pinned for every device; cudaHostAllocMapped: kernels access it
ALIGNMENT = 256


class _Pinned:
    """Pinned memory of exactly this size; CuPy's pool rounds sizes up to powers of two. Freed once nothing uses it."""

    def __init__(self, num_bytes: int) -> None:
        import cupy

        self._runtime, self.device = cupy.cuda.runtime, cupy.cuda.runtime.getDevice()
        self.address = int(self._runtime.hostAlloc(num_bytes, PORTABLE_MAPPED))
        self.__array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "address"):
            return
        with contextlib.suppress(Exception):  # the driver may be shut down
            self._runtime.deviceSynchronize()  # queued copies may still use it
            self._runtime.freeHost(self.address)


class HostPool:
    """Host memory that device kernels read and write.

    Attributes:
        memory: uint8 [bytes], a NumPy view. It and views of it keep the memory; it is freed when the last of them is
            gone and the device has done the work queued by then
        address: of the first byte, on the host and on the device
        pinned: whether a device can access it; without a device it is ordinary memory
        used: bytes that `take` has given out
    """

    def __init__(self, memory: np.ndarray, pinned: bool) -> None:
        self.memory, self.pinned, self.used = memory, pinned, 0

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    @property
    def left(self) -> int:
        """Bytes that have not been given out."""
        return len(self.memory) - self.used

    def take(self, num_bytes: int) -> np.ndarray:
        """The next bytes of the pool, aligned to 256 bytes in it.

        Raises ValueError, and gives out nothing, if there are fewer.
        """
        check_integers(0, MAX_BYTES, num_bytes=num_bytes)
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > len(self.memory):
            raise ValueError(
                f"host_pool: got {num_bytes} bytes to take, expected at most {max(len(self.memory) - start, 0)}, "
                f"which are left of {len(self.memory)}"
            )
        self.used = start + int(num_bytes)
        return self.memory[start : self.used]

    def device_array(self, array: np.ndarray) -> Any:
        """A CuPy array over the same memory, for operations that write rows in it; `array` itself if it is not pinned.

        Args:
            array: of this memory, such as a view of what `take` returned; strides are not negative

        The memory is kept as long as the CuPy array. The host must wait for a stream before it reads what that has
        written.
        Raises ValueError for an array that is not in this memory.
        """
        check_kind(np.ndarray, array=array)
        start, size = int(array.ctypes.data), reach(array.shape, array.strides, array.itemsize)
        first = start - self.address
        if size[0] < 0 or first < 0 or first + size[1] > len(self.memory):
            raise ValueError(f"array: got memory at {start:#x}, expected {len(self.memory)} bytes at {self.address:#x}")
        if not self.pinned:
            return array
        import cupy

        memory = cupy.cuda.UnownedMemory(start, size[1], array, cupy.cuda.runtime.getDevice())
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides)


def host_pool(num_bytes: int, pinned: bool | None = None) -> HostPool:
    """Memory on the host for swapped-out pages, exactly `num_bytes` long and zeroed.

    Args:
        pinned: whether it is CUDA's pinned memory, which kernels copy; None: if there is a device

    Raises CuPy's CUDARuntimeError if there is less memory.
    """
    check_integers(1, MAX_BYTES, num_bytes=num_bytes)
    if pinned is None:
        pinned = _has_device()
    memory = np.asarray(_Pinned(int(num_bytes))) if pinned else np.zeros(int(num_bytes), np.uint8)
    if pinned:
        memory[:] = 0
    return HostPool(memory, pinned)


def _has_device() -> bool:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:
        return False
