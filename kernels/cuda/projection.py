"""Matrix products with float32 sums: cuBLAS, and for few tokens a kernel that multiplies block-scaled e4m3 weights."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ...arrays.streams import Side
from ..types.projection import BlockScaledProduct
from .compile import kernel
from .constants import constant
from .device import cached_by_capability, device_sms, has_clusters, is_hopper, shared_bytes_per_block
from .launch import C_NAMES, Kernel, is_aligned, pointer, strides
from .tma import NO_MAP, Words, map_of_pages

# Values of cudaDataType, cublasComputeType_t, cublasGemmAlgo_t and cublasOperation_t.
DATA_TYPES = {"float32": 0, "bfloat16": 14, "float16": 2}
COMPUTE_32F, ALGORITHM_DEFAULT, AS_IS, TRANSPOSED = 68, -1, 0, 1

ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)
WORKSPACE_BYTES = 32 << 20  # cuBLAS's default on Hopper

# sm80/projection.cu and sm90/projection.cu
SOURCE = "sm80/block_scaled.cuh"  # included by both
TILES = (8, 16, 32, 64, 128)  # tokens
MOST_ROWS, LEAST_ROWS, MOST_SPLITS = 128, 16, 8  # most and least rows of a tile of weights, most CTAs that divide K
CHUNK = 128  # columns that a warp takes at a time
MOST_STAGES, BARRIER_BYTES = 8, 128
ENOUGH = 0.7  # fraction of SMs that need a CTA: more CTAs would only wait for memory
TWO_CTAS = 32  # most tokens of a tile for which an SM runs two CTAs: registers limit them, and memory is sized for two
INVARIANT_SMS = 132  # by which batch-invariant products are divided on every device
PARTS_OF_ROW = 2048  # values of a row that a CTA of dequantize_blocks or quantize_groups takes at a time

# sm90/fp8_product.cu
FP8_TOKENS, FP8_ROWS, FP8_THREADS, FP8_SHARED = (
    constant("sm90/fp8_product.cu", name) for name in ("TOKENS", "ROWS", "THREADS", "SHARED_BYTES")
)


def batched_product(a: Any, b: Any, out: Any) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; one axis of each matrix is contiguous, in out the last.

    a and b have the same type; out has that type or float32.
    """
    import cupy
    from cupy.cuda import cublas

    batch, m, k = a.shape
    n = b.shape[2]
    # cuBLAS is column-major: its operands are the transposes, in reversed order.
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
    """Matrices [n, rows, columns] as cuBLAS's operand: the operation, and the elements between rows (or columns)."""
    _, rows, columns = matrices.shape
    _, row_stride, column_stride = strides(matrices)
    if column_stride == 1 or columns == 1:
        return AS_IS, max(row_stride, columns)
    return TRANSPOSED, max(column_stride, rows)


