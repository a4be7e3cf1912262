"""Products with weights: BLAS on the host, cuBLAS on a device; small GEMMs read FP8 weights directly.

With more than MOST_TOKENS tokens on a device, a product of FP8 weights dequantises a slice of rows at a time, into
memory that stays in the L2 cache, and multiplies the slice by cuBLAS. If the layer enabled it, such a product also
rounds the activations to FP8, and multiplies FP8 values if the backend can.

A batch-invariant layer passes memory for blocks of tokens: a token's products then do not depend on the number of
tokens (layers/products.py, and fp8_block_linear with batch_invariant).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..layers.products import batched_product, product_kernels
from ..layers.weights import BlockQuantizedWeight
from ..ops.linear import COLUMNS_STEP, by_group, fp8_block_linear
from .block_scaled import BlockScaledWeight, Parts, block_scaled
from .scratch import Scratch

MOST_TOKENS = 384
FP8_GROUP = 128  # activations that share a scale
VALUES_AT_A_TIME = 8 << 20  # of a dequantised slice: 16 MB


def multiply(x: Any, weight: Any, out: Any, backend: str | None, blocks: Scratch | None = None) -> None:
    """out [T, N] = x [T, K] weight^T, weight [N, K]: an array, a BlockScaledWeight, or Parts of them.

    Args:
        blocks: memory of a batch-invariant layer for blocks of tokens
    """
    if isinstance(weight, Parts):
        end = 0
        for part in weight:
            first, end = end, end + part.shape[0]
            multiply(x, part, out[:, first:end], backend, blocks)
    elif isinstance(weight, BlockScaledWeight):
        multiply_block_scaled(x, weight, out, backend, blocks is not None)
    else:
        multiply_groups(x[None], weight[None], out[None], backend, blocks)


def multiply_groups(x: Any, weight: Any, out: Any, backend: str | None, blocks: Scratch | None = None) -> None:
    """out [G, T, N] = x [G, T, K] weight^T, weight [G, N, K]; arrays of NumPy or CuPy, on their current stream."""
    if not x.size:
        return
    if isinstance(weight, BlockScaledWeight):
        multiply_block_scaled(x.transpose(1, 0, 2), weight, out.transpose(1, 0, 2), backend, blocks is not None)
        return
    batched_product(x, weight.transpose(0, 2, 1), out, backend, blocks)


def multiply_block_scaled(
    x: Any, weight: BlockScaledWeight, out: Any, backend: str | None, batch_invariant: bool = False
) -> None:  # fmt: skip
    """out [T, N] or [T, G, N] of x [T, K] or [T, G, K]."""
    if not batch_invariant and rounds(weight, len(x)):
        multiply_rounded(rounded(by_group(x), weight.scratch, backend), weight, by_group(out), x.dtype, backend)
    elif len(x) > MOST_TOKENS and not isinstance(x, np.ndarray) and not batch_invariant:
        multiply_dequantized(by_group(x), weight, by_group(out), backend)
    else:
        fp8_block_linear(
            x, weight.codes, weight.scales, block_rows=weight.block_rows, block_columns=weight.block_columns,
            float32_output=out.dtype == np.float32, prefetch_weights=True, finite_weights=weight.finite,
            is_ue8m0=weight.is_ue8m0, batch_invariant=batch_invariant, out=out, backend=backend,
        )  # fmt: skip


class Rounded(NamedTuple):
    """Activations in FP8.

    Attributes:
        values: [G, T, K] uint8, e4m3
        scales: [G, T, K / FP8_GROUP] float32, powers of two
    """

    values: Any
    scales: Any

    def as_one_group(self) -> Rounded:
        """[1, T, G * K], for arrays from `memory_of_rounded`."""
        return Rounded(*(x.transpose(1, 0, 2).reshape(1, x.shape[1], -1) for x in self))


def rounds(weight: Any, tokens: int) -> bool:
    """Whether a product of `tokens` tokens rounds activations to FP8."""
    return (
        isinstance(weight, BlockScaledWeight)
        and weight.rounds_activations
        and tokens > MOST_TOKENS
        and weight.shape[-1] % FP8_GROUP == 0
    )


def memory_of_rounded(shape: tuple[int, int, int], scratch: Scratch, like: Any, name: str = "fp8") -> Rounded:
    """Arrays for activations [G, T, K] in FP8; in memory a token's groups are consecutive."""
    groups, tokens, columns = shape
    values = scratch.shaped(f"{name}_values", (tokens, groups, columns), np.uint8, like)
    scales = scratch.shaped(f"{name}_scales", (tokens, groups, columns // FP8_GROUP), np.float32, like)
    return Rounded(values.transpose(1, 0, 2), scales.transpose(1, 0, 2))


def rounded(x: Any, scratch: Scratch, backend: str | None) -> Rounded:
    """x [G, T, K] in FP8."""
    out = memory_of_rounded(x.shape, scratch, x)
    with product_kernels(x, backend) as kernels:
        kernels.quantize_groups(x, *out)
    return out


def fp8_product(
    x: Rounded, weight: BlockScaledWeight, out: Any, backend: str | None, out_scales: Any = None
) -> bool:  # fmt: skip
    """Write the product out [G, T, N]: in FP8 with out_scales [G, T, N / FP8_GROUP]. False if the backend cannot."""
    codes, scales = by_group(weight.codes, 0), by_group(weight.scales, 0)
    with product_kernels(x.values, backend) as kernels:
        return kernels.fp8_product(*x, codes, scales, weight.block_rows, weight.block_columns, out, out_scales)


def multiply_rounded(x: Rounded, weight: BlockScaledWeight, out: Any, dtype: Any, backend: str | None) -> None:
    """Write the product out [G, T, N]: of FP8 values, or, if the backend cannot, of their exact values in `dtype`."""
    if fp8_product(x, weight, out, backend):
        return
    values = weight.scratch.shaped("fp8_rounded", x.values.shape, dtype, x.values)
    with product_kernels(values, backend) as kernels:
        kernels.dequantize_blocks(*x, 1, FP8_GROUP, values)
    exact = replace(weight, rounds_activations=False)
    if values.shape[0] == 1 and weight.codes.ndim == 2:
        multiply_block_scaled(values[0], exact, out[0], backend)
    else:
        multiply_block_scaled(values.transpose(1, 0, 2), exact, out.transpose(1, 0, 2), backend)


def multiply_dequantized(x: Any, weight: BlockScaledWeight, out: Any, backend: str | None) -> None:
    """out [G, T, N] = x [G, T, K] weight^T: dequantises a slice of the weight's rows at a time, in scratch memory."""
    codes, scales = by_group(weight.codes, 0), by_group(weight.scales, 0)
    groups, rows, columns = codes.shape
    blocks = max(VALUES_AT_A_TIME // columns // weight.block_rows, 1)
    together = min(blocks * weight.block_rows, rows)
    memory = weight.scratch.array("dequantized", together * columns, x.dtype, x)[: together * columns]
    with product_kernels(x, backend) as kernels:
        for group in range(groups):
            for first in range(0, rows, together):
                part = slice(first, min(first + together, rows))
                values = memory.reshape(1, together, columns)[:, : part.stop - first]
                part_scales = scales[group : group + 1, first // weight.block_rows :]
                kernels.dequantize_blocks(
                    codes[group : group + 1, part], part_scales, weight.block_rows, weight.block_columns, values
                )
                kernels.batched_product(
                    x[group : group + 1], values.transpose(0, 2, 1), out[group : group + 1, :, part]
                )


def flat(x: Any) -> Any:
    """[T, heads, n] as [T, heads * n], also for T = 0."""
    return x.reshape(len(x), x.shape[1] * x.shape[2])


def stacked(weights: list[Any], dtype: Any, xp: Any, scratch: Scratch) -> Any:
    """Matrices [n, K] of any strides stacked as one of `dtype` with contiguous rows, for a single product.

    BlockQuantizedWeights are stacked as a BlockScaledWeight; matrices of several kinds become Parts.
    """
    parts = []
    for block, run in itertools.groupby(weights, block_of):
        if block:
            parts.append(block_scaled(list(run), xp, scratch))
        else:
            parts.append(xp.concatenate([xp.asarray(weight).astype(dtype, order="C", copy=False) for weight in run]))
    return parts[0] if len(parts) == 1 else Parts(parts)


def block_of(weight: Any) -> tuple[int, int] | None:
    return weight.block if isinstance(weight, BlockQuantizedWeight) else None


def width(weight: Any) -> int:
    """Columns of a product with a matrix."""
    return weight.rows if isinstance(weight, Parts) else len(weight)


def compute_type(activations: Any, xp: Any) -> np.dtype[Any]:
    """The type of the weights: the activations' type on a device; on the host float32, which BLAS multiplies."""
    return np.dtype(np.float32) if xp is np else np.dtype(activations)


def in_groups(weight: Any, groups: int) -> Any:
    """A matrix [G * N, K] as [G, N, K]."""
    if isinstance(weight, BlockScaledWeight):
        return weight.in_groups(groups)
    return weight.reshape(groups, -1, weight.shape[1])


def first_rows(weight: Any, rows: int) -> Any:
    """The first rows of a matrix, without a copy; for Parts, the first part's."""
    if isinstance(weight, Parts):
        return weight[0]
    return weight.between(0, rows) if isinstance(weight, BlockScaledWeight) else weight[:rows]


def rows_of(weight: Any, first: int, end: int) -> Any:
    """Rows `first` to `end` of each group."""
    return weight.copied_rows(first, end) if isinstance(weight, BlockScaledWeight) else weight[:, first:end]


def transposed(weight: Any, dtype: Any) -> Any:
    """Rows and columns of each group exchanged; FP8 in blocks of few rows becomes `dtype`."""
    if not isinstance(weight, BlockScaledWeight):
        return weight.transpose(0, 2, 1)
    if weight.block_rows % COLUMNS_STEP == 0:
        return weight.transposed()
    return weight.dequantized(dtype).transpose(0, 2, 1)
