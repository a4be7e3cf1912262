"""Matrix products."""

from typing import Any

import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import e4m3_value
from ..reference.rows import flush_subnormals
from ..types.projection import ROW_BLOCK, BlockScaledProduct
from .norm_rope import TO_QUANTIZE, _quantize
from .threads import parallel_for

VALUES_AT_A_TIME = 1 << 22  # 16 MB of dequantised values, which fits into a server's last-level cache
TO_DEQUANTIZE = 1  # approximate nanoseconds per value
VALUES = np.array([e4m3_value(code) for code in range(256)], np.float32)  # value of each code


def batched_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; strides are arbitrary."""
    out[...] = np.matmul(a.astype(np.float32, copy=False), b.astype(np.float32, copy=False))


def block_scaled_product(args: BlockScaledProduct) -> None:
    """Dequantises a slice of the weight's rows at a time, into memory that stays in the cache."""
    _, weight, scales, block_rows, block_columns, out, *_ = args
    scales = flush_subnormals(scales)
    groups, rows, columns = weight.shape
    together = min(max(VALUES_AT_A_TIME // max(columns, 1) // block_rows, 1) * block_rows, rows)
    values, x = np.empty((together, columns), np.float32), args.x.astype(np.float32, copy=False)
    for group in range(groups):
        for first in range(0, rows, together):
            part = values[: min(together, rows - first)]
            part_scales = scales[group, first // block_rows :]
            _dequantize(weight[group, first : first + len(part)], part_scales, block_rows, block_columns, part)
            result = out[group, :, first : first + len(part)]
            with np.errstate(over="ignore", invalid="ignore"):
                if args.batch_invariant:
                    by_row_blocks(x[group], part.T, result)
                else:
                    result[...] = x[group] @ part.T


def by_row_blocks(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """out [M, N] = x [M, K] weight [K, N] by products of ROW_BLOCK rows: BLAS chooses an algorithm by the rows."""
    block = np.zeros((ROW_BLOCK, x.shape[1]), x.dtype)
    for first in range(0, len(x), ROW_BLOCK):
        rows = x[first : first + ROW_BLOCK]
        block[: len(rows)] = rows
        out[first : first + len(rows)] = (block @ weight)[: len(rows)]


def dequantize_blocks(
    weight: np.ndarray, scales: np.ndarray, block_rows: int, block_columns: int, out: np.ndarray
) -> None:
    """out [n, N, K] is each code of [n, N, K] times its block's scale, in float32 or rounded to bfloat16."""
    values = np.empty(out.shape[1:], np.float32)
    for group in range(len(weight)):
        _dequantize(weight[group], scales[group], block_rows, block_columns, values)
        out[group] = values


def quantize_groups(x: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """e4m3 values [n, M, K] of x [n, M, K], and scales [n, M, K / 128], powers of two."""
    tokens = x.transpose(1, 0, 2).astype(np.float32)
    work = TO_QUANTIZE * x.shape[0] * x.shape[2]
    parallel_for(len(tokens), work, _quantize, tokens, True, values.view(np.uint8), scales)


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
    """Returns False: the CPU multiplies dequantised values."""
    return False


def _dequantize(
    weight: np.ndarray, scales: np.ndarray, block_rows: int, block_columns: int, values: np.ndarray
) -> None:
    work = TO_DEQUANTIZE * values.shape[1]
    parallel_for(len(values), work, _dequantize_rows, VALUES, weight, scales, block_rows, block_columns, values)


@compiled(nogil=True)
def _dequantize_rows(
    first: int,
    end: int,
    table: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    block_rows: Any,
    block_columns: Any,
    values: np.ndarray,
) -> None:
    columns = values.shape[1]
    for row in range(first, end):
        own, codes, row_scales = values[row], weight[row], scales[row // block_rows]
        for block in range(len(row_scales)):
            start = block * block_columns
            for k in range(start, min(start + block_columns, columns)):
                own[k] = table[codes[k]] * row_scales[block]
