"""Copies of spans of bytes between pages of many arrays."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .compile import kernel
from .constants import constant
from .launch import C_NAMES, strides

SOURCE = "common/copy_spans.cu"
THREADS, CHUNK = constant(SOURCE, "THREADS"), constant(SOURCE, "CHUNK")
ARRAYS, KINDS = constant(SOURCE, "ARRAYS"), constant(SOURCE, "KINDS")
MOST_PIECES = 64  # CTAs of a span


class Side(NamedTuple):
    """Arrays that one launch takes.

    Attributes:
        first: number of the first array
        packed: the members of the kernel's Side
        page_bytes: most bytes of a page
    """

    first: int
    packed: tuple[int, ...]
    page_bytes: int


def copy_spans(src: Sequence[Any], dst: Sequence[Any], spans: Any) -> None:
    name = C_NAMES[spans.dtype.name]
    run = kernel(SOURCE, "copy_spans", SPAN=name)
    for source, target in itertools.product(list(sides(src)), list(sides(dst))):
        pieces = min(-(-min(source.page_bytes, target.page_bytes) // CHUNK), MOST_PIECES)
        run(
            (len(spans) * pieces,),
            (THREADS,),
            (*source.packed, *target.packed, spans, *strides(spans), source.first, target.first, pieces),
            overlap=True,
        )


def sides(arrays: Sequence[Any]) -> Iterator[Side]:
    """The arrays in as few launches as hold them, usually one."""
    first = 0
    while first < len(arrays):
        kinds: list[tuple[int, int, int]] = []
        ends: list[int] = []
        starts: list[int] = []
        for array in arrays[first : first + ARRAYS]:
            kind = array.strides[0] if len(array) > 1 else 0, array.shape[1], len(array)
            if not kinds or kinds[-1] != kind:
                if len(kinds) == KINDS:
                    break
                kinds.append(kind)
                ends.append(0)
            starts.append(address(array) if array.size else 0)
            ends[-1] = len(starts)
        missing = KINDS - len(kinds)
        columns = list(zip(*kinds, *[(0, 0, 0)] * missing, strict=True))
        ends += [ends[-1]] * missing
        packed = (*starts, *[0] * (ARRAYS - len(starts)), *itertools.chain(*columns), *ends)
        yield Side(first, packed, max(kind[1] for kind in kinds))
        first += len(starts)


def address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def copy_spans_across(src: Sequence[Any], dst: Sequence[Any], spans: np.ndarray) -> None:
    """Copies between host and device memory: by one kernel if the host's memory is pinned, else span by span."""
    import cupy

    on_host = src if isinstance(src[0], np.ndarray) else dst
    if all(is_accessible(array) for array in on_host if array.size):
        copy_spans(src, dst, cupy.asarray(spans))
    else:
        copy_each(src, dst, spans)


def is_accessible(array: np.ndarray) -> bool:
    """Whether a device reads the first and the last byte of a host array where they are, as of pinned memory."""
    import cupy

    last = array.ctypes.data + (len(array) - 1) * array.strides[0] + array.shape[1] - 1
    attributes = cupy.cuda.runtime.pointerGetAttributes
    return all(attributes(at).devicePointer == at for at in (array.ctypes.data, last))


def copy_each(src: Sequence[Any], dst: Sequence[Any], spans: np.ndarray) -> None:
    """Copy each span by an asynchronous copy; of memory that is not pinned it is effectively synchronous."""
    import cupy

    runtime = cupy.cuda.runtime
    kind = runtime.memcpyHostToDevice if isinstance(src[0], np.ndarray) else runtime.memcpyDeviceToHost
    stream = cupy.cuda.get_current_stream().ptr
    for source, source_page, first, target, target_page, at, size in spans.tolist():
        origin, to = place(src, source, source_page, first, size), place(dst, target, target_page, at, size)
        if origin and to and size:
            runtime.memcpyAsync(to, origin, size, kind, stream)


def place(arrays: Sequence[Any], array: int, page: int, first: int, size: int) -> int:
    """Address of the first byte of a span, 0 if it is not within a page of an array."""
    if not 0 <= array < len(arrays) or size < 0 or first < 0:
        return 0
    pages, page_bytes = arrays[array].shape
    if not 0 <= page < pages or first + size > page_bytes:
        return 0
    return address(arrays[array]) + page * int(arrays[array].strides[0]) + first
