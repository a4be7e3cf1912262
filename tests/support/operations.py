"""Small calls of operations, as NumPy arrays by name.

EXAMPLES  calls of `python -m cumla check`, for every public operation, and for one that only layers call
CASES     calls of operations for frameworks' compilers: functions of a generator that return arguments
"""

import numpy as np

import cumla
from cumla.dispatch import backends
from cumla.interop.ops import OPS
from cumla.specs.inputs import Inputs
from cumla.specs.self_test import CASES as EVERY_CASE
from support.lab import BF16

BLOCK, BLOCKS = 4, 6
NO_OPERATIONS = {"supports", "debug", "register_layout", "release_memory"}  # public functions that compute nothing


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(BF16)


def ints(rng, high, *shape):
    return rng.integers(0, high, shape).astype(np.int32)


def page_table(rng, requests=3):
    return rng.permutation(BLOCKS).reshape(requests, -1).astype(np.int32)


def fp8_cache(rng, layout):
    """A cache of finite values."""
    cache = np.zeros((BLOCKS, BLOCK, layout.token_bytes), np.uint8)
    k = rng.standard_normal((BLOCKS * BLOCK, layout.head_dim)).astype(BF16)
    slots = np.arange(BLOCKS * BLOCK)
    cumla.quantize_and_insert_k_cache(k, cache, slots, BLOCK, layout=layout, backend="reference")
    return cache


def arguments_of(example, seed):
    """The arguments of an example by name: NumPy arrays and other values."""
    return example.arguments(Inputs("reference", seed=seed))


def rebuilt(value, parts):
    """A list or tuple like `value`, of other parts."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def identifier(example):
    return f"{example.op}-{example.variant.replace(', ', '-').replace(' ', '-')}".rstrip("-")


EXAMPLES = {identifier(example): example for example in EVERY_CASE}


def is_on(backend, name):
    """Whether a backend has kernels for the example of that name."""
    try:
        backends.kernels(backend, EXAMPLES[name].kernels)
    except (ValueError, ImportError):
        return False
    return True


def known_to_compilers(example):
    """A function that converts arguments for compilers: no outputs, arrays of scales, 32-bit integers, as in JAX."""
    op = OPS.get(example.op)

    def taken(name, x):
        if name in op.arrays and isinstance(x, float):
            return np.array([x], np.float32)
        return x.astype(np.int32) if getattr(x, "dtype", None) == np.int64 else x

    def make(rng):
        arguments = arguments_of(example, int(rng.integers(2**32)))
        return {name: taken(name, x) for name, x in arguments.items() if name in op.signature.parameters}

    return make


CASES = {name: known_to_compilers(example) for name, example in EXAMPLES.items() if example.op in OPS}


def operation(case):
    """The name of the operation that a case calls."""
    return EXAMPLES[case].op


def expected(case, arguments, writes, put=np.array):
    """The results of an eager call on arrays made by `put`, and then the arrays that it wrote."""
    arrays = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    results = getattr(cumla, operation(case))(**arrays)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return [*results, *(arrays[name] for name in writes if arrays.get(name) is not None)]


def same_bits(got, want):
    """Whether two arrays on the host have the same dtype, shape and bits."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def assert_same_bits(got, want):
    """Compares two arrays; if they differ, says where and how."""
    if same_bits(got, want):
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    unsigned = f"u{got.itemsize}" if got.dtype != np.bool_ else "u1"
    got_bits, want_bits = (np.ascontiguousarray(x).view(unsigned) for x in (got, want))
    places = np.argwhere(got_bits != want_bits)
    first = [f"{tuple(map(int, at))}: {got_bits[tuple(at)]:#x} for {want_bits[tuple(at)]:#x}" for at in places[:4]]
    raise AssertionError(f"{len(places)} of {got.size} values have other bits: {'; '.join(first)}")
