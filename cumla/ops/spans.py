"""Copies of spans of bytes between pages of many arrays at once, also to and from pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..arrays.memory import extent, share_elements
from ..dispatch.call import SLOTS, Call
from ..dispatch.values import plain_integers
from .blocks import on_device_of, page_bytes

COLUMNS = ("src array", "src page", "src byte", "dst array", "dst page", "dst byte", "bytes")
MOST_ARRAYS = 1 << 16
MOST_PAGE_BYTES = 2**31 - 1


@plain_integers
def copy_spans(
    src: Sequence[Array],
    dst: Sequence[Array],
    spans: Array,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Copy spans of bytes from pages of several arrays to pages of others, in one launch for up to 200 arrays each.

    Args:
        src: arrays, each [num_blocks, ...] of any dtype; a page is contiguous, pages may be any distance apart. All of
            them are on the host, or all on the device
        dst: the same, written; arrays of src may be among them
        spans: [n, 7] int64 or int32: number of the array in src, page, first byte in the page; number of the array in
            dst, page, first byte in the page; bytes. On the host, or where the arrays are; for copies between host and
            device it must be on the host. Pinned host memory (`cumla.pages.host_pool`) is copied by a kernel, other
            host memory span by span; it must stay allocated until the stream has copied it

    A span is skipped that is not within a page of its arrays. Padding between pages is not touched. Bytes that are both
    read and written by one call, and bytes written twice, end up with either content.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    call = Call(backend, stream)
    borrowed = {"src": _borrowed(call, "src", src), "dst": _borrowed(call, "dst", dst)}
    on_host = {name: _on_host(name, arrays) for name, arrays in borrowed.items()}
    across = bool(src) and bool(dst) and on_host["src"] != on_host["dst"]
    pages: dict[str, list[Any]] = {}
    for name, arrays in borrowed.items():
        pages[name] = []
        for argument in arrays:
            if not (across and on_host[name]):
                call.take(argument, writable=False)
            pages[name].append(_pages(argument.name, argument.native))
    argument = dlpack.argument(spans, "spans", stream=call.stream)
    native = argument.native
    if not isinstance(native, np.ndarray):
        call.take(argument)
        if across:
            raise ValueError("spans: got an array in CUDA memory, expected host memory to copy to or from the host")
    if native.dtype not in SLOTS:
        raise TypeError(f"spans: got dtype {native.dtype}, expected int64 or int32")
    call.check_shape("spans", native.shape, ("n", len(COLUMNS)))
    if on_host["dst"] == isinstance(native, np.ndarray):
        _check_apart(pages["dst"], native)
    if not (native.size and pages["src"] and pages["dst"]):
        return
    with call.kernels("spans") as kernels:
        if across:
            kernels.copy_spans_across(pages["src"], pages["dst"], native)
        else:
            kernels.copy_spans(pages["src"], pages["dst"], on_device_of(pages["src"][0], native))


def _borrowed(call: Call, name: str, arrays: Any) -> list[dlpack.Argument]:
    try:
        given = list(arrays)
    except TypeError:
        raise TypeError(f"{name}: got {type(arrays).__name__}, expected a list of arrays") from None
    if len(given) > MOST_ARRAYS:
        raise ValueError(f"{name}: got {len(given)} arrays, expected at most {MOST_ARRAYS}")
    writable = name == "dst"
    return [dlpack.argument(x, f"{name}[{i}]", writable, call.stream, any_float8=True) for i, x in enumerate(given)]


def _on_host(name: str, arrays: list[dlpack.Argument]) -> bool:
    """Whether all of these arrays are on the host. Raises ValueError where some are."""
    found = [isinstance(argument.native, np.ndarray) for argument in arrays]
    if any(found) and not all(found):
        i = found.index(not found[0])
        where = "host" if found[i] else "CUDA"
        raise ValueError(f"{name}[{i}]: got an array in {where} memory, expected it where {name}[0] is")
    return all(found)


def _check_apart(dst: list[Any], spans: Any) -> None:
    """Raise ValueError for an array that shares elements with the spans, which are in memory of the same kind."""
    place = extent(spans)
    for i, array in enumerate(dst):
        if extent(array).intersects(place) and share_elements(array, spans):
            raise ValueError(f"dst[{i}]: got elements that spans has too, expected memory of its own to write")


def _pages(name: str, native: Any) -> Any:
    pages = page_bytes(name, native)
    if pages.ndim > 1 and pages.size and pages.shape[1] > MOST_PAGE_BYTES and len(pages) > 1:
        raise ValueError(f"{name}: got pages of {pages.shape[1]} bytes, expected at most {MOST_PAGE_BYTES}")
    return pages if pages.size else pages.reshape(0, 1).view(np.uint8)
