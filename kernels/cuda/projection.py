"""Matrix products with float32 sums: by cuBLAS; of e4m3 weights with scales of blocks by a kernel for few tokens."""

import ctypes
import functools
from typing import Any, NamedTuple

from ...arrays.streams import Side
from ..types.projection import BlockScaledProduct
from .compile import kernel
from .device import device_sms, has_clusters, is_hopper, shared_bytes_per_block
from .launch import C_NAMES, Kernel, is_aligned, pointer, strides

# Values of cudaDataType, cublasComputeType_t, cublasGemmAlgo_t and cublasOperation_t.
DATA_TYPES = {"float32": 0, "bfloat16": 14, "float16": 2}
COMPUTE_32F, ALGORITHM_DEFAULT, AS_IS, TRANSPOSED = 68, -1, 0, 1

ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)
WORKSPACE_BYTES = 32 << 20  # cuBLAS's own size on Hopper

# sm80/projection.cu and sm90/projection.cu
WARPS = 8
TILES = (8, 16, 32, 64, 128)  # tokens; on Hopper wgmma multiplies those from 16 on
MOST_ROWS, LEAST_ROWS, MOST_SPLITS = 128, 16, 8  # of weights a tile; CTAs that divide K
CHUNK = 128  # columns that a warp takes at a time
MOST_STAGES = 6
ENOUGH = 0.7  # of the SMs with a CTA: others wait for memory anyway
TWO_CTAS = 32  # tokens of a tile up to which two CTAs fit on an SM: by their registers, and so by their memory
PARTS_OF_ROW = 2048  # values of a row that a CTA of dequantize_blocks takes at a time


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


def block_scaled_product(given: BlockScaledProduct) -> None:
    x, weight, scales, block_rows, block_columns, out, prefetch, finite, power_of_two = given
    groups, tokens, columns = x.shape
    rows = weight.shape[1]
    tiles = division(rows, columns, groups, tokens, power_of_two, out.device.id)
    block_columns = min(block_columns, -(-columns // CHUNK) * CHUNK)  # fewer values, fewer programs
    made, shared_bytes = product_kernel(
        tiles, C_NAMES[out.dtype.name], block_columns, is_aligned(x, weight, out), prefetch, finite, power_of_two,
        out.device.id,
    )  # fmt: skip
    of_tokens = -(-tokens // tiles.tokens)
    made(
        (tiles.splits, -(-rows // tiles.rows), groups * of_tokens),
        (32 * WARPS,),
        (
            weight, scales, *strides(weight)[:2], *strides(scales)[:2], rows, columns, block_rows, 0,
            x, out, *strides(x)[:2], *strides(out)[:2], tokens, of_tokens,
        ),
        shared_mem=shared_bytes,
        overlap=True,
    )  # fmt: skip


class Tiles(NamedTuple):
    """Tokens and rows of a tile, the CTAs that divide its columns, and whether wgmma multiplies it."""

    tokens: int
    rows: int
    splits: int
    hopper: bool = False


@functools.lru_cache(maxsize=256)
def division(rows: int, columns: int, groups: int, tokens: int, power_of_two: bool, device: int) -> Tiles:
    """Tiles that occupy the device, as an H200 measured them (docs/kernels/weights.md).

    Clusters of more than two CTAs cost more than they divide unless each SM has two of them. A few tokens are best
    multiplied by tiles of few rows, whose columns a CTA's warps divide.
    """
    sms, hopper = device_sms(device), is_hopper(device)
    tile = next((size for size in TILES if size >= tokens), TILES[-1])
    hopper = hopper and tile > TILES[0]
    of_tokens = groups * -(-tokens // tile)
    tiles, most_splits, splits = of_tokens * -(-rows // MOST_ROWS), MOST_SPLITS if has_clusters(device) else 1, 1
    while splits < most_splits and 2 * splits * CHUNK < columns and splits * tiles < ENOUGH * sms:
        splits *= 2
    if hopper and tile > TWO_CTAS:
        wide = power_of_two and splits in (1, 4) and rows > MOST_ROWS  # then x is read half as often
        return Tiles(tile, 2 * MOST_ROWS if wide else MOST_ROWS, splits, hopper)
    if hopper or tiles >= sms or splits == MOST_SPLITS:
        if splits == 4 and 2 * splits * CHUNK < columns:
            splits *= 2
        return Tiles(tile, MOST_ROWS, splits, hopper)
    tile_rows, splits = MOST_ROWS, 1
    least = 32 if most_splits > 1 else LEAST_ROWS
    while (
        tile_rows > least and ring_stages(tile, tile_rows // 2, device) > 1
        and of_tokens * -(-rows // tile_rows) < sms
    ):  # fmt: skip
        tile_rows //= 2
    if 2 * of_tokens * -(-rows // tile_rows) <= 2 * sms and most_splits > 1 and 2 * depth_of(tile_rows) < columns:
        splits = 2
    return Tiles(tile, tile_rows, splits)


def depth_of(tile_rows: int) -> int:
    """Columns of a stage: the warps that are not needed along the rows take further ones."""
    return CHUNK * max(WARPS * LEAST_ROWS // tile_rows, 1)


def ring_stages(tile: int, tile_rows: int, device: int) -> int:
    """Stages of a ring that fit: a stage has 16 KB of weights, and the same columns of the tokens."""
    depth = depth_of(tile_rows)
    most = shared_bytes_per_block(device)
    if tile <= TWO_CTAS and tile_rows <= MOST_ROWS:
        most = min(most, (most + 1024) // 2 - 1024)  # of each CTA's memory the driver takes 1 KB
    return min(most // (tile_rows * depth + 2 * tile * depth), MOST_STAGES)


@functools.cache
def product_kernel(
    tiles: Tiles,
    output: str,
    block_columns: int,
    aligned: bool,
    prefetch: bool,
    finite: bool,
    power_of_two: bool,
    device: int,
) -> tuple[Kernel, int]:
    """The kernel for such tiles, and the shared memory that it needs."""
    depth, stages = depth_of(tiles.rows), max(ring_stages(tiles.tokens, tiles.rows, device), 2)
    file, arch = ("sm90/projection.cu", "sm_90a") if tiles.hopper else ("sm80/projection.cu", None)
    made = kernel(
        file, "block_scaled_product", arch, TOKENS=tiles.tokens, ROWS=tiles.rows, SPLITS=tiles.splits, STAGES=stages,
        OUTPUT=output, BLOCK_COLUMNS=block_columns, ALIGNED=int(aligned), EARLY=int(prefetch), FINITE=int(finite),
        POWER_OF_TWO=int(power_of_two),
    )  # fmt: skip
    sums = depth // CHUNK * tiles.tokens * (tiles.rows + 4) * 4
    shared_bytes = max(stages * depth * (tiles.rows + 2 * tiles.tokens), sums)
    made.max_dynamic_shared_size_bytes = shared_bytes
    return made, shared_bytes


def dequantize_blocks(weight: Any, scales: Any, block_rows: int, block_columns: int, out: Any) -> None:
    """out [n, N, K], bfloat16, is each code of [n, N, K] times its block's scale."""
    groups, rows, columns = weight.shape
    aligned = is_aligned(weight, out) and columns % 16 == 0
    kernel("common/dequantize_blocks.cu", "dequantize_blocks", ALIGNED=int(aligned))(
        (rows, groups, -(-columns // PARTS_OF_ROW)),
        (128,),
        (
            weight, *strides(weight)[:2], scales, *strides(scales)[:2], out, *strides(out)[:2], columns, block_rows,
            block_columns,
        ),
        overlap=True,
    )  # fmt: skip
