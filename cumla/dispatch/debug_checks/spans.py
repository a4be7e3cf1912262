"""Checks of `cumla.debug` for kernels of copies of spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .values import host


def copy_spans(arguments: Any) -> None:
    for i, (source, page, first, target, to_page, at, size) in enumerate(host(arguments.spans).tolist()):
        _check(i, "src", arguments.src, source, page, first, size)
        _check(i, "dst", arguments.dst, target, to_page, at, size)


copy_spans_across = copy_spans


def _check(i: int, name: str, arrays: Sequence[Any], array: int, page: int, first: int, size: int) -> None:
    if not 0 <= array < len(arrays):
        raise ValueError(f"spans: span {i} is of {name}[{array}], expected {name}[0] to {name}[{len(arrays) - 1}]")
    pages, page_bytes = arrays[array].shape
    if not 0 <= page < pages:
        raise ValueError(f"spans: span {i} is of page {page} of {name}[{array}], expected 0 to {pages - 1}")
    if first < 0 or size < 0 or first + size > page_bytes:
        raise ValueError(
            f"spans: span {i} has bytes {first} to {first + size} of a page of {name}[{array}], expected them within "
            f"{page_bytes}"
        )
