"""Products of 16-bit matrices, by cuBLAS with float32 sums."""

from __future__ import annotations

import ctypes
from typing import Any

from .launch import pointer, strides

# Of cudaDataType, cublasComputeType_t, cublasGemmAlgo_t and cublasOperation_t.
DATA_TYPES = {"bfloat16": 14, "float16": 2}
COMPUTE_32F, ALGORITHM_DEFAULT, AS_IS, TRANSPOSED = 68, -1, 0, 1

ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)


def batched_product(a: Any, b: Any, out: Any) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; of each matrix one of both axes is contiguous, of out the last."""
    import cupy
    from cupy.cuda import cublas

    batch, m, k = a.shape
    n = b.shape[2]
    # cuBLAS counts columns first: its operands are the transposes, in the other order.
    b_operation, b_leading = operand(b)
    a_operation, a_leading = operand(a)
    data_type = DATA_TYPES[out.dtype.name]
    cublas.gemmStridedBatchedEx(
        cupy.cuda.device.get_cublas_handle(), b_operation, a_operation, n, m, k, ctypes.addressof(ONE),
        pointer(b), data_type, b_leading, strides(b)[0], pointer(a), data_type, a_leading, strides(a)[0],
        ctypes.addressof(ZERO), pointer(out), data_type, max(strides(out)[1], n), strides(out)[0], batch,
        COMPUTE_32F, ALGORITHM_DEFAULT,
    )  # fmt: skip


def operand(matrices: Any) -> tuple[int, int]:
    """How cuBLAS takes matrices [n, rows, columns]: the operation, and the elements between rows (or columns)."""
    _, rows, columns = matrices.shape
    _, row_stride, column_stride = strides(matrices)
    if column_stride == 1 or columns == 1:
        return AS_IS, max(row_stride, columns)
    return TRANSPOSED, max(column_stride, rows)
