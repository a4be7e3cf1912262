"""Device memory of calls that are given no plan: a Workspace for each stream and thread, kept from call to call.

A call's kernels run in the order of its stream, so the next call of the stream may use the same memory. Two threads
that launch on one stream may take turns within a call, so each has memory of its own.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...arrays import streams
from .described import DescribedArray, DescribedWorkspace
from .plan import Workspace

MOST_STREAMS = 16  # workspaces: those used longest ago are dropped
MOST_BYTES = 128 << 20  # of an array that is kept; a larger one is allocated for each call


class StreamWorkspace(Workspace):
    """The memory of one stream. Captured graphs do not use it, so arrays that were outgrown are dropped."""

    allocations = 0  # of all streams
    _numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self._numbers)  # no other workspace has had it
        self.requested: dict[tuple[str, np.dtype[Any]], int] = {}  # sizes, of the last request for each array

    def array(self, name: str, size: int, dtype: Any, like: Any, clear: Callable[[Any], None] | None = None) -> Any:
        # Cleared by a memset: launches of `clear` are left out where a call only asks for its programs.
        found = super().array(name, size, dtype, like, clear and _clear)
        self._outgrown.clear()
        self.requested[name, found.dtype] = size
        return found

    def _allocated(self, size: int, dtype: np.dtype[Any], like: Any, current: Any) -> Any:
        StreamWorkspace.allocations += 1
        return super()._allocated(size, dtype, like, current)


def _clear(array: Any) -> None:
    array.data.memset_async(0, array.nbytes)


_lock = threading.Lock()
_workspaces: collections.OrderedDict[tuple[int, int, int], StreamWorkspace] = collections.OrderedDict()


def workspace_of_stream(like: Any) -> Workspace:
    """The workspace of CuPy's current stream for a call with the array `like`; while a graph is captured an empty one,
    whose first array is an error."""
    if isinstance(like, DescribedArray):
        return DescribedWorkspace()
    handle = int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    if streams.is_capturing(handle):
        return Workspace()
    key = _key(like.data.device_id, handle)
    with _lock:
        found = _workspaces.get(key)
        if found is None:
            found = _workspaces[key] = StreamWorkspace()
            while len(_workspaces) > MOST_STREAMS:
                _workspaces.popitem(last=False)
        _workspaces.move_to_end(key)
    return found


def known_workspace(device: int, handle: int) -> StreamWorkspace | None:
    """The workspace of a stream of the CUDA device; None if no call of this thread needed one there."""
    key = _key(device, handle)
    with _lock:
        found = _workspaces.get(key)
        if found is not None:
            _workspaces.move_to_end(key)
    return found


def forget_workspace(device: int, handle: int) -> None:
    """Drop the workspace of a stream in which a call did not launch all of its kernels: counters may not be zero."""
    with _lock:
        _workspaces.pop(_key(device, handle), None)


@contextlib.contextmanager
def workspace_of_call(like: Any) -> Iterator[Workspace]:
    """The workspace of CuPy's current stream for the launches of one call."""
    try:
        yield workspace_of_stream(like)
    except BaseException:
        if isinstance(like, DescribedArray):
            raise
        handle = int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        if not streams.is_capturing(handle):
            forget_workspace(like.data.device_id, handle)
        raise


def release_memory() -> None:
    """Drop the device memory that is kept for calls without a plan and without a workspace.

    Such calls keep at most 35 MB a stream and thread for partial results of attention, and up to 128 MiB for the scores
    of a top-k or the converted rows of an FP8 prefill; of 16 streams at most. Later calls allocate it again. Plans,
    workspaces and graphs of the caller are not touched.
    """
    with _lock:
        _workspaces.clear()


def _key(device: int, handle: int) -> tuple[int, int, int]:
    return device, streams.number_of(handle), threading.get_ident()
