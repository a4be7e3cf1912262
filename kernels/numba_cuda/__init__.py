"""Numba CUDA kernels: portable, readable and changeable without C++.

They run on a device, on CuPy arrays, and in Numba's simulator (NUMBA_ENABLE_CUDASIM=1 before Numba is
imported), on NumPy arrays: there a `print` or a debugger works inside a kernel. Each kernel's docstring says what a
thread block and a thread do. Threads of a block communicate only by shared memory and syncthreads: the
simulator has no shuffles or ballots. The launcher chooses the number of threads, so every kernel
strides by cuda.blockDim.x; only attention and products, whose threads hold parts of matrices, fix it.

Reading order for attention: sparse_attention and dense_attention launch latent_attention's kernel, or their own
kernels; attention_tile has the softmax between two matrix products; products has the matrix products, on tensor cores
or, in the simulator, by NumPy; latent_rows and plain_rows load rows into shared memory; log_sums combines partial
results; intrinsics has the few instructions that Numba lacks. Functions generate these kernels with all sizes as
constants. The kernels sum in float32 and, unlike the cuda backend, have no exact kernel that recomputes results.
Results are outside the error bounds of other backends for infinite rows, and for rows so large (from about 1e6 on)
that float32 loses the differences between scores. A NaN affects only the tokens that attend to it.

Floating-point arrays are passed as unsigned integers of the same bits, together with their kind
(`launch.kind_of`), so that device and simulator do the same arithmetic (kernels/numba_common/numbers.py).
"""