def product_in_capture(handle: int, stream: int, memory: Any, arguments: tuple[Any, ...]) -> None:
    """batched_product in a CUDA graph capture, where CuPy calls no cuBLAS: it uses memory that was allocated before.

    Captured products of a device share this memory, so graphs that contain products must not run at the same time.
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

    Args:
        beside: whether the products run on side streams, at the same time as products on the callers' streams

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
    """The cuBLAS library that CuPy has loaded, with types for the functions that this module calls."""
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


def block_scaled_product(args: BlockScaledProduct) -> None:
    x, weight, scales, block_rows, block_columns, out, prefetch, finite, power_of_two, batch_invariant = args
    groups, tokens, columns = x.shape
    rows = weight.shape[1]
    block_columns = columns_of_block(args)
    aligned = is_aligned(x, weight, out)
    hopper = aligned and kernel_for_block_scaled(args, out.device.id) == "hopper"
    uniform = power_of_two and finite and block_columns % CHUNK == 0
    # A full tile divides rows and columns alike for any tokens.
    divided_for, sms = (TILES[-1], INVARIANT_SMS) if batch_invariant else (tokens, None)
    tiles = division(rows, columns, groups, divided_for, uniform, hopper, out.device.id, sms)
    maps: list[Words] = []
    if tiles.hopper:
        maps = [map_of_matrices(weight, tiles.rows), map_of_matrices(x, tiles.tokens)]
        if NO_MAP in maps:
            tiles, maps = division(rows, columns, groups, divided_for, uniform, False, out.device.id, sms), []
    made, threads, shared_bytes = product_kernel(
        tiles, C_NAMES[out.dtype.name], block_columns, aligned, prefetch, finite, power_of_two, out.device.id
    )
    of_tokens = -(-tokens // tiles.tokens)
    made(
        (tiles.splits, -(-rows // tiles.rows), groups * of_tokens),
        (threads,),
        (
            weight, scales, *strides(weight)[:2], *strides(scales)[:2], rows, columns,
            x, out, *strides(x)[:2], *strides(out)[:2], tokens, of_tokens, *(word for each in maps for word in each),
            block_rows,
        ),
        shared_mem=shared_bytes,
        overlap=True,
    )  # fmt: skip


def columns_of_block(args: BlockScaledProduct) -> int:
    """Columns of a block, limited to the weight's columns: fewer macro values need fewer programs."""
    return min(args.block_columns, -(-args.x.shape[2] // CHUNK) * CHUNK)


def kernel_for_block_scaled(args: BlockScaledProduct, device: int) -> str:
    """The kernel of block_scaled_product for aligned arrays: "hopper" or "portable"."""
    fits = args.power_of_two or columns_of_block(args) % CHUNK == 0
    return "hopper" if fits and is_hopper(device) else "portable"


KERNEL_FOR: dict[str, Callable[..., str]] = {"block_scaled_product": kernel_for_block_scaled}


class Tiles(NamedTuple):
    """Tokens and rows of a tile, the CTAs that divide its columns, and whether wgmma multiplies it."""

    tokens: int
    rows: int
    splits: int
    hopper: bool = False


@functools.partial(cached_by_capability, maxsize=256)
def division(
    rows: int, columns: int, groups: int, tokens: int, uniform: bool, hopper: bool, device: int, sms: int | None = None
) -> Tiles:  # fmt: skip
    """Tiles that occupy the device (docs/kernels/weights.md).

    Args:
        uniform: scales are powers of two, one per chunk, and no code is NaN
        sms: SMs to occupy; None: the device's

    On Hopper tiles have 64 rows, and two warpgroups take alternate chunks; large weights have larger tiles. The
    portable kernel is fastest for a few tokens with tiles of few rows, whose columns a CTA's warps divide.
    """
    sms = device_sms(device) if sms is None else sms
    tile = next((size for size in TILES if size >= tokens), TILES[-1])
    of_tokens = groups * -(-tokens // tile)
    most_splits, splits = MOST_SPLITS if has_clusters(device) else 1, 1
    if hopper:
        two_an_sm = tile <= TWO_CTAS
        wide, enough = (MOST_ROWS, sms) if two_an_sm or not uniform else (2 * MOST_ROWS, ENOUGH * sms)
        tile_rows = wide if of_tokens * -(-rows // wide) >= enough else MOST_ROWS // 2
        splits = cluster_size(of_tokens * -(-rows // tile_rows), columns // CHUNK, two_an_sm, sms)
        if two_an_sm and uniform and tile_rows == MOST_ROWS and splits == 1:
            tile = TWO_CTAS  # 8 tokens' sums would be added in float32 in shared memory
        return Tiles(tile, tile_rows, splits, True)
    tiles = of_tokens * -(-rows // MOST_ROWS)
    while splits < most_splits and 2 * splits * CHUNK < columns and splits * tiles < ENOUGH * sms:
        splits *= 2
    if tiles >= sms or splits == MOST_SPLITS:
        if splits == 4 and 2 * splits * CHUNK < columns:
            splits *= 2
        return Tiles(tile, MOST_ROWS, splits)
    tile_rows, splits = MOST_ROWS, 1
    least = 32 if most_splits > 1 else LEAST_ROWS
    while (
        tile_rows > least and ring_stages(tile, tile_rows // 2, False, device) > 1
        and of_tokens * -(-rows // tile_rows) < sms
    ):  # fmt: skip
        tile_rows //= 2
    if 2 * of_tokens * -(-rows // tile_rows) <= 2 * sms and most_splits > 1 and 2 * depth_of(tile_rows) < columns:
        splits = 2
    return Tiles(tile, tile_rows, splits)


def cluster_size(tiles: int, chunks: int, two_an_sm: bool, sms: int) -> int:
    """CTAs that divide the columns of a tile on Hopper, each with at least 4 chunks.

    Clusters of two occupy every SM. Larger clusters cannot: the SMs of a GPC are not always a multiple of their size.

    Args:
        two_an_sm: two CTAs fit on an SM
    """
    most = 1.5 * sms if two_an_sm else 0.9 * sms
    fitting = [size for size in range(1, MOST_SPLITS + 1) if size * tiles <= most and 4 * size <= chunks]
    pairs = 2 * tiles <= (2 if two_an_sm else 1) * sms and chunks >= 16
    return max([1, *fitting, *([2] if pairs else [])])


def depth_of(tile_rows: int) -> int:
    """Columns of a stage before Hopper: warps beyond a tile's rows take further columns."""
    return constant(SOURCE, "DEPTH", ROWS=tile_rows)


def ring_stages(tile: int, tile_rows: int, in_turn: bool, device: int) -> int:
    """Number of ring stages that fit in shared memory; on Hopper warpgroups take chunks in turn."""
    most = shared_bytes_per_block(device)
    if tile <= TWO_CTAS and tile_rows <= MOST_ROWS:
        most = min(most, (most + 1024) // 2 - 1024)  # the driver reserves 1 KB per CTA
    stage_bytes = constant(SOURCE, "STAGE_BYTES", TOKENS=tile, ROWS=tile_rows, CHUNKS_IN_TURN=int(in_turn))
    return min((most - BARRIER_BYTES) // stage_bytes, MOST_STAGES)


@cached_by_capability
def product_kernel(
    tiles: Tiles,
    output: str,
    block_columns: int,
    aligned: bool,
    prefetch: bool,
    finite: bool,
    power_of_two: bool,
    device: int,
) -> tuple[Kernel, int, int]:
    """The kernel for these tiles, its threads, and its shared memory in bytes."""
    file, arch = ("sm90/projection.cu", "sm_90a") if tiles.hopper else ("sm80/projection.cu", None)
    macros: dict[str, int | str] = {
        "TOKENS": tiles.tokens, "ROWS": tiles.rows, "SPLITS": tiles.splits,
        "STAGES": max(ring_stages(tiles.tokens, tiles.rows, tiles.hopper, device), 2),
        "OUTPUT": output, "BLOCK_COLUMNS": block_columns, "ALIGNED": int(aligned), "EARLY": int(prefetch),
        "FINITE": int(finite), "POWER_OF_TWO": int(power_of_two),
    }  # fmt: skip
    made, shared_bytes = kernel(file, "block_scaled_product", arch, **macros), constant(file, "SHARED_BYTES", **macros)
    made.max_dynamic_shared_size_bytes = shared_bytes
    return made, constant(file, "ALL_THREADS" if tiles.hopper else "THREADS", **macros), shared_bytes


def quantize_groups(x: Any, values: Any, scales: Any) -> None:
    """e4m3 values [n, M, K] of x [n, M, K], and scales [n, M, K / 128], powers of two."""
    groups, tokens, columns = x.shape
    kernel("common/quantize_groups.cu", "quantize_groups", ALIGNED=int(is_aligned(x, values)))(
        (tokens, groups, -(-columns // PARTS_OF_ROW)),
        (128,),
        (x, *strides(x)[:2], values, *strides(values)[:2], scales, *strides(scales), columns),
        overlap=True,
    )


def fp8_product(
    values: Any, x_scales: Any, weight: Any, scales: Any, block_rows: int, block_columns: int, out: Any,
    out_scales: Any = None,
) -> bool:  # fmt: skip
    """out [n, M, N] = x W^T for values [n, M, K] with scales [n, M, K / 128], and W as in block_scaled_product.

    Args:
        out_scales: [n, M, N / 128] if out is rounded to e4m3 as in quantize_groups

    The last axis of each array is contiguous. A scale of x times a scale of the weight counts as 0 below 2^-126.
    Returns False, and writes nothing, for arguments that sm90/fp8_product.cu does not support.
    """
    (groups, tokens, columns), rows = values.shape, weight.shape[1]
    device = out.device.id
    in_chunks = columns % CHUNK == 0 and rows % 8 == 0 and block_rows % CHUNK == 0 and block_columns % CHUNK == 0
    if not (in_chunks and is_hopper(device) and is_aligned(values, weight, out)):
        return False
    rounds = out_scales is not None
    if rounds and rows % FP8_ROWS:
        return False
    maps = [map_of_matrices(array, tile) for array, tile in ((values, FP8_TOKENS), (weight, FP8_ROWS))]
    if NO_MAP in maps:
        return False
    made = kernel("sm90/fp8_product.cu", "fp8_product", "sm_90a", OUTPUT="uint8" if rounds else C_NAMES[out.dtype.name])
    made.max_dynamic_shared_size_bytes = FP8_SHARED
    groups_apart, tokens_apart = strides(out_scales)[:2] if rounds else (0, 0)
    token_tiles, row_tiles = -(-tokens // FP8_TOKENS), -(-rows // FP8_ROWS)
    tiles = token_tiles * row_tiles * groups
    made(
        (min(tiles, device_sms(device)),),
        (FP8_THREADS,),
        (
            x_scales, scales, out, pointer(out_scales), strides(x_scales)[0], strides(scales)[0], *strides(out)[:2],
            groups_apart, strides(x_scales)[1], strides(scales)[1], tokens_apart, tokens, rows, columns, block_rows,
            block_columns, token_tiles, tiles, *maps[0], *maps[1],
        ),
        shared_mem=FP8_SHARED,
        overlap=True,
    )  # fmt: skip
    return True


def map_of_matrices(array: Any, tile: int) -> Words:
    """A tensor map of [n, rows, K], in boxes of `tile` rows of 128 bytes.

    NO_MAP unless rows are at multiples of 16 bytes, do not overlap, and are in ascending order.
    """
    (groups, rows, columns), unit = array.shape, array.dtype.itemsize
    group_stride, row_stride = (unit * stride for stride in strides(array)[:2])
    row_stride = row_stride if rows > 1 else unit * columns
    group_stride = group_stride if groups > 1 else rows * row_stride
    if unit * columns % 16 or row_stride % 16 or group_stride % 16:
        return NO_MAP
    if row_stride < unit * columns or group_stride <= 0:
        return NO_MAP
    return map_of_pages(pointer(array), groups, group_stride, rows, unit * columns, tile, row_stride)


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
