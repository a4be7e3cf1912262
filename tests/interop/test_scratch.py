"""With its results and scratch passed in, an operation allocates nothing, so that frameworks can capture it."""

import numpy as np
import pytest

from cumla.arrays import dlpack
from cumla.interop.ops import OPS
from support import operations
from support.lab import BF16


def long_decode(rng):
    """Dense decode of so many keys that they are split, with partial results."""
    return {
        "q": operations.rows(rng, 2, 1, 4, 576), "k_cache": operations.rows(rng, 12, 64, 576),
        "block_table": rng.integers(0, 12, (2, 10)).astype(np.int32), "cache_seqlens": np.array([640, 300], np.int32),
    }  # fmt: skip


def prefill_in_fp8(rng):
    """A prefill with more heads than the kernel for few heads supports."""
    return {
        "q": operations.rows(rng, 2, 64, 512), "kv": operations.rows(rng, 70, 512),
        "indices": rng.integers(0, 70, (2, 66)).astype(np.int32), "precision": "fp8",
    }  # fmt: skip


CASES = {
    "sparse_mla_decode": operations.CASES["sparse_mla_decode-DSV4_FP8-two-caches"],
    "sparse_mla_prefill": operations.CASES["sparse_mla_prefill-512"],
    "sparse_mla_prefill-fp8": prefill_in_fp8,
    "dense_mla_decode": long_decode,
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_allocated_in_a_capture(device, name, rng, monkeypatch):
    import cupy

    op, host = OPS[name.split("-")[0]], CASES[name](rng)
    arguments = {key: device.put(x) if isinstance(x, np.ndarray) else x for key, x in host.items()}
    want = op.function(**arguments)
    dtypes = {"bfloat16": BF16}
    results = [device.put(np.zeros(shape, dtypes.get(dtype, dtype))) for shape, dtype in op.results(arguments)]
    size = op.scratch_bytes(arguments)
    scratch = device.put(np.full(size, 0xEE, np.uint8)) if size else None
    cupy.cuda.Device().synchronize()

    def refuse(*arguments):
        raise AssertionError(f"allocated: {arguments}")

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with monkeypatch.context() as patched:
            patched.setattr(dlpack, "empty", refuse)
            op.write(arguments, tuple(results), scratch)
        graph = stream.end_capture()
    for _ in range(2):
        graph.launch(stream)
        stream.synchronize()
    for got, wanted in zip(results, want, strict=True):
        assert device.get(got).tobytes() == device.get(wanted).tobytes()


@pytest.mark.parametrize("name", ["sparse_mla_decode", "dense_mla_decode"])
def test_scratch_that_is_too_small_is_refused(device, name, rng):
    op, host = OPS[name], CASES[name](rng)
    arguments = {key: device.put(x) if isinstance(x, np.ndarray) else x for key, x in host.items()}
    results = [device.put(np.zeros(x.shape, x.dtype)) for x in map(device.get, op.function(**arguments))]
    with pytest.raises(ValueError, match="plan: got a workspace of 64 bytes, expected at least"):
        op.write(arguments, tuple(results), device.put(np.zeros(64, np.uint8)))
