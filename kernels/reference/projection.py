"""Matrix products."""

import ml_dtypes
import numpy as np

from ..types.projection import ROW_BLOCK, BlockScaledProduct
from .rows import flush_subnormals, scale_exponent, to_e4m3

GROUP, MIN_AMAX = 128, np.float32(1e-10)


def batched_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; strides are arbitrary."""
    out[...] = np.matmul(a.astype(np.float64), b.astype(np.float64))


def block_scaled_product(args: BlockScaledProduct) -> None:
    scales = flush_subnormals(args.scales)
    weights = dequantized(args.weight, scales, args.block_rows, args.block_columns)
    x, by_rows = args.x.astype(np.float64), weights.transpose(0, 2, 1)
    step = ROW_BLOCK if args.batch_invariant else max(x.shape[1], 1)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, x.shape[1], step):
            rows = x[:, first : first + step]
            block = rows if rows.shape[1] == step else np.pad(rows, ((0, 0), (0, step - rows.shape[1]), (0, 0)))
            args.out[:, first : first + step] = np.matmul(block, by_rows)[:, : rows.shape[1]]


def dequantize_blocks(
    weight: np.ndarray, scales: np.ndarray, block_rows: int, block_columns: int, out: np.ndarray
) -> None:
    """out [n, N, K] is each code of [n, N, K] times its block's scale."""
    out[...] = dequantized(weight, scales, block_rows, block_columns)


def quantize_groups(x: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """e4m3 values [n, M, K] of x [n, M, K], and scales [n, M, K / 128], powers of two: x is about value * scale.

    A scale is the smallest s for which 448 s is at least the largest finite magnitude, or 1e-10 if that is larger.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.maximum(np.where(np.isfinite(groups), np.abs(groups), 0).max(axis=-1), MIN_AMAX)
    scales[...] = np.ldexp(np.float32(1), scale_exponent(largest, -126))
    values[...] = to_e4m3(groups / scales[..., None]).reshape(x.shape).view(values.dtype)


def fp8_product(
    values: np.ndarray,
    x_scales: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    block_rows: int,
    block_columns: int,
    out: np.ndarray,
    out_scales: np.ndarray | None = None,
) -> bool:
    """out [n, M, N] = x W^T for values [n, M, K] with scales [n, M, K / 128], and W as in block_scaled_product.

    Args:
        out_scales: [n, M, N / 128] if out is rounded to e4m3 as in quantize_groups

    Returns whether the backend has such a product of this size; otherwise nothing is written.
    """
    return False


def dequantized(weight: np.ndarray, scales: np.ndarray, block_rows: int, block_columns: int) -> np.ndarray:
    """Codes times their blocks' scales, float64 [n, N, K]."""
    _, rows, columns = weight.shape
    spread = scales.repeat(min(block_rows, rows), axis=1)[:, :rows]  # a block may be larger than the matrix
    spread = spread.repeat(min(block_columns, columns), axis=2)[:, :, :columns]
    values = np.ascontiguousarray(weight).view(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float64) * spread
