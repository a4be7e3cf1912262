"""Norms and gates of a single array, in float32 and in the caller's memory: a captured step must not allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import dlpack
from .products import multiply
from .scratch import Scratch

FLOAT32 = np.dtype(np.float32)
MOST_EXPONENT = 80  # of a gate's sigmoid: its exponential is a float32
Memory = Callable[[str, tuple[int, ...], Any], Any]  # of a name, a shape and a dtype


class LayerNorm:
    """A LayerNorm of rows of any width. A product with a column computes means: CuPy's reductions allocate."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias
        self.shares = dlpack.namespace_of(weight).full((1, len(weight)), 1 / len(weight), FLOAT32)

    def run(
        self, x: Any, eps: float, out: Any, memory: Memory, backend: str | None, blocks: Scratch | None = None
    ) -> None:  # fmt: skip
        """Write out: (x - mean) / sqrt(variance + eps) * weight + bias; x [T, D]."""
        xp = dlpack.namespace_of(x)
        rows, squares = (memory(name, x.shape, FLOAT32) for name in ("norm_rows", "norm_squares"))
        mean = memory("norm_mean", (len(x), 1), FLOAT32)
        rows[...] = x
        multiply(rows, self.shares, mean, backend, blocks)
        xp.subtract(rows, mean, out=rows)
        xp.multiply(rows, rows, out=squares)
        multiply(squares, self.shares, mean, backend, blocks)
        xp.add(mean, np.float32(eps), out=mean)
        xp.sqrt(mean, out=mean)
        xp.divide(rows, mean, out=rows)
        xp.multiply(rows, self.weight, out=rows)
        xp.add(rows, self.bias, out=rows)
        out[...] = rows


def apply_gate(values: Any, gate: Any, memory: Memory) -> None:
    """Multiply values [T, h, V] by the sigmoid of gate [T, h * V], in place."""
    xp = dlpack.namespace_of(values)
    shares, rows = memory("gate_shares", values.shape, FLOAT32), memory("gate_values", values.shape, FLOAT32)
    shares[...] = gate.reshape(values.shape)
    xp.maximum(shares, np.float32(-MOST_EXPONENT), out=shares)
    xp.negative(shares, out=shares)
    xp.exp(shares, out=shares)
    xp.add(shares, np.float32(1), out=shares)
    rows[...] = values
    xp.divide(rows, shares, out=rows)
    values[...] = rows
