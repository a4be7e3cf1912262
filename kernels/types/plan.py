"""Device memory for calls in addition to their arguments, and plans that divide work; calls share both."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import dlpack, streams

ALIGNMENT = 256  # bytes


class Workspace:
    """Arrays by name at fixed addresses, so that captured graphs may use them.

    It starts empty. A call that needs an array, or a larger one, allocates it. The workspace retains arrays that became
    too small, because graphs captured with them still use them. Nothing is allocated while a graph is captured.
    A workspace serves one stream at a time, on one device.

    Args:
        memory: uint8 [n] on the device, used instead of allocating; a call's error states the size it needs
        owner: name in error messages
        allocate: (bytes, like) -> uint8 [bytes] on the device of `like`; None: cumla allocates
    """

    def __init__(
        self, memory: Any = None, owner: str = "plan", allocate: Callable[[int, Any], Any] | None = None
    ) -> None:
        self.memory, self.owner, self._allocate = memory, owner, allocate
        self.contents: dict[str, Any] = {}  # what an array contains, by name; a new array has no entry
        self.cache_key: Any = None  # what the launch cache knows of the arrays
        self._arrays: dict[tuple[str, np.dtype[Any]], Any] = {}
        self._outgrown: list[Any] = []
        self._last = self._used = 0  # bytes of `memory` before and after the last array
        self._place: int | None = None if memory is None else place_of(memory)

    def array(self, name: str, size: int, dtype: Any, like: Any, clear: Callable[[Any], None] | None = None) -> Any:
        """The flat array of this name and dtype, of at least `size` elements, on the device of `like`.

        Args:
            clear: called with a new array, to set it to zero

        Raises ValueError for a `like` on another device and if `memory` is too small, RuntimeError if an array
        would have to be allocated while a CUDA graph is captured.
        """
        self.check_place(like)
        dtype = np.dtype(dtype)
        current = self._arrays.get((name, dtype))
        if current is not None and current.size >= size:
            return current
        new = self._allocated(size, dtype, like, current) if self.memory is None else self._cut(size, dtype, current)
        if clear is not None:
            clear(new)
        if current is not None:
            self._outgrown.append(current)
        self._arrays[name, dtype], self._place = new, place_of(like)
        self.cache_key = None
        self.contents.pop(name, None)
        return new

    def shaped(self, name: str, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """The same as an array of this shape."""
        size = math.prod(shape)
        return self.array(name, size, dtype, like)[:size].reshape(shape)

    def address(self, name: str, dtype: Any, size: int) -> int | None:
        """The address of the array of this name; None if there is none of that size."""
        current = self._arrays.get((name, dtype))
        return None if current is None or current.size < size else int(current.data.ptr)

    def named_arrays(self) -> dict[tuple[str, Any], Any]:
        """All arrays in use, by name and dtype."""
        return dict(self._arrays)

    def arrays(self) -> list[Any]:
        """All arrays in use."""
        return list(self._arrays.values())

    def check_place(self, like: Any) -> None:
        """Raise ValueError if the workspace has its memory on another device than `like`."""
        place = place_of(like)
        if self._place not in (None, place):
            raise ValueError(
                f"{self.owner}: got memory {place_name(self._place)}, expected memory {place_name(place)}, "
                "where the call's arrays are"
            )

    def _allocated(self, size: int, dtype: np.dtype[Any], like: Any, current: Any) -> Any:
        if not isinstance(like, np.ndarray) and streams.is_capturing():
            raise RuntimeError(
                f"{self.owner}: memory would have to be allocated while a CUDA graph is captured; "
                f"give a {self.owner} that has served a call of this shape before"
            )
        # At least twice as large as before: retained arrays then take no more memory than arrays in use.
        size = size if current is None else max(size, 2 * current.size)
        if self._allocate is None:
            return dlpack.empty((size,), dtype, like)
        return piece(self._allocate(size * dtype.itemsize, like), 0, (size,), dtype)

    def _cut(self, size: int, dtype: np.dtype[Any], current: Any) -> Any:
        first = self._used
        if current is not None and self._used == self._last + aligned_bytes(current.nbytes):
            first = self._last  # the last piece grows in place
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
    """Bytes of a workspace's memory for an array of `size` bytes, with alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place_of(array: Any) -> int:
    """The CUDA device of a NumPy or CuPy array; -1: host memory."""
    return -1 if isinstance(array, np.ndarray) else int(array.data.device_id)


def place_name(place: int | None) -> str:
    return "in host memory" if place is None or place < 0 else f"on CUDA device {place}"


class _Plan:
    """How the work of a decode is divided: memory, and the shape for which the division in it was computed.

    Attributes:
        batch_invariant: whether the plan is for calls whose division does not depend on the batch
    """

    arrays: tuple[str, str]  # names of the division in the workspace, outside a capture and inside

    def __init__(self, workspace: Any = None, *, batch_invariant: bool = False) -> None:
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self.batch_invariant = bool(batch_invariant)
        self.made_for: tuple[int, ...] | None = None  # the shape for which the plan on the device was computed

    def renew(self) -> None:
        """Let the next call plan again."""
        self.made_for = None

    def is_made(self, name: str, capture: int) -> bool:
        """Whether the workspace's array of this name holds this plan, computed in this capture (0: outside one)."""
        return self.made_for is not None and self.workspace.contents.get(name) == (self, self.made_for, capture)

    def made(self, shape: tuple[int, ...], name: str, capture: int) -> None:
        """Record that the array of this name holds this plan, for calls of this shape."""
        self.made_for = shape
        self.workspace.contents[name] = (self, shape, capture)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(made_for={self.made_for})"


class DecodePlan(_Plan):
    """A plan for `sparse_mla_decode`, and the device memory that its kernels need in addition to their arguments.

    It starts empty. The first call with the plan computes it on the device from that call's lengths, and
    later calls reuse it. `renew` makes the next call plan again (metadata builders give every step a
    new plan). A plan divides the work and never changes the result: a plan for other lengths is slower,
    not wrong.

    The memory is allocated when it is first needed and then keeps its address, so that a captured graph whose
    plan has served an eager call allocates nothing. A graph has its own plan, computed in its first call with the plan
    and again at every replay. One plan serves one stream at a time. The CPU backends do not need it.

    Attributes:
        workspace: the Workspace of plans that are used one after another; or uint8 [n] on the device, used instead of
            allocating, with the size that the backend needs (`workspace_bytes` in kernels/cuda/sparse/work.py). None:
            the plan has its own workspace
        batch_invariant: as the calls with the plan have it; another call raises ValueError
    """

    arrays = "starts", "starts of graphs"


class DenseDecodePlan(_Plan):
    """A plan for `dense_mla_decode`, and the device memory that its kernels need for partial results.

    The first call with the plan divides the keys by that call's lengths, on the device, and later calls of the same
    batch size reuse the division: the layers of a step share a plan. `renew` makes the next call divide again; call it
    once a step. A plan for other lengths, shorter or longer, is slower, not wrong: results then differ within the
    bound of their error.

    The memory is allocated when it is first needed and then keeps its address, even if a later call needs more: graphs
    that were captured with the plan stay valid. A graph divides in its first call with the plan, and again at every
    replay. One plan serves one stream at a time. The CPU backends do not need it. Bits of batch-invariant calls are
    promised for the lengths of the plan alone.

    Attributes:
        workspace: as for a DecodePlan (`workspace_bytes` in kernels/cuda/dense_attention.py)
        batch_invariant: as for a DecodePlan
    """

    arrays = "division", "division of graphs"
