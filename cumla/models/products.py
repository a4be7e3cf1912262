"""Products with weights: BLAS on the host, cuBLAS on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.call import Call


def multiply(x: Any, weight: Any, out: Any, backend: str | None) -> None:
    """out [T, N] = x [T, K] weight^T, weight [N, K]."""
    multiply_groups(x[None], weight[None], out[None], backend)


def multiply_groups(x: Any, weight: Any, out: Any, backend: str | None) -> None:
    """out [G, T, N] = x [G, T, K] weight^T, weight [G, N, K]; arrays of NumPy or CuPy, on their current stream."""
    if not x.size:
        return
    call = Call(backend)
    call.begin(x, dlpack.framework_of(x))
    with call.kernels("projection") as kernels:
        kernels.batched_product(x, weight.transpose(0, 2, 1), out)


def flat(x: Any) -> Any:
    """[T, heads, n] as [T, heads * n], also for T = 0."""
    return x.reshape(len(x), x.shape[1] * x.shape[2])


def stacked(weights: list[Any], dtype: Any, xp: Any) -> Any:
    """Matrices [n, K] stacked as one of `dtype`: one product gives the columns of all."""
    return xp.concatenate([xp.asarray(weight).astype(dtype, copy=False) for weight in weights])


def compute_type(activations: Any, xp: Any) -> np.dtype[Any]:
    """The type of the weights: the activations' type on a device; on the host float32, which BLAS multiplies."""
    return np.dtype(np.float32) if xp is np else np.dtype(activations)
