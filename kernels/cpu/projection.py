"""Matrix products."""

import numpy as np


def batched_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N], of any strides."""
    out[...] = np.matmul(a.astype(np.float32, copy=False), b.astype(np.float32, copy=False))
