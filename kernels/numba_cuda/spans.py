"""Copies of spans of bytes between pages."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cuda.spans import copy_spans_across
from .compiler import cuda
from .launch import launch

__all__ = ["copy_spans", "copy_spans_across"]

THREADS = 256
CHUNK = 16 * THREADS  # bytes per thread block


def copy_spans(src: Sequence[Any], dst: Sequence[Any], spans: Any) -> None:
    """One launch for each pair of arrays: a kernel takes no list of arrays."""
    pairs = [(i, j) for i in range(len(src)) for j in range(len(dst))]
    if isinstance(spans, np.ndarray):  # in the simulator
        given = set(map(tuple, spans[:, [0, 3]].tolist()))
        pairs = [pair for pair in pairs if pair in given]
    for i, j in pairs:
        pieces = -(-min(src[i].shape[1], dst[j].shape[1]) // CHUNK)
        launch(copy_kernel, len(spans) * pieces, THREADS, src[i], dst[j], spans, i, j, pieces)


def copy_kernel(src, dst, spans, src_number, dst_number, pieces):
    """A thread block copies CHUNK bytes of a span, a thread every blockDim.x-th of them."""
    span, piece = cuda.blockIdx.x // pieces, cuda.blockIdx.x % pieces
    if spans[span, 0] != src_number or spans[span, 3] != dst_number:
        return
    page, first, to_page = np.int64(spans[span, 1]), np.int64(spans[span, 2]), np.int64(spans[span, 4])
    to, size = np.int64(spans[span, 5]), np.int64(spans[span, 6])
    if page < 0 or page >= src.shape[0] or first < 0 or size < 0 or first > src.shape[1] - size:
        return
    if to_page < 0 or to_page >= dst.shape[0] or to < 0 or to > dst.shape[1] - size:
        return
    end = min((piece + 1) * CHUNK, size)
    for i in range(piece * CHUNK + cuda.threadIdx.x, end, cuda.blockDim.x):
        dst[to_page, to + i] = src[page, first + i]
