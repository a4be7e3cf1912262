"""Products of batches of matrices: of all tokens at once, or, for batch-invariant layers, in blocks of tokens.

BLAS and cuBLAS choose an algorithm by the shape, so the sums of a token's product depend on the number of tokens. With
one shape, and operands in one memory with the same strides and alignment, there is one algorithm.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch.call import Call
from ..kernels.types.plan import Workspace
from ..kernels.types.projection import ROW_BLOCK

DEVICE_ROW_BLOCK = 128  # tokens of a product on a device: as many read a weight once as one token does


def product_kernels(like: Any, backend: str | None) -> AbstractContextManager[Any]:
    """A backend's kernels of products, where an array is."""
    call = Call(backend)
    call.first = dlpack.argument(like, "x")
    return call.kernels("projection")


def batched_product(a: Any, b: Any, out: Any, backend: str | None, blocks: Workspace | None = None) -> None:
    """out [n, M, N] = a [n, M, K] b [n, K, N]; arrays of NumPy or CuPy, on their current stream.

    Args:
        blocks: memory for blocks of rows: a row of out then has the same bits for any M and any other rows. None: one
            product
    """
    with product_kernels(a, backend) as kernels:
        if blocks is None:
            kernels.batched_product(a, b, out)
            return
        (batch, rows, depth), on_host = a.shape, isinstance(a, np.ndarray)
        size = ROW_BLOCK if on_host else DEVICE_ROW_BLOCK
        block = blocks.shaped("product_rows", (batch, size, depth), a.dtype, a)
        result = blocks.shaped("product", (batch, size, b.shape[2]), out.dtype, a)
        for first in range(0, rows, size):
            count = min(size, rows - first)
            bits_of(block)[:, :count] = bits_of(a)[:, first : first + count]
            if on_host and count < size:
                block[:, count:] = 0  # BLAS warns of values that are not finite, which memory may hold
            kernels.batched_product(block, b, result)
            bits_of(out)[:, first : first + count] = bits_of(result)[:, :count]


def bits_of(array: Any) -> Any:
    """An array as integers, which CuPy can copy and zero even if it lacks the type."""
    return array.view(f"u{array.dtype.itemsize}")
