"""Numba CUDA kernels: portable, and to be read and changed by people who do not write C++.

They run on a device, on CuPy arrays, and in Numba's simulator (NUMBA_ENABLE_CUDASIM=1 before Numba is
imported), on NumPy arrays: there a `print` or a debugger works inside a kernel. Each kernel says what a thread
block and a thread do. Threads of a block meet in shared memory and at syncthreads, and nowhere else: the
simulator has no shuffles or ballots. How many threads a block has is the launcher's choice, so every kernel
strides by cuda.blockDim.x; only attention and products, whose threads hold parts of matrices, say how many they are.

Attention reads from the top: sparse_attention and dense_attention launch the kernel of latent_attention, or one of
their own; attention_tile is the softmax between two products of matrices; products has those, on tensor cores or, in
the simulator, by NumPy; latent_rows and plain_rows bring rows into shared memory; log_sums puts parts together;
intrinsics has the few instructions that Numba lacks. These kernels are made by functions that are given all sizes: for
the compiler they are constants. They add up in float32, and no exact kernel stands behind them as in the cuda backend:
infinite rows, and finite ones so large (from about 1e6 on) that float32 loses what scores differ by, are attended to
beyond the bounds that other backends keep. A NaN stays with the tokens that attend to it.

Floating-point arrays arrive as the unsigned integers that their bits are, and their kind beside them
(`launch.kind_of`), so that device and simulator do the same arithmetic (kernels/numba_common/numbers.py).
"""
