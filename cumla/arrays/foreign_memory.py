"""Memory of other libraries that NumPy and CuPy use, and that stays allocated until they are done."""

from __future__ import annotations

import collections
import sys
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from . import streams
from .whole_import import import_whole

LEGACY_STREAM = 1  # DLPack's handle of the default stream; DLPack reserves 0


class NoCuPyError(ValueError):
    """An array in CUDA memory, but CuPy is not installed."""


def cupy_module() -> Any:
    try:
        cupy = import_whole("cupy")
        if hasattr(cupy, "ndarray"):  # else another package of that name
            return cupy
    except ImportError:
        pass
    raise NoCuPyError(
        "got an array in CUDA memory, which needs CuPy: pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x)"
    )


class UntilDone:
    """Keeps another library's device memory alive until the work that a stream got while it was borrowed is done.

    The library may reuse released memory at once, because it does not know the stream of this work.
    """

    _waiting: ClassVar[collections.deque[tuple[Any, Any]]] = collections.deque()  # (event, owner of the memory)

    def __init__(self, owner: Any, device: int, stream: int) -> None:
        self._owner, self._device, self._stream = owner, device, stream

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if streams.is_capturing(self._stream):
            return  # a caller that replays a graph must keep its memory alive
        waiting = self._waiting
        with cupy_module().cuda.Device(self._device), streams.relaxed_capture():
            waiting.append((recorded(streams.of_handle(self._stream, self._device)), self._owner))
            while waiting:
                try:  # popped before the test: another thread may test entries, too
                    entry = waiting.popleft()
                except IndexError:
                    return
                if not entry[0].done:
                    waiting.appendleft(entry)
                    return


def recorded(stream: Any) -> Any:
    """An event after all work queued on a stream so far."""
    event = cupy_module().cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def user_stream(stream: int | None) -> int:
    """The handle, in DLPack's convention, of the stream that will use an array; None: CuPy's current stream."""
    handle = cupy_module().cuda.get_current_stream().ptr if stream is None else stream
    return handle or LEGACY_STREAM


class HostMemory:
    """Foreign host memory for NumPy, kept alive by `owner`."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        read_only: bool,
        owner: Any,
    ) -> None:
        typestr = f"<u{dtype.itemsize}" if dtype.kind == "V" or dtype == ml_dtypes.bfloat16 else dtype.str
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "data": (address, read_only),
        }
