"""The communicator protocol: three collectives that move arrays between ranks."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays import dlpack


class Communicator(Protocol):
    """One rank's collectives with the others. All ranks make the same calls in the same order.

    Attributes:
        rank, size: this rank, from 0, and the number of ranks
        traffic: bytes that this rank has sent, by function

    A tuple of arrays is exchanged in one collective; `out` and the result are then tuples. With `out`, a call
    allocates nothing.
    """

    traffic: collections.Counter[str]

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def memory(self, nbytes: int, like: Any) -> Any:
        """uint8 [nbytes] on the device of `like`, in memory that `all_gather` is fastest with; not for `all_to_all`.

        All ranks call this with the same size.
        """

    def all_gather(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Every rank's x, as [size, *x.shape]. An x that is out[rank] is not copied."""

    def reduce_scatter(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """The sum of all ranks' x[rank], where rank is this rank. x is [size, ...], the result [...]."""

    def all_to_all(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Every rank's x[rank], where rank is this rank. x and the result are [size, ...]."""


class Move(NamedTuple):
    """The sent and the received array of a collective."""

    sent: Any
    received: Any


OPS = ("all_gather", "reduce_scatter", "all_to_all")


def moves(op: str, rank: int, size: int, x: Any, out: Any) -> list[Move]:
    """The arrays of a call, NumPy or CuPy; allocates `out` if it is None.

    Raises TypeError or ValueError for arrays that do not fit: not contiguous, of another shape or dtype, on another
    device, or overlapping, which would send received data on.
    """
    sent, received = as_tuple(x), (None,) * len(as_tuple(x)) if out is None else as_tuple(out)
    if not sent:
        raise ValueError("x: got no arrays, expected at least one")
    if len(sent) != len(received):
        raise ValueError(f"out: got {len(received)} arrays, expected {len(sent)} as x has")
    arrays = [_move(op, size, *pair) for pair in zip(sent, received, strict=True)]
    if out is not None:
        _check_apart(op, rank, arrays)
    return arrays


def _check_apart(op: str, rank: int, arrays: list[Move]) -> None:
    """Raise ValueError if a written array overlaps with another array of the call, except in a rank's own part."""
    sent, received = ([_span(array) for array in side] for side in zip(*arrays, strict=True))
    for i, (start, end) in enumerate(received):
        others = [span for j, span in enumerate(received) if j != i]
        for j, (first, last) in enumerate(sent):
            part = min(end - start, last - first)  # a rank's part, if one of the arrays has a part for each rank
            own = {"all_gather": first - start, "reduce_scatter": start - first}.get(op)
            if i != j or own != rank * part:
                others.append((first, last))
        if any(start < last and first < end for first, last in others):
            where = {"all_gather": ", or x at out[rank]", "reduce_scatter": ", or out at x[rank]"}.get(op, "")
            raise ValueError(f"out: got memory of another array of the call, expected its own{where}, to {op}")


def _span(array: Any) -> tuple[int, int]:
    """The first byte of a contiguous array, and the one after its last."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return start, start + array.nbytes


def _move(op: str, size: int, x: Any, out: Any) -> Move:
    x = dlpack.borrow(x, "x")
    if x.dtype.hasobject:
        raise TypeError(f"x: got dtype {x.dtype}, expected numbers")
    shape = (size, *x.shape) if op == "all_gather" else x.shape[1:] if op == "reduce_scatter" else x.shape
    if op != "all_gather" and (not x.ndim or x.shape[0] != size):
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected [{size}, ...], a part for each rank, to {op}")
    if not x.flags.c_contiguous:
        raise ValueError(f"x: got strides {x.strides} bytes, expected a contiguous array")
    if out is None:
        return Move(x, dlpack.empty(shape, x.dtype, x))
    out = dlpack.borrow(out, "out", writable=True)
    if out.dtype != x.dtype:
        raise TypeError(f"out: got dtype {out.dtype}, expected {x.dtype} as x has")
    if out.shape != shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}, expected {tuple(shape)}")
    if not out.flags.c_contiguous:
        raise ValueError(f"out: got strides {out.strides} bytes, expected a contiguous array")
    if isinstance(x, np.ndarray) != isinstance(out, np.ndarray):
        got, expected = ("host" if isinstance(array, np.ndarray) else "device" for array in (out, x))
        raise ValueError(f"out: got {got} memory, expected {expected} memory as x has")
    return Move(x, out)


def described(op: str, arrays: list[Move]) -> str:
    """A description of a call that is equal on two ranks exactly if they make the same call."""
    return f"{op} of " + " and ".join(f"{move.sent.dtype} {list(move.sent.shape)}" for move in arrays)


def sent_bytes(op: str, size: int, arrays: list[Move]) -> int:
    """The bytes that a rank sends to others in a call."""
    total = sum(move.sent.nbytes for move in arrays)
    return total * (size - 1) if op == "all_gather" else total * (size - 1) // size


def copy(to: Any, source: Any) -> None:
    """Copy as bytes, as CuPy does not know every type."""
    bits = f"u{to.dtype.itemsize}"
    to.view(bits)[...] = source.view(bits)


def as_tuple(arrays: Any) -> tuple[Any, ...]:
    return tuple(arrays) if isinstance(arrays, (tuple, list)) else (arrays,)


def result_of(x: Any, arrays: list[Move], framework: str) -> Any:
    """The result of a call: a tuple if x is one."""
    results = tuple(dlpack.give(move.received, framework) for move in arrays)
    return results if isinstance(x, (tuple, list)) else results[0]
