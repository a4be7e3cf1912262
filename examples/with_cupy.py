"""The same step on a GPU: CuPy arrays in, CuPy arrays out, on CuPy's current stream.

An optional argument names the backend, such as numba_cuda; the default is the device's fastest.
"""

import sys

import cupy
import ml_dtypes
import numpy as np

import cumla

REQUESTS, HEADS, BLOCK_SIZE, TOPK = 32, 64, 64, 512


def main(backend: str | None = None) -> None:
    rng = np.random.default_rng(0)
    cache = cumla.DSV4_FP8.allocate(num_blocks=1024, block_size=BLOCK_SIZE, xp=cupy)
    num_slots = 1024 * BLOCK_SIZE
    rows = cupy.asarray(rng.standard_normal((num_slots, 512)).astype(ml_dtypes.bfloat16))
    q = cupy.asarray(rng.standard_normal((REQUESTS, 1, HEADS, 512)).astype(ml_dtypes.bfloat16))
    indices = cupy.asarray(rng.integers(0, num_slots, (REQUESTS, 1, TOPK)).astype(np.int32))

    with cupy.cuda.Stream(non_blocking=True) as stream:
        cumla.quantize_and_insert_k_cache(rows, cache, cupy.arange(num_slots), BLOCK_SIZE, backend=backend)
        out, lse = cumla.sparse_mla_decode(q, cache, indices, backend=backend)
        stream.synchronize()
    print(f"out {out.dtype} {out.shape} on {out.device}, largest lse {float(lse.max()):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
