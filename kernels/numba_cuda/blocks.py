"""Copies of whole pages."""

from typing import Any

import numpy as np

from ..cuda.blocks import copy_blocks_across
from .compiler import cuda
from .launch import launch

__all__ = ["copy_blocks", "copy_blocks_across"]

THREADS = 256
CHUNK = 16 * THREADS  # bytes per thread block


def copy_blocks(src: Any, dst: Any, src_to_dst: Any) -> None:
    chunks = -(-src.shape[1] // CHUNK)
    launch(copy_kernel, len(src_to_dst) * chunks, THREADS, src, dst, src_to_dst, chunks)


def copy_kernel(src, dst, src_to_dst, chunks):
    """A thread block copies CHUNK bytes of a page, a thread every blockDim.x-th of them."""
    pair, chunk = cuda.blockIdx.x // chunks, cuda.blockIdx.x % chunks
    source, destination = np.int64(src_to_dst[pair, 0]), np.int64(src_to_dst[pair, 1])
    if source < 0 or source >= src.shape[0] or destination < 0 or destination >= dst.shape[0]:
        return
    end = min((chunk + 1) * CHUNK, src.shape[1])
    for i in range(chunk * CHUNK + cuda.threadIdx.x, end, cuda.blockDim.x):
        dst[destination, i] = src[source, i]
