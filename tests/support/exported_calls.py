"""Calls of a file of `cumla export` with arrays that contain values, for the C runtime and for Python."""

import contextlib
import ctypes
import dataclasses
import functools

import numpy as np

from cumla.export.fields import PLANNED
from cumla.export.header import number_of
from cumla.specs.inputs import Inputs, Step
from support.guarded import SENTINEL, Guarded

MOST_PAGES, MOST_CONTEXT = 40, 4096
GAPS = 4  # most 16 bytes between rows


class Real(Inputs):
    """Inputs of any size, on the host, with the shapes that cumla/export/unread.py gives."""

    def __init__(self, rng, size, shared):
        super().__init__("reference", size)
        self.rng, self.shared = rng, shared

    def resized(self, **sizes):
        return Real(self.rng, dataclasses.replace(self.size, **sizes), self.shared)

    def in_rings(self):
        return self

    def widened(self, table, columns):
        return self.put(self.rng.integers(-1, self.size.pages, (len(table), columns)), np.int32)

    @functools.cached_property
    def step(self):
        new = self.size.query_lens
        before = self.rng.integers(0, np.maximum(self.size.context - new, 0) + 1)
        return Step(new, (before + new).astype(np.int32), None)

    def longest(self, lens):
        return self.size.context

    def slots(self, count, dtype=np.int64):
        """Slots of a row each, some of them absent."""
        slots = np.full(count, -1)
        found = super().slots(count)
        slots[: len(found)] = found
        return slots.astype(dtype)

    def new_cache(self, layout):
        made = layout.allocate(self.size.pages, self.size.block_size, np)
        made[...] = SENTINEL
        return made

    def context_lens(self, requests, next_n):
        return self.put(self.rng.integers(0, self.size.context + 1, requests), np.int32)

    def valid(self, tokens):
        return self.rng.random(tokens) < 0.9


def drawn(sampler, rng):
    """Arguments of a random call, on the host; results contain the sentinel, a workspace zeros."""
    call, size = sampler.call, sampler.sizes()
    most = {"pages": MOST_PAGES, "context": max(MOST_CONTEXT, size.block_size), "keys": MOST_CONTEXT}
    size = dataclasses.replace(
        size, **{name: min(getattr(size, name), end) for name, end in most.items() if name in call.ranges}
    )
    real = functools.partial(Real, rng)
    arguments = call.arguments(size, real)
    for name in call.fields.results:
        arguments[name].view(np.uint8)[...] = SENTINEL
    if "workspace" in arguments:
        arguments["workspace"] = np.zeros_like(arguments["workspace"])
    return arguments


class Placed:
    """Arguments of a call in guarded memory.

    Args:
        gaps: of each array's rows, as of `gaps_of`
    """

    def __init__(self, lab, arguments, gaps):
        self.guarded = {
            name: Guarded(lab, value, gaps.get(name, ())) for name, value in arguments.items()
            if isinstance(value, np.ndarray)
        }  # fmt: skip
        self.arguments = arguments | {name: guarded.array for name, guarded in self.guarded.items()}

    def check(self):
        """Nothing is written behind, before or between the rows of an array."""
        for guarded in self.guarded.values():
            guarded.assert_margins()

    def assert_same(self, other):
        """The bytes of all arrays are equal; a workspace's content is its own."""
        for name, guarded in self.guarded.items():
            if name != "workspace":
                np.testing.assert_array_equal(guarded.everything(), other.guarded[name].everything(), err_msg=name)


def gaps_of(sampler, arguments, rng):
    """Gaps with which the strides that a call may choose are multiples of what the sampler says."""
    found = {}
    for name, array in arguments.items():
        if not isinstance(array, np.ndarray):
            continue
        gaps, extent = [], array.itemsize
        for axis in reversed(range(1, array.ndim)):
            extent *= array.shape[axis]
            step = sampler.steps[name][axis - 1]
            gap = -extent % step + step * int(rng.integers(0, GAPS + 1)) if step else 0
            gaps.append(gap)
            extent += gap
        found[name] = tuple(gaps)
    return found


def python_call(call, arguments):
    """The call of the Python function; a planned call comes after the call that computes its plan."""
    fields = call.fields
    plan = fields.plan_in(arguments)
    if arguments.get(PLANNED):
        fields.call(arguments, plan)
    fields.call(arguments, plan)


class Library:
    """The C runtime, opened with a file for a device."""

    def __init__(self, path, data, device=0):
        self.library = ctypes.CDLL(str(path))
        self.library.cumla_message.restype = ctypes.c_char_p
        self.library.cumla_close.argtypes = [ctypes.c_void_p]
        self.library.cumla_close.restype = None
        self.handle = ctypes.c_void_p()
        status = self.library.cumla_open_memory(data, ctypes.c_size_t(len(data)), device, ctypes.byref(self.handle))
        assert status == 0, self.message

    @property
    def message(self):
        return self.library.cumla_message().decode()

    def function(self, fields, arguments, stream):
        """A function that makes a call on a stream, its words packed."""
        words = fields.values(arguments)
        packed, number = (ctypes.c_int64 * len(words))(*words), number_of(fields.spec.name)
        size, stream = ctypes.c_size_t(8 * len(words)), ctypes.c_void_p(stream)

        def make():
            status = self.library.cumla_call(
                self.handle, ctypes.c_uint32(number), packed, size, stream, ctypes.c_uint32(0)
            )
            assert status == 0, self.message

        return make

    def call(self, call, arguments, stream):
        """As `python_call`."""
        if arguments.get(PLANNED):
            self.function(call.fields, arguments | {PLANNED: 0}, stream)()
        self.function(call.fields, arguments, stream)()

    def close(self):
        self.library.cumla_close(self.handle)


@contextlib.contextmanager
def opened(path, data, device=0):
    library = Library(path, data, device)
    try:
        yield library
    finally:
        library.close()
