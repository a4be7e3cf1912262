"""Property tests that run on every backend, the slow ones with fewer examples."""

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from support.lab import BF16

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT_DTYPES = (BF16, np.float16, np.float32)
EMULATED_EXAMPLES = 10
MOST_EXAMPLES = 1000  # for any property; fewer if all examples are slow (checked.py)
SEED = 0  # set by --seed: different examples for each number

seeds = st.integers(0, 2**32 - 1)


def for_all(lab, examples=25, tiny_examples=4, **strategies):
    """Run the decorated function immediately, for examples of these strategies; fewer if they are slow."""
    if lab.emulated:  # each may be a kernel to compile
        examples = min(examples, EMULATED_EXAMPLES)
    examples = min(examples, MOST_EXAMPLES)

    def decorate(check):
        property_ = settings(
            max_examples=tiny_examples if lab.tiny else examples,
            deadline=None,
            database=None,
            derandomize=not SEED,
            suppress_health_check=list(HealthCheck),
        )(given(**strategies)(check))
        (seed(SEED)(property_) if SEED else property_)()

    return decorate


def numbers(rng, shape, dtype, nonfinite=False):
    """Values of every magnitude of a dtype, zeros and subnormals among them, in runs of similar magnitude."""
    exponents = rng.integers(-24, 12, (*shape[:-1], -(-shape[-1] // 32))).repeat(32, axis=-1)[..., : shape[-1]]
    with np.errstate(all="ignore"):
        values = np.ldexp(rng.standard_normal(shape), exponents)
        values[rng.random(shape) < 0.02] = 0.0
        values[rng.random(shape) < 0.02] *= 1e-30
        if nonfinite:
            for value in (np.nan, np.inf, -np.inf):
                values[rng.random(shape) < 0.01] = value
        return values.astype(np.float32).astype(dtype)


def slots_for(rng, count, num_slots, dtype):
    """Slots without duplicates, some of which are absent or beyond the cache in one way or another."""
    slots = np.full(count, -1, np.int64)
    real = min(count, num_slots)
    slots[:real] = rng.permutation(num_slots)[:real]
    slots = rng.permutation(slots)
    info = np.iinfo(dtype)
    wrong = np.array([-1, -2, info.min, num_slots, num_slots + 1, info.max])
    absent = rng.random(count) < 0.2
    slots[absent] = rng.choice(wrong, absent.sum())
    return slots.astype(dtype)


def fuzzed(rng, shape, highest):
    """int32, mostly in [0, highest), the others of any value."""
    values = rng.integers(0, max(highest, 1), shape)
    wrong = np.array([-1, -7, INT32_MIN, INT32_MAX, highest, highest + 1, 2**30])
    absent = rng.random(shape) < 0.15
    values[absent] = rng.choice(wrong, absent.sum())
    return values.astype(np.int32)
