"""Whose stream a call runs on: the caller's current one, in the framework its arrays come from."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def callers(native: Any, framework: str, stream: Any = None) -> contextlib.AbstractContextManager[Any]:
    """A context in which CuPy's current device and stream are the caller's; nothing for host arrays.

    native     a borrowed array of the call
    framework  where the caller's arrays come from
    stream     what the caller asked for, or None for the framework's current stream
    """
    if isinstance(native, np.ndarray):
        return contextlib.nullcontext()
    device = native.device.id
    return on(device, current(framework, device) if stream is None else handle_of(stream))


def on(device: int, handle: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which CuPy's current device is `device` and its current stream `handle`; None: as it is there.

    device  a CUDA device, or -1 for host memory: nothing to do
    """
    if device < 0:
        return contextlib.nullcontext()
    cupy = sys.modules["cupy"]
    same_device = cupy.cuda.runtime.getDevice() == device
    if same_device and (handle is None or handle == cupy.cuda.get_current_stream(device).ptr):
        return contextlib.nullcontext()
    contexts = contextlib.ExitStack()
    contexts.enter_context(cupy.cuda.Device(device))
    if handle is not None:
        contexts.enter_context(cupy.cuda.ExternalStream(handle, device))
    return contexts


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on CuPy's current stream."""
    return bool(sys.modules["cupy"].cuda.get_current_stream().is_capturing())


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
