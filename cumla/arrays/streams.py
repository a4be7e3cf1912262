"""Whose stream a call runs on: the caller's current one, in the framework its arrays come from."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def callers(native: Any, framework: str, stream: Any = None) -> contextlib.AbstractContextManager[Any]:
    """A context in which CuPy's current device and stream are the caller's; nothing for host arrays.

    native     a borrowed array of the call
    framework  where the caller's arrays come from
    stream     what the caller asked for, or None for the framework's current stream
    """
    if isinstance(native, np.ndarray):
        return NOTHING
    device = native.device.id
    return on(device, current(framework, device) if stream is None else handle_of(stream))


def on(device: int, handle: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which CuPy's current device is `device` and its current stream `handle`; None: as it is there.

    device  a CUDA device, or -1 for host memory: nothing to do
    """
    return NOTHING if device < 0 else _Current(device, handle)


class _Current:
    """What `on` says. Nothing changes before `with`: CuPy keeps a stack, from which only the end of `with` takes."""

    __slots__ = ("_contexts", "_device", "_handle")

    def __init__(self, device: int, handle: int | None) -> None:
        self._device, self._handle = device, handle

    def __enter__(self) -> None:
        device, handle, cuda = self._device, self._handle, sys.modules["cupy"].cuda
        self._contexts = None
        same_device = cuda.runtime.getDevice() == device
        if same_device and (handle is None or handle == cuda.get_current_stream(device).ptr):
            return
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(cuda.Device(device))
            if handle is not None:
                contexts.enter_context(of_handle(handle, device))
            self._contexts = contexts.pop_all()

    def __exit__(self, *error: Any) -> None:
        if self._contexts is not None:
            self._contexts.close()


class InOrder:
    """Work that could run beside the caller's, and runs in its stream."""

    def branch(self) -> contextlib.AbstractContextManager[Any]:
        """A context whose work begins when what the current stream has been given so far is done."""
        return NOTHING

    def join(self) -> None:
        """What is queued on the current stream from now on begins when the work of all branches is done."""


class Side(InOrder):
    """A stream beside the caller's, on CuPy's current device, for work that may run while the caller's goes on.

    To be made outside of a capture. Within one, branches become those of the graph, and must be joined before its end.
    Not for callers whose work may itself run at the same time.
    """

    handles: ClassVar[set[int]] = set()  # of all that there are

    def __init__(self) -> None:
        cuda = sys.modules["cupy"].cuda
        self._stream = cuda.Stream(non_blocking=True)
        self._event = cuda.Event(disable_timing=True)  # a wait is for what was recorded when it was called
        self.handles.add(self._stream.ptr)
        weakref.finalize(self, self.handles.discard, self._stream.ptr)

    @contextlib.contextmanager
    def branch(self) -> Iterator[None]:
        self._event.record()
        self._stream.wait_event(self._event)
        with self._stream:
            yield

    def join(self) -> None:
        self._event.record(self._stream)
        sys.modules["cupy"].cuda.get_current_stream().wait_event(self._event)


class _Handle:
    """A stream that somebody else owns."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.lru_cache(maxsize=256)
def of_handle(handle: int, device: int) -> Any:
    """A CuPy stream for the handle of a stream of CUDA device `device`, whoever owns that. Kept: it costs to make."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream.from_external(_Handle(handle))


def is_capturing(handle: int | None = None) -> bool:
    """Whether a CUDA graph is being captured on a stream; None: CuPy's current one."""
    cuda = sys.modules["cupy"].cuda
    return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr if handle is None else handle))


def capture_id(handle: int | None = None) -> int:
    """A number of the CUDA graph that is being captured on a stream, 0 if none is; None: CuPy's current stream."""
    if handle is None:
        handle = int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    if not is_capturing(handle):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    ask(ctypes.c_void_p(handle), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value + 1


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """A context in which this thread may do what would end a capture that it is in: load code, ask events."""
    exchange, mode = _exchange_capture_mode(), ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))  # swaps the thread's mode and ours
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


def current(framework: str, device: int) -> int | None:
    """Handle of the current stream of `framework` on CUDA device `device`; None means CuPy's current one.

    JAX has no current stream outside its callbacks: its arrays are handed over in order by DLPack.
    """
    if framework == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    return None


def handle_of(stream: Any) -> int:
    """The handle of a stream given by the caller.

    stream  an int (a cudaStream_t), or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`
    Raises TypeError for anything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    for attribute in ("ptr", "cuda_stream"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(f"stream: got {type(stream).__name__}, expected a CUDA stream or its handle")
