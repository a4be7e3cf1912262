"""The embedded default on a machine without a GPU: Numba loops over all cores, and BLAS for matrix products."""
