"""The one place that imports the compiler of these kernels, except for ptx.py, which uses its internals.

It is numba-cuda, which has a simulator. Its successor, numba-cuda-mlir, has the same names and no simulator;
docs/kernels/numba-cuda.md lists what prevents kernels that run on both.
"""

from numba import config, cuda, float32, from_dtype, int32, types, uint32

SIMULATED = bool(config.ENABLE_CUDASIM)

__all__ = ["SIMULATED", "cuda", "float32", "from_dtype", "int32", "types", "uint32"]
