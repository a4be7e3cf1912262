"""Copies of spans of bytes between pages."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def copy_spans(src: Sequence[Any], dst: Sequence[Any], spans: np.ndarray) -> None:
    for source, source_page, first, target, target_page, at, size in spans.tolist():
        if is_within(src, source, source_page, first, size) and is_within(dst, target, target_page, at, size):
            dst[target][target_page, at : at + size] = src[source][source_page, first : first + size]


def is_within(arrays: Sequence[Any], array: int, page: int, first: int, size: int) -> bool:
    """Whether a span is within a page of an array."""
    if not 0 <= array < len(arrays) or size < 0 or first < 0:
        return False
    pages, page_bytes = arrays[array].shape
    return 0 <= page < pages and first + size <= page_bytes


def copy_spans_across(src: Sequence[Any], dst: Sequence[Any], spans: np.ndarray) -> None:
    """Copies between host and device memory; here all arrays are in host memory."""
    copy_spans(src, dst, spans)
