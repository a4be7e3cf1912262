"""Every example call, whatever its arrays of numbers hold: nothing but what an operation writes is written, and that
within its arrays. Reads outside are seen as in test_safety_cache.py."""

import numpy as np
import pytest

from cumla.dispatch import backends
from support import operations
from support.guarded import Guarded
from support.indexing import anything
from support.properties import INT64_MAX, INT64_MIN

pytestmark = pytest.mark.filterwarnings("error")
ROUNDS = 2
LONG_SIMULATED = ("sparse_attention", "dense_attention", "indexer")  # files of kernels


def has_no_such_kernels(x):
    try:
        backends.kernels(x.backend, operations.EXAMPLES[x.get("name")].kernels)
    except (ValueError, ImportError):
        return True
    return False


def anything_like(rng, array):
    """Integers of any value in the place of an array's; numbers stay."""
    if array.dtype == np.int64:
        near = rng.random(array.shape) < 0.5
        return np.where(near, array, rng.integers(INT64_MIN, INT64_MAX, array.shape))
    if array.dtype == np.int32:
        return np.where(rng.random(array.shape) < 0.3, array, anything(rng, array.shape))
    return array


def takes_the_simulator_long(x):
    return x.simulated and operations.EXAMPLES[x.get("name")].kernels in LONG_SIMULATED


@pytest.mark.nowhere(when=has_no_such_kernels)
@pytest.mark.nowhere(when=takes_the_simulator_long)
@pytest.mark.parametrize("name", operations.EXAMPLES)
def test_any_integers(lab, rng, name):
    example = operations.EXAMPLES[name]
    for seed in range(1 if lab.tiny else ROUNDS):
        guarded = []

        def put(value, guarded=guarded):
            if isinstance(value, list | tuple):
                return type(value)(put(x) for x in value)
            if not isinstance(value, np.ndarray) or not value.ndim:
                return value
            guarded.append(Guarded(lab, np.ascontiguousarray(anything_like(rng, value))))
            return guarded[-1].array

        arguments = {key: put(value) for key, value in operations.arguments_of(example, seed).items()}
        operations.public(example)(**arguments, backend=lab.backend)
        for array in guarded:
            array.assert_margins()
