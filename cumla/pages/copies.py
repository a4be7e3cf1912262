"""Copies of pages of all groups at once: within a device, and to and from host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dispatch.values import check_kind, shown
from ..ops.spans import copy_spans
from .pools import Pools

INTEGERS = "iu"


def copy_pages(
    src: Pools, dst: Pools, pages: Mapping[str, Any], *, backend: str | None = None, stream: Any = None
) -> None:
    """Copy pages of several groups, in all layers, by one launch.

    Args:
        src, dst: pools of equal descriptions, on the device or on the host; dst is written. They may be the same
        pages: by group, integers [n, 2] on the host: page of src, page of dst. Groups may be missing

    A page that is both read and written ends with either content. Pinned host memory (`host_pool`) must stay allocated
    until the stream has copied it, which HostPool sees to.
    Raises TypeError or ValueError, before anything is written, for a page that a pool lacks, a page that is written
    twice, and pools of other pages.
    """
    check_kind(Pools, src=src, dst=dst)
    check_kind(Mapping, pages=pages)
    _check_equal_pages(src, dst)
    names = [group.name for group in src.description]
    for name in pages:
        if name not in names:
            raise ValueError(f"pages: got {shown(name)}, expected groups of {', '.join(names)}")
    pairs = {name: _pairs(name, value, src, dst) for name, value in pages.items()}
    numbers: dict[str, list[int]] = {}  # of the arrays of each group
    for number, pool in enumerate(src.pools):
        numbers.setdefault(pool.group.name, []).append(number)
    found = []
    for name, its in pairs.items():
        if len(its) and name in numbers:
            spans = np.empty((len(numbers[name]), len(its), 7), np.int32)  # by array, then by pair
            spans[0, :, 1], spans[0, :, 4] = its.T
            spans[0, :, 2] = spans[0, :, 5] = 0
            spans[1:] = spans[0]
            for span, number in zip(spans, numbers[name], strict=True):
                span[:, 0] = span[:, 3] = number
                span[:, 6] = src.pools[number].cache.page_bytes
            found.append(spans.reshape(-1, 7))
    if found:
        copy_spans(src.arrays, dst.arrays, np.concatenate(found), backend=backend, stream=stream)


def swap_out(
    device: Pools, host: Pools, pages: Mapping[str, Any], *, backend: str | None = None, stream: Any = None
) -> None:
    """Copy pages of requests to the host: `copy_pages` from device to host, pairs of device page and host page.

    The device's pages may be used again by later work of the stream.
    """
    copy_pages(device, host, pages, backend=backend, stream=stream)


def swap_in(
    host: Pools, device: Pools, pages: Mapping[str, Any], *, backend: str | None = None, stream: Any = None
) -> None:
    """Copy pages of requests back to the device: `copy_pages` from host to device, pairs of host and device page."""
    copy_pages(host, device, pages, backend=backend, stream=stream)


def _check_equal_pages(src: Pools, dst: Pools) -> None:
    if src.description is dst.description:
        return
    for one, other in zip(src.pools, dst.pools, strict=False):
        ours, theirs = one.cache, other.cache
        if (one.group.name, one.layer, ours.cache, ours.page_bytes, ours.layout) != (
            other.group.name, other.layer, theirs.cache, theirs.page_bytes, theirs.layout,
        ):  # fmt: skip
            raise ValueError(
                f"dst: got {theirs.page_bytes} bytes of {theirs.layout} for {theirs.cache} of layer {other.layer}, "
                f"expected {ours.page_bytes} bytes of {ours.layout} for {ours.cache} of layer {one.layer}, as src has; "
                "pack and unpack move requests between pages of other sizes"
            )
    if len(src.pools) != len(dst.pools):
        raise ValueError(f"dst: got {len(dst.pools)} arrays, expected {len(src.pools)} as src has")


def _pairs(name: str, value: Any, src: Pools, dst: Pools) -> np.ndarray:
    """Checked pairs of pages, [n, 2] int64."""
    pairs = np.asarray(value)
    if not pairs.size:
        return np.zeros((0, 2), np.int64)
    if pairs.dtype.kind not in INTEGERS:
        raise TypeError(f"pages[{name!r}]: got dtype {pairs.dtype}, expected integers")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pages[{name!r}]: got shape {pairs.shape}, expected [n, 2]")
    pairs = pairs.astype(np.int64)
    for column, (side, pools) in enumerate((("src", src), ("dst", dst))):
        wrong = (pairs[:, column] < 0) | (pairs[:, column] >= pools.num_pages[name])
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"pages[{name!r}]: pair {i} has page {pairs[i, column]} of {side}, expected 0 to "
                f"{pools.num_pages[name] - 1}"
            )
    twice = np.bincount(pairs[:, 1]) > 1
    if twice.any():
        raise ValueError(f"pages[{name!r}]: got page {int(np.argmax(twice))} of dst twice, expected pages that differ")
    return pairs
