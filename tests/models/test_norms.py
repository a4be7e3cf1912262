"""A LayerNorm and a gate: equal to float64, and without memory of their own, as a captured step needs it."""

import tracemalloc

import numpy as np
import pytest

from cumla.models.norms import LayerNorm, apply_gate
from cumla.models.scratch import Scratch
from support.lab import BF16

TOKENS, WIDTH = 64, 2048


class Run:
    """Both, of one set of arrays; `scratch` is the memory."""

    def __init__(self, dtype):
        rng, scratch = np.random.default_rng(0), Scratch()
        self.x = (3 * rng.normal(size=(TOKENS, WIDTH)) + 2).astype(dtype)
        self.weights = rng.normal(size=WIDTH).astype(np.float32), rng.normal(size=WIDTH).astype(np.float32)
        self.normed, self.values = np.zeros_like(self.x), self.x.reshape(TOKENS, 16, -1).copy()
        self.gate = (40 * rng.normal(size=(TOKENS, WIDTH))).astype(dtype)
        self.memory = lambda name, shape, kind: scratch.shaped(name, shape, kind, self.x)

    def norm(self):
        LayerNorm(*self.weights).run(self.x, 1e-6, self.normed, self.memory, None)

    def multiply(self):
        apply_gate(self.values, self.gate, self.memory)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
def test_results_are_float64_s(dtype):
    run = Run(dtype)
    before, bound = run.values.astype(np.float64), 2e-6 if dtype == np.float32 else 2.0**-8
    run.norm()
    run.multiply()
    x = run.x.astype(np.float64)
    want = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6) * run.weights[0] + run.weights[1]
    np.testing.assert_allclose(run.normed.astype(np.float64), want, rtol=bound, atol=bound)
    shares = 1 / (1 + np.exp(-run.gate.astype(np.float64))).reshape(before.shape)
    np.testing.assert_allclose(run.values.astype(np.float64), before * shares, rtol=bound, atol=1e-30)


@pytest.mark.parametrize("name", ["norm", "multiply"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
def test_nothing_of_the_arrays_size_is_allocated(name, dtype):
    run = Run(dtype)
    getattr(run, name)()  # takes the memory of this size
    tracemalloc.start()
    try:
        getattr(run, name)()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < run.x.size
