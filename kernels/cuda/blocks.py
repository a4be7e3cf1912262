"""Copies of whole pages."""

from typing import Any

import numpy as np

from .compile import kernel
from .constants import constant
from .launch import C_NAMES, strides, unit

THREADS = constant("common/copy_blocks.cu", "THREADS")
CHUNK = 4 * THREADS  # units per CTA
UNIT_BYTES = {"uint4": 16, "uint2": 8, "uint32": 4, "uint16": 2, "uint8": 1}


def copy_blocks(src: Any, dst: Any, src_to_dst: Any) -> None:
    name = unit(src.shape[1], src, dst)
    page_units = src.shape[1] // UNIT_BYTES[name]
    chunks = -(-page_units // CHUNK)
    kernel("common/copy_blocks.cu", "copy_blocks", UNIT=name, CHUNK=CHUNK, PAIR=C_NAMES[src_to_dst.dtype.name])(
        (len(src_to_dst) * chunks,),
        (THREADS,),
        (
            src, src.strides[0], len(src), dst, dst.strides[0], len(dst),
            src_to_dst, *strides(src_to_dst), page_units, chunks,
        ),
        overlap=True,
    )  # fmt: skip


def copy_blocks_across(src: Any, dst: Any, src_to_dst: np.ndarray) -> None:
    """Copy pages from host to device memory or back, each by one asynchronous copy.

    A page is large and contiguous: a buffer that gathers pages first would gain nothing.
    """
    import cupy

    runtime = cupy.cuda.runtime
    to_device = isinstance(src, np.ndarray)
    kind = runtime.memcpyHostToDevice if to_device else runtime.memcpyDeviceToHost
    src_start, dst_start = (x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for x in (src, dst))
    stream, page_bytes = cupy.cuda.get_current_stream().ptr, src.shape[1]
    for source, destination in src_to_dst.tolist():
        if 0 <= source < len(src) and 0 <= destination < len(dst):
            to, origin = dst_start + destination * dst.strides[0], src_start + source * src.strides[0]
            runtime.memcpyAsync(to, origin, page_bytes, kind, stream)
