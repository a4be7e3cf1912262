"""Matrix products."""

import ml_dtypes
import numpy as np

from ..types.projection import BlockScaledProduct


def batched_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N], of any strides."""
    out[...] = np.matmul(a.astype(np.float64), b.astype(np.float64))


def block_scaled_product(given: BlockScaledProduct) -> None:
    weights = dequantized(given.weight, given.scales, given.block_rows, given.block_columns)
    with np.errstate(over="ignore", invalid="ignore"):
        given.out[...] = np.matmul(given.x.astype(np.float64), weights.transpose(0, 2, 1))


def dequantize_blocks(
    weight: np.ndarray, scales: np.ndarray, block_rows: int, block_columns: int, out: np.ndarray
) -> None:
    """out [n, N, K] is each code of [n, N, K] times its block's scale."""
    out[...] = dequantized(weight, scales, block_rows, block_columns)


def dequantized(weight: np.ndarray, scales: np.ndarray, block_rows: int, block_columns: int) -> np.ndarray:
    """float64 [n, N, K]."""
    _, rows, columns = weight.shape
    spread = scales.repeat(block_rows, axis=1)[:, :rows].repeat(block_columns, axis=2)[:, :, :columns]
    values = np.ascontiguousarray(weight).view(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float64) * spread
