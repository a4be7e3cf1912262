"""FP8 matrices as checkpoints store them, e4m3 with a scale for each block, in the memory where a layer computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..layers.weights import BlockQuantizedWeight, checked_blocks, values_of
from ..ops.linear import COLUMNS_STEP
from .scratch import Scratch


@dataclass(frozen=True)
class BlockScaledWeight:
    """One matrix, or one for each of G groups.

    Attributes:
        codes: [N, K] or [G, N, K] uint8, e4m3, rows contiguous
        scales: [ceil(N / block_rows), ceil(K / block_columns)] float32; with groups [G, ...]
        scratch: memory for the rows that a product of many tokens dequantises
        finite: whether it is known that no code is NaN
        is_ue8m0: whether it is known that all scales are powers of two from 2^-100 to 2^7
        rounds_activations: whether products of many tokens round activations to e4m3, with a scale for 128 values
    """

    codes: Any
    scales: Any
    block_rows: int
    block_columns: int
    scratch: Scratch
    finite: bool = False
    is_ue8m0: bool = False
    rounds_activations: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.codes.shape
        return shape

    @property
    def size(self) -> int:
        return int(self.codes.size)

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    def __len__(self) -> int:
        return len(self.codes)

    def copy(self) -> BlockScaledWeight:
        return replace(self, codes=self.codes.copy(), scales=self.scales.copy())

    def with_block_rows(self, rows: int) -> BlockScaledWeight:
        """The same values with scales for blocks of `rows` rows, a divisor of block_rows."""
        if rows == self.block_rows:
            return self
        blocks = -(-self.shape[-2] // rows)
        times = min(self.block_rows // rows, blocks)  # a block may be larger than the matrix
        return replace(self, scales=self.scales.repeat(times, axis=-2)[..., :blocks, :], block_rows=rows)

    def in_groups(self, groups: int) -> BlockScaledWeight:
        """The matrix with its consecutive rows divided into groups."""
        rows = self.shape[0] // groups
        same = self.with_block_rows(math.gcd(self.block_rows, rows))
        codes, scales = (x.reshape(groups, -1, x.shape[-1]) for x in (same.codes, same.scales))
        return replace(same, codes=codes, scales=scales)

    def between(self, first: int, end: int) -> BlockScaledWeight:
        """Rows of a matrix, without a copy; first is a multiple of block_rows."""
        blocks = slice(first // self.block_rows, -(-end // self.block_rows))
        return replace(self, codes=self.codes[first:end], scales=self.scales[blocks])

    def copied_rows(self, first: int, end: int) -> BlockScaledWeight:
        """A copy of some rows of each group."""
        same = self.with_block_rows(math.gcd(self.block_rows, first))
        blocks = slice(first // same.block_rows, -(-end // same.block_rows))
        return replace(same, codes=same.codes[:, first:end].copy(), scales=same.scales[:, blocks].copy())

    def transposed(self) -> BlockScaledWeight:
        """A copy with rows and columns of each group exchanged; block_rows is a multiple of COLUMNS_STEP."""
        codes, scales = (x.transpose(0, 2, 1).copy() for x in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales, block_rows=self.block_columns, block_columns=self.block_rows)

    def dequantized(self, dtype: Any) -> Any:
        """Its values."""
        values = values_of(self.codes, self.scales, (self.block_rows, self.block_columns))
        return dlpack.namespace_of(self.codes).asarray(values.astype(dtype))


class Parts(tuple[Any, ...]):
    """Matrices of several types that multiply the same rows; the columns of their products are consecutive."""

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


def can_stay(weight: Any) -> bool:
    """Whether the products take a weight in FP8, without dequantising it first."""
    return isinstance(weight, BlockQuantizedWeight) and weight.block[1] % COLUMNS_STEP == 0


def block_scaled(weights: list[BlockQuantizedWeight], xp: Any, scratch: Scratch) -> BlockScaledWeight:
    """Matrices [n, K] of the same blocks stacked as one.

    A single matrix is not copied if its rows are contiguous and do not overlap.
    """
    checked = [checked_blocks(weight, "weight") for weight in weights]
    block_rows, block_columns = weights[0].block
    rows = math.gcd(block_rows, *(len(codes) for codes, _ in checked[:-1]))
    placed = [(in_rows(xp.asarray(codes)), scales) for codes, scales in checked]
    parts = [
        BlockScaledWeight(codes, scales, block_rows, block_columns, scratch).with_block_rows(rows)
        for codes, scales in placed
    ]
    codes = xp.concatenate([each.codes for each in parts]) if len(parts) > 1 else parts[0].codes
    scales = np.concatenate([each.scales for each in parts])
    finite = xp is not np and not bool(((codes & 0x7F) == 0x7F).any())  # only device kernels use it
    fractions, exponents = np.frexp(scales)  # in [0.5, 1)
    is_ue8m0 = bool(((fractions == 0.5) & (exponents >= -99) & (exponents <= 8)).all())
    return BlockScaledWeight(codes, xp.asarray(scales), rows, block_columns, scratch, finite, is_ue8m0)


def in_rows(codes: Any) -> Any:
    """Codes [n, K] with contiguous rows that do not overlap, as kernels need them: `codes` itself, or a copy."""
    columns = codes.shape[1]
    row_stride, column_stride = codes.strides
    contiguous = column_stride == 1 or columns == 1
    return codes if contiguous and row_stride >= columns else codes.copy()
