"""The one cuBLAS product that cumla calls, with NumPy: through CuPy, and through the library itself in a capture."""

import ctypes
import types

import ml_dtypes
import numpy as np

from . import queues

DTYPES = {0: np.dtype(np.float32), 14: np.dtype(ml_dtypes.bfloat16), 2: np.dtype(np.float16)}


def gemm_strided_batched(*arguments):
    """Runs after the work queued on the current stream, as CuPy calls cuBLAS."""
    queues.current_stream().add(lambda: multiply(*arguments))


# ---- libcublas itself, whose functions return 0: success

_stream = [0]  # the only handle


def set_stream(handle, stream):
    _stream[0] = stream
    return 0


def set_workspace(handle, memory, size):
    return 0


def gemm_on_stream(*arguments):
    queues.Stream(handle=_stream[0]).add(lambda: multiply(*arguments))
    return 0


LIBRARY = types.SimpleNamespace(
    cublasSetStream_v2=set_stream, cublasSetWorkspace_v2=set_workspace, cublasGemmStridedBatchedEx=gemm_on_stream
)


def multiply(
    handle, a_operation, b_operation, m, n, k, alpha, a, a_type, a_leading, a_stride, b, b_type, b_leading, b_stride,
    beta, c, c_type, c_leading, c_stride, batch, compute_type, algorithm,
):  # fmt: skip
    """c [batch, m, n] = a [batch, m, k] b [batch, k, n], columns first; operation 1 transposes a matrix."""
    left = matrices(a, a_type, a_leading, a_stride, batch, *((k, m) if a_operation else (m, k)))
    right = matrices(b, b_type, b_leading, b_stride, batch, *((n, k) if b_operation else (k, n)))
    left, right = (x.astype(np.float32) for x in (left, right))
    with np.errstate(over="ignore", invalid="ignore"):  # rows of a padded block may hold anything
        product = (left.swapaxes(1, 2) if a_operation else left) @ (right.swapaxes(1, 2) if b_operation else right)
    out = matrices(c, c_type, c_leading, c_stride, batch, m, n)
    out[...] = product.astype(out.dtype)


def matrices(address, data_type, leading, stride, batch, rows, columns):
    """[batch, rows, columns] at an address; `leading` elements from column to column."""
    if leading < rows:
        raise AssertionError(f"cuBLAS: {leading} elements between columns of {rows}")
    dtype, shape = DTYPES[data_type], (batch, rows, columns)
    if 0 in shape:
        return np.empty(shape, dtype)
    size = dtype.itemsize
    extent = size * ((batch - 1) * stride + (columns - 1) * leading + rows)
    room = (ctypes.c_uint8 * extent).from_address(address)
    return np.ndarray(shape, dtype, room, strides=(stride * size, size, leading * size))
