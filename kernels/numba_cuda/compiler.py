"""The one place that imports the compiler of these kernels, except for ptx.py, which uses its internals.

The compiler is numba-cuda, which has a simulator. Its successor, numba-cuda-mlir, has the same names and no simulator;
docs/kernels/numba-cuda.md lists the obstacles to kernels that run on both.
"""

from numba import config, cuda, float32, from_dtype, int32, types, uint32

SIMULATED = bool(config.ENABLE_CUDASIM)

__all__ = ["SIMULATED", "cuda", "float32", "from_dtype", "int32", "types", "uint32"]
