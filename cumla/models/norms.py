"""Norms of a single array, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np


def rms_norm(x: Any, weight: Any, eps: float) -> None:
    """x / sqrt(mean(x^2) + eps) * weight, in place; x [T, D]."""
    rows = x.astype(np.float32)
    x[...] = (rows * _shares(rows, eps) * weight).astype(x.dtype)


def layer_norm(x: Any, weights: tuple[Any, ...], eps: float, out: Any) -> None:
    """Write out: (x - mean) / sqrt(variance + eps) * weight + bias; x [T, D]."""
    rows, (weight, bias) = x.astype(np.float32), weights
    rows -= rows.mean(axis=1, keepdims=True)
    out[...] = (rows * _shares(rows, eps) * weight + bias).astype(out.dtype)


def _shares(rows: Any, eps: float) -> Any:
    return ((rows * rows).mean(axis=1, keepdims=True) + np.float32(eps)) ** np.float32(-0.5)
