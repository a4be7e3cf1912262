"""Copies of whole pages: within a cache, between caches, and to and from host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..arrays.memory import extent
from ..dispatch.call import BYTES, SLOTS, Call
from ..dispatch.formats import bytes_of
from ..dispatch.launch_cache import launch_cached


@launch_cached
def swap_blocks(
    src: Array,
    dst: Array,
    src_to_dst: Array,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Copy pages of one cache into pages of another; either cache may be on the host or on the device.

    Args:
        src: [num_blocks, ...] any dtype; a page is contiguous, pages may be any distance apart
        dst: [num_blocks, ...] with pages of src's shape and dtype, written
        src_to_dst: [n, 2] int64 or int32, pairs of block numbers, on the host or where the caches are. For copies
            between host and device it must be on the host, and each page is one asynchronous copy. Copies of unpinned
            host memory are effectively synchronous; pinned memory must stay allocated until the stream has copied it

    A pair out of range is skipped; padding between pages is not touched. Pages that are both read and written
    by one call, and pages written twice, end up with either content.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM swap_blocks.
    """
    call = Call(backend, stream)
    of_source = dlpack.argument(src, "src", stream=call.stream, any_float8=True)
    source_on_host = isinstance(of_source.native, np.ndarray)
    if not source_on_host:
        call.take(of_source)
    of_destination = dlpack.argument(dst, "dst", True, call.stream, any_float8=True)
    across = isinstance(of_destination.native, np.ndarray) != source_on_host
    if source_on_host and not across:
        call.take(of_source)
    if source_on_host or not across:
        call.take(of_destination, writable=not across)
    source, destination = of_source.native, of_destination.native
    if source.dtype != destination.dtype:
        raise TypeError(f"dst: got dtype {destination.dtype}, expected {source.dtype} as src has")
    if source.shape[1:] != destination.shape[1:]:
        raise ValueError(f"dst: got pages of shape {destination.shape[1:]}, expected {source.shape[1:]} as src has")
    source, destination = page_bytes("src", source), page_bytes("dst", destination)
    if not across:
        call.uses("src", source)
        call.uses("dst", destination, writable=True)
        call.may_share = same_pages
    pairs = block_pairs(call, "src_to_dst", src_to_dst)
    if across and not isinstance(pairs, np.ndarray):
        raise ValueError("src_to_dst: got an array in CUDA memory, expected host memory to copy to or from the host")
    if pairs.size and source.size and destination.size:
        with call.kernels("blocks") as kernels:
            if across:
                kernels.copy_blocks_across(source, destination, pairs)
            else:
                kernels.copy_blocks(source, destination, on_device_of(source, pairs))


@launch_cached
def copy_blocks(
    kv_caches: Sequence[Array],
    src_to_dsts: Array,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Copy the same pages within each of several caches.

    Args:
        kv_caches: caches, each [num_blocks, ...] of any dtype; a page is contiguous, pages may be any distance apart
        src_to_dsts: [n, 2] int64 or int32, pairs of block numbers, on the host or where the caches are

    A pair out of range is skipped; padding between pages is not touched. Pages that are both read and written
    by one call, and pages written twice, end up with either content.

    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM copy_blocks_mla.
    """
    call = Call(backend, stream)
    call.may_share = same_pages
    try:
        arrays, caches = list(kv_caches), []
    except TypeError:
        raise TypeError(f"kv_caches: got {type(kv_caches).__name__}, expected a list of arrays") from None
    for i, cache in enumerate(arrays):
        native = call.borrow(f"kv_caches[{i}]", cache, writable=True, any_float8=True).native
        caches.append(page_bytes(f"kv_caches[{i}]", native))
        call.uses(f"kv_caches[{i}]", caches[-1], writable=True)
    pairs = block_pairs(call, "src_to_dsts", src_to_dsts)
    if not caches or not pairs.size:
        return
    with call.kernels("blocks") as kernels:
        pairs = on_device_of(caches[0], pairs)
        for cache in caches:
            if cache.size:
                kernels.copy_blocks(cache, cache, pairs)


def page_bytes(name: str, native: Any) -> Any:
    """A cache [num_blocks, ...] as its pages' bytes, uint8 [num_blocks, page_bytes]."""
    if native.ndim < 2:
        raise ValueError(f"{name}: got shape {tuple(native.shape)}, expected [num_blocks, ...]")
    if not native.size:  # nothing to copy, strides do not matter
        return native
    contiguous = native.itemsize
    for size, stride in zip(reversed(native.shape[1:]), reversed(native.strides[1:]), strict=True):
        if size > 1 and stride != contiguous:
            raise ValueError(f"{name}: got strides {native.strides} bytes, expected contiguous pages")
        contiguous *= size
    if len(native) > 1 and native.strides[0] < contiguous:
        raise ValueError(f"{name}: got pages {native.strides[0]} bytes apart, expected at least {contiguous}")
    return bytes_of(native, len(native), math.prod(native.shape[1:]) * native.itemsize)


def same_pages(source: Any, destination: Any) -> bool:
    """Whether the pages of two caches that share memory coincide, as in views of one cache."""
    if source.dtype != BYTES[0] or destination.dtype != BYTES[0]:  # pairs of block numbers
        return False
    distance = extent(destination).address - extent(source).address
    steps = {cache.strides[0] for cache in (source, destination) if len(cache) > 1}
    return distance == 0 if not steps else len(steps) == 1 and distance % steps.pop() == 0


def block_pairs(call: Call, name: str, value: Any) -> Any:
    """Check pairs of block numbers, [n, 2], on the host or a device."""
    argument = dlpack.argument(value, name, stream=call.stream)
    pairs = argument.native
    if not isinstance(pairs, np.ndarray):
        call.take(argument)
    if pairs.dtype not in SLOTS:
        raise TypeError(f"{name}: got dtype {pairs.dtype}, expected int64 or int32")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"{name}: got shape {tuple(pairs.shape)}, expected [n, 2]")
    call.uses(name, pairs)
    return pairs


def on_device_of(cache: Any, pairs: Any) -> Any:
    """The pairs on the cache's device; pairs on the host are copied to it."""
    return dlpack.namespace_of(cache).asarray(pairs) if isinstance(pairs, np.ndarray) else pairs
