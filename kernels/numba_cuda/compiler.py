"""The one place where the compiler of these kernels is imported, but for ptx.py, which is written against its insides.

It is numba-cuda, which has a simulator. Its successor, numba-cuda-mlir, has the same names and no simulator; what
stands in the way of kernels that run on both is in kernels/NOTES.md.
"""

from __future__ import annotations

from numba import config, cuda, float32, from_dtype, int32, types, uint32

SIMULATED = bool(config.ENABLE_CUDASIM)

__all__ = ["SIMULATED", "cuda", "float32", "from_dtype", "int32", "types", "uint32"]
