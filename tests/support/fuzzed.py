"""Calls of random sizes, with arguments of any value, on a device.

Arrays that an operation may read are initialised; outputs are not. Every array is an
allocation of its exact size. Rows of arrays of several axes have gaps between them, with or without the alignment that
wide accesses need.
"""

import functools

import cupy
import numpy as np

from cumla.dispatch.call import FLOATS
from cumla.specs.inputs import Inputs, Size, Step
from cumla.specs.spec import Array
from support.indexing import anything_like

RESULT = Array(FLOATS, "in out")  # one that a call is given
SPECIAL = (np.nan, np.inf, -np.inf, 1e6, 1e30, 1e38, 1e-30, 0.0)


def random_size(rng):
    def upto(most, least=0):
        return int(rng.integers(least, most + 1))

    requests = upto(4)
    return Size(
        requests, upto(requests), tokens=upto(69), rows=upto(69), keys=upto(699, 1), heads=upto(70, 1), topk=upto(200),
        window=upto(200, 1), context=upto(150, 1), block_size=int(rng.choice((1, 2, 53, 64))), pages=upto(3, 1),
        spare=upto(2),
    )  # fmt: skip


class Fuzzed(Inputs):
    """Inputs of a random size, on the host: `given` then puts them on the device, with any value."""

    def __init__(self, seed, size=None):
        rng = np.random.default_rng(seed)
        super().__init__("reference", random_size(rng) if size is None else size)
        self.rng = rng

    def choose(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def slots(self, count, dtype=np.int64):
        slots = self.rng.integers(-2, self.size.pages * self.size.block_size + 2, count)
        return slots.astype(self.choose(np.int64, np.int32))

    def scores(self, rows, columns):
        """Rows for every kernel of the top-k: short and long, random and sorted."""
        scores = self.rng.standard_normal((rows, self.choose(columns, 3_000, 20_000, 70_000)), np.float32)
        return np.sort(scores) if self.rng.random() < 0.3 else scores

    def context_lens(self, requests, next_n):
        shape = self.choose((requests,), (requests, next_n))
        return self.rng.integers(0, self.size.context + 1, shape).astype(np.int32)

    @functools.cached_property
    def step(self):
        decodes, prefills = self.size.decodes, self.size.requests - self.size.decodes
        share = np.ones(prefills) / max(prefills, 1)
        shares = self.rng.multinomial(max(self.size.tokens - decodes, 0), share) if prefills else []
        query_lens = np.append(np.ones(decodes, int), shares).astype(int)
        lens = query_lens + self.rng.integers(0, self.size.context + 1, self.size.requests)
        return Step(query_lens, lens, self.rng.integers(0, lens + 1))

    def pairs(self, pages):
        return self.rng.integers(-2, pages + 2, (self.rng.integers(0, 6), 2))

    def given(self, spec, arguments):
        """The arguments of a call on the device, with any value in their arrays."""
        arrays = {**dict.fromkeys(spec.outputs, RESULT), **spec.arrays}
        return {name: self._given(arrays[name], x) if name in arrays else x for name, x in arguments.items()}

    def _given(self, array, value):
        if isinstance(value, list | tuple):
            return type(value)(self._given(array, x) for x in value)
        if not isinstance(value, np.ndarray):
            return value
        value = value if array.way == "out" else self.any_like(array, value)
        return self.placed(value, array.way != "out", array.packed)

    def any_like(self, array, x):
        """Any values of an array: integers that name anything, or as they are; rows of a special value."""
        if array.holds:
            return anything_like(self.rng, x) if self.rng.random() < 0.5 else x
        if x.dtype == np.uint8:
            return self.rng.integers(0, 256, x.shape, np.uint8) if self.rng.random() < 0.5 else x
        if x.dtype.kind in "biu" or not x.ndim:
            return x
        x = x.copy()
        with np.errstate(over="ignore"):
            x[self.rng.random(x.shape) < 0.003] = self.choose(*SPECIAL)
            x[self.rng.random(x.shape[:-1]) < 0.05] = self.choose(*SPECIAL)
        return x

    def placed(self, x, filled, packed):
        """An array on the device, perhaps with a gap after each entry of the first axis but the last."""
        gap = self.choose(0, 1, 8, 16) if x.ndim > 1 and x.size and not packed else 0
        row = int(np.prod(x.shape[1:]))
        count = max(len(x) - 1, 0) * (row + gap) + row if x.size else 0
        memory = (cupy.zeros if filled else cupy.empty)(count, x.dtype)
        strides = ((row + gap) * x.itemsize, *np.empty(x.shape[1:], x.dtype).strides) if x.ndim else ()
        placed = cupy.ndarray(x.shape, x.dtype, memory.data, strides)
        if filled:
            placed[...] = cupy.asarray(np.ascontiguousarray(x))
        return placed


def call(spec, variant, backend, seed, size=None):
    """A call of a variant of an operation. size: TINY, or random."""
    x = Fuzzed(seed, size)
    spec.function(**x.given(spec, variant.arguments(x)), backend=backend)
