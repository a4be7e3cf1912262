"""Matrix products, by cuBLAS with float32 sums."""

import ctypes
import functools
from typing import Any

from ...arrays.streams import Side
from .launch import pointer, strides

# Values of cudaDataType, cublasComputeType_t, cublasGemmAlgo_t and cublasOperation_t.
DATA_TYPES = {"float32": 0, "bfloat16": 14, "float16": 2}
COMPUTE_32F, ALGORITHM_DEFAULT, AS_IS, TRANSPOSED = 68, -1, 0, 1

ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)
WORKSPACE_BYTES = 32 << 20  # cuBLAS's own size on Hopper


def batched_product(a: Any, b: Any, out: Any) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; one axis of each matrix is contiguous, in out the last.

    a and b have the same type; out has that type or float32.
    """
    import cupy
    from cupy.cuda import cublas

    batch, m, k = a.shape
    n = b.shape[2]
    # cuBLAS is column-major: its operands are the transposes, in the other order.
    b_operation, b_leading = operand(b)
    a_operation, a_leading = operand(a)
    data_type, out_type = DATA_TYPES[a.dtype.name], DATA_TYPES[out.dtype.name]
    handle = cupy.cuda.device.get_cublas_handle()
    arguments = (
        handle, b_operation, a_operation, n, m, k, ctypes.addressof(ONE), pointer(b), data_type, b_leading,
        strides(b)[0], pointer(a), data_type, a_leading, strides(a)[0], ctypes.addressof(ZERO), pointer(out), out_type,
        max(strides(out)[1], n), strides(out)[0], batch, COMPUTE_32F, ALGORITHM_DEFAULT,
    )  # fmt: skip
    stream = cupy.cuda.get_current_stream()
    beside = stream.ptr in Side.handles
    if stream.is_capturing():
        product_in_capture(handle, stream.ptr, workspace(out.device.id, beside), arguments)
    else:
        workspace(out.device.id, beside)
        cublas.gemmStridedBatchedEx(*arguments)


def operand(matrices: Any) -> tuple[int, int]:
    """cuBLAS's view of matrices [n, rows, columns]: the operation, and the elements between rows (or columns)."""
    _, rows, columns = matrices.shape
    _, row_stride, column_stride = strides(matrices)
    if column_stride == 1 or columns == 1:
        return AS_IS, max(row_stride, columns)
    return TRANSPOSED, max(column_stride, rows)


def product_in_capture(handle: int, stream: int, memory: Any, arguments: tuple[Any, ...]) -> None:
    """The same in a CUDA graph capture, where CuPy calls no cuBLAS: with memory that was allocated before.

    Captured products of a device use the same memory, so graphs that contain some must not run at the same time.
    Raises RuntimeError if cuBLAS refuses.
    """
    library = cublas_library(handle)
    for status in (
        library.cublasSetStream_v2(handle, stream),
        library.cublasSetWorkspace_v2(handle, pointer(memory), WORKSPACE_BYTES),
        library.cublasGemmStridedBatchedEx(*arguments),
    ):
        if status:
            raise RuntimeError(f"cuBLAS: status {status} while a CUDA graph is being captured")


@functools.cache
def workspace(device: int, beside: bool) -> Any:
    """Memory for captured products, which the first product outside a capture allocates.

    beside  whether it is for products on side streams, which may run at the same time as the callers' streams

    Raises RuntimeError in a capture if no product ran before.
    """
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "cuBLAS: memory would have to be allocated while a CUDA graph is captured; run the step once"
        )
    with cupy.cuda.Device(device):
        return cupy.empty(WORKSPACE_BYTES, "uint8")


@functools.cache
def cublas_library(handle: int) -> Any:
    """The cuBLAS that CuPy has loaded, with the functions that are called directly."""
    from cupy.cuda import cublas

    library = ctypes.CDLL(f"libcublas.so.{cublas.getVersion(handle) // 10000}")
    address, number = ctypes.c_void_p, ctypes.c_int
    matrix: list[Any] = [address, number, number, ctypes.c_longlong]
    library.cublasSetStream_v2.argtypes = [address, address]
    library.cublasSetWorkspace_v2.argtypes = [address, address, ctypes.c_size_t]
    library.cublasGemmStridedBatchedEx.argtypes = [
        address, *[number] * 5, address, *matrix, *matrix, address, *matrix, *[number] * 3,
    ]  # fmt: skip
    return library
