"""Device memory that calls need beside their arguments, and plans of who does what, kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import dlpack, streams

ALIGNMENT = 256  # bytes


class Workspace:
    """Arrays by name that stay where they are, so that captured graphs may use them.

    Made empty. A call that needs an array, or a larger one, allocates it. What is outgrown is kept as long as the
    workspace: graphs that were captured with it use it still. While a graph is captured nothing is allocated.
    A workspace serves one stream at a time, on one device.

    memory    uint8 [n] on the device, to be used instead of allocating; a call says what it must have room for
    owner     what errors call it
    allocate  (bytes, like) -> uint8 [bytes] beside `like`; None: memory like any
    """

    def __init__(
        self, memory: Any = None, owner: str = "plan", allocate: Callable[[int, Any], Any] | None = None
    ) -> None:
        self.memory, self.owner, self._allocate = memory, owner, allocate
        self.contents: dict[str, Any] = {}  # what those who use an array note of what it holds; not when it is new
        self._arrays: dict[str, Any] = {}
        self._outgrown: list[Any] = []
        self._last = self._used = 0  # bytes of `memory` before the last array that was cut out of it, and with it
        self._place: int | None = None if memory is None else place_of(memory)

    def array(self, name: str, size: int, dtype: Any, like: Any, clear: Callable[[Any], None] | None = None) -> Any:
        """The flat array of this name, of at least `size` elements, beside `like`.

        clear  called with a new one, to make it zero

        Raises ValueError for a `like` on another device and where `memory` has no room, RuntimeError where an array
        would have to be allocated while a CUDA graph is captured.
        """
        self.check_place(like)
        dtype = np.dtype(dtype)
        held = self._arrays.get(name)
        if held is not None and held.size >= size and held.dtype == dtype:
            return held
        new = self._allocated(size, dtype, like, held) if self.memory is None else self._cut(size, dtype, held)
        if clear is not None:
            clear(new)
        if held is not None:
            self._outgrown.append(held)
        self._arrays[name], self._place = new, place_of(like)
        self.contents.pop(name, None)
        return new

    def shaped(self, name: str, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """The same as an array of this shape."""
        return self.array(name, math.prod(shape), dtype, like)[: math.prod(shape)].reshape(shape)

    def arrays(self) -> list[Any]:
        """All that are in use."""
        return list(self._arrays.values())

    def check_place(self, like: Any) -> None:
        """Raise ValueError if the workspace has its memory on another device than `like`."""
        place = place_of(like)
        if self._place not in (None, place):
            raise ValueError(
                f"{self.owner}: got memory {place_name(self._place)}, expected it {place_name(place)}, "
                "where the call's arrays are"
            )

    def _allocated(self, size: int, dtype: np.dtype[Any], like: Any, held: Any) -> Any:
        if not isinstance(like, np.ndarray) and streams.is_capturing():
            raise RuntimeError(
                f"{self.owner}: memory would have to be allocated while a CUDA graph is captured; "
                f"give a {self.owner} that has served a call of this shape before"
            )
        # At least twice as large as before: what is kept is then no more than what is in use.
        size = size if held is None else max(size, 2 * held.size)
        if self._allocate is None:
            return dlpack.empty((size,), dtype, like)
        return piece(self._allocate(size * dtype.itemsize, like), 0, (size,), dtype)

    def _cut(self, size: int, dtype: np.dtype[Any], held: Any) -> Any:
        first = self._used
        if held is not None and self._used == self._last + aligned_bytes(held.nbytes) and held.dtype == dtype:
            first = self._last  # the last piece grows where it is
        end = first + size * dtype.itemsize
        if end > self.memory.nbytes:
            raise ValueError(f"{self.owner}: got a workspace of {self.memory.nbytes} bytes, expected at least {end}")
        self._last, self._used = first, aligned_bytes(end)
        return piece(self.memory, first, (size,), dtype)


def piece(memory: Any, first: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> Any:
    """An array in memory, uint8 [n], from byte `first` on; strides in bytes, None: row-major."""
    if isinstance(memory, np.ndarray):
        return np.ndarray(shape, dtype, memory.data, first, strides)
    return type(memory)(shape, dtype, memory.data + first, strides)


def aligned_bytes(size: int) -> int:
    """So many bytes of a workspace's memory take this many."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place_of(array: Any) -> int:
    """The CUDA device of a NumPy or CuPy array; -1: host memory."""
    return -1 if isinstance(array, np.ndarray) else int(array.data.device_id)


def place_name(place: int | None) -> str:
    return "in host memory" if place is None or place < 0 else f"on CUDA device {place}"


class DecodePlan:
    """A plan for `sparse_mla_decode`, and the device memory that its kernels need beside their arguments.

    Made empty; the first call that is given the plan makes it, on the device, from that call's lengths, and
    the calls after it use it as it is. `renew` makes the next call plan again (metadata builders give every step a
    new plan). A plan decides who does what and never what the result is: one made for other lengths is slower, not
    wrong.

    The memory is allocated when it is first needed and then stays where it is, so that a captured graph whose
    plan has served an eager call allocates nothing. A graph plans for itself, in its first call with the plan, anew
    at every replay. One plan serves one stream at a time. The CPU backends do not need it.

    workspace  the Workspace of plans that are used one after another; or uint8 [n] on the device, to be used instead
               of allocating; what it must have room for is the backend's to say (`workspace_bytes` in
               kernels/cuda/sparse/work.py). None: one of its own
    """

    def __init__(self, workspace: Any = None) -> None:
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self.made_for: tuple[int, ...] | None = None  # the shape that the plan on the device is for

    def renew(self) -> None:
        """Let the next call plan again."""
        self.made_for = None

    def is_made(self, name: str, capture: int) -> bool:
        """Whether the workspace's array of this name holds this plan, made in this capture (0: outside of one)."""
        return self.made_for is not None and self.workspace.contents.get(name) == (self, self.made_for, capture)

    def made(self, shape: tuple[int, ...], name: str, capture: int) -> None:
        """Note that it does, for calls of this shape."""
        self.made_for = shape
        self.workspace.contents[name] = (self, shape, capture)

    def __repr__(self) -> str:
        return f"DecodePlan(made_for={self.made_for})"


class DenseDecodePlan:
    """The device memory that `dense_mla_decode` needs for partial results, kept from call to call.

    It is allocated when it is first needed and then stays where it is, also where a later call needs more: graphs
    that were captured with the plan go on. One plan serves one stream at a time. The CPU backends do not need it.

    workspace  as of a DecodePlan (`workspace_bytes` in kernels/cuda/dense_attention.py)
    """

    def __init__(self, workspace: Any = None) -> None:
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
