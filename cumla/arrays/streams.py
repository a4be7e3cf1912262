"""The stream of a call: the caller's current one, in the framework of the call's arrays."""

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


def callers(native: Any, framework: str, stream: Any = None) -> Current:
    """A context in which CuPy's current device and stream are the caller's; without effect for host arrays.

    Args:
        native: a borrowed array of the call
        framework: the framework of the caller's arrays
        stream: the stream given by the caller, or None for the framework's current stream
    """
    if isinstance(native, np.ndarray):
        return Current(-1)
    device = native.data.device_id
    return Current(device, current(framework, device) if stream is None else handle_of(stream))


class Current:
    """A context in which CuPy's current device is `device` and its current stream `handle`; may be entered again.

    Args:
        device: a CUDA device, or -1 for host memory: nothing to do
        handle: handle of a stream; None: CuPy's current stream

    Nothing changes before `with`: only the end of `with` pops CuPy's stack of streams.
    """

    __slots__ = ("_entered", "device", "handle")

    def __init__(self, device: int, handle: int | None = None) -> None:
        self.device, self.handle = device, handle
        self._entered: list[contextlib.ExitStack | None] = []

    def __enter__(self) -> None:
        device, handle = self.device, self.handle
        if device < 0:
            return
        cuda = sys.modules["cupy"].cuda
        same_device = cuda.runtime.getDevice() == device
        if same_device and (handle is None or handle == cuda.get_current_stream(device).ptr):
            self._entered.append(None)
            return
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(cuda.Device(device))
            if handle is not None:
                contexts.enter_context(of_handle(handle, device))
            self._entered.append(contexts.pop_all())

    def __exit__(self, *error: Any) -> None:
        contexts = self._entered.pop() if self._entered else None
        if contexts is not None:
            contexts.close()

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the stream."""
        return self.device >= 0 and is_capturing(self.handle)


class InOrder:
    """Work that could run concurrently with the caller's, but runs on its stream."""

    def branch(self) -> contextlib.AbstractContextManager[Any]:
        """A context whose work begins after the work that is already queued on the current stream."""
        return NOTHING

    def join(self) -> None:
        """Make later work on the current stream wait for the work of all branches."""


class Side(InOrder):
    """A second stream on CuPy's current device, for work that may run concurrently with the caller's.

    A Side must be created outside of captures. Within a capture, branches become branches of the graph, and must be
    joined before its end. Callers that run concurrently with each other must not share one.
    """

    handles: ClassVar[set[int]] = set()  # of all side streams

    def __init__(self) -> None:
        cuda = sys.modules["cupy"].cuda
        self._stream = cuda.Stream(non_blocking=True)
        self._event = cuda.Event(disable_timing=True)  # can be reused: a wait refers to the last record before it
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
    """A stream that another library owns."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.lru_cache(maxsize=256)
def of_handle(handle: int, device: int) -> Any:
    """A CuPy stream for the handle of any library's stream of CUDA device `device`. Cached: creation is expensive."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream.from_external(_Handle(handle))


def is_capturing(handle: int | None = None) -> bool:
    """Whether a CUDA graph is being captured on a stream; None: CuPy's current one."""
    cuda = sys.modules["cupy"].cuda
    return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr if handle is None else handle))


def is_any_capturing() -> bool:
    """Whether a CUDA graph is being captured on torch's or on CuPy's current stream."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    torch_captures = getattr(cuda, "is_current_stream_capturing", None)  # missing while torch is being imported
    return (torch_captures is not None and cuda.is_available() and bool(torch_captures())) or is_capturing()


def capture_id(handle: int | None = None) -> int:
    """The id of the CUDA graph that is being captured on a stream, 0 if none is; None: CuPy's current stream."""
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
    """A context in which calls that would otherwise end this thread's capture are allowed: load code, query events."""
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
    """Handle of the current stream of `framework` on CUDA device `device`; None: CuPy's current stream.

    JAX has no current stream outside its callbacks: DLPack orders the work on its arrays.
    """
    if framework == "torch":
        torch = sys.modules["torch"]
        # Triton and torch's compiler use this function, too: it takes a tenth of the public one's time.
        handle = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
        return int(torch.cuda.current_stream(device).cuda_stream if handle is None else handle(device))
    return None


def number_of(handle: int) -> int:
    """The number that CUDA gives a stream. Unlike the handle, no later stream gets it. The per-thread default stream
    has one in each thread."""
    if not handle:  # the default stream of all threads, which is never freed
        return -1
    number = ctypes.c_uint64()
    status = _stream_number()(ctypes.c_void_p(handle), ctypes.byref(number))
    if status:
        raise RuntimeError(f"cuStreamGetId: status {status} for the stream {handle:#x}")
    return number.value


@functools.cache
def _stream_number() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuStreamGetId


def handle_of(stream: Any) -> int:
    """The handle of a caller's stream.

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
