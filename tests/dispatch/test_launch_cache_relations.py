"""Arrays of a cached call may be related in any way, and differently from those of the recorded call.

Each call runs twice on copies of one memory, normally and while launches are recorded, when every call runs
in full: the memory must hold the same bytes afterwards, or both must raise the same error.
"""

import numpy as np
import pytest

from cumla.dispatch import launch_cache
from cumla.kernels.cuda.launch import recorded_launches
from support.calls import NAMES, call, is_attention, kernels_of
from support.operations import rebuilt

MARGIN, ALIGNMENT = 1 << 14, 64
NEVER = (  # they allocate memory that is no result; spans of a copy are of its call alone
    "candidate_topk", "copy_spans", "indexer_topk", "indexer_topk-candidate_blocks", "indexer_topk-cu_seqlen_ks",
    "indexer_topk-slots", "select_candidate_blocks",
)  # fmt: skip
OPERATIONS = [
    name for name in NAMES
    if (not is_attention(name) or name.startswith("merge_attn_states")) and kernels_of(name) != "shards"  # in full
]  # fmt: skip


@pytest.fixture
def made_again(monkeypatch):
    """The calls that the cache handles, unmodified."""
    calls, again = [], launch_cache.KnownCall.again
    monkeypatch.setattr(launch_cache.KnownCall, "again", lambda *x: calls.append(1) or again(*x))
    return calls


class Placed:
    """The arrays of a call in one memory.

    Args:
        odd: how many of them have other strides than usual
        alone: integer arrays, caches and pages of spans do not overlap others: slots may be duplicated, caches may
            share memory, and the order of what is written to one place, or read and written, is left open
        layouts: by name how an array is strided: its cache key but for the address
    """

    def __init__(self, arguments, odd, rng, alone=False):
        self.arguments, self.alone = arguments, alone
        self.arrays = {name: x for name, x in flat(arguments).items() if not name.startswith("src_to_dst")}
        odd = rng.choice(list(self.arrays), odd)
        self.layouts = {name: self._layout(x, name in odd, rng) for name, x in self.arrays.items()}

    @staticmethod
    def _layout(x, odd, rng):
        """Strides, the bytes from the lowest element to the first, and all bytes."""
        strides = list(x.strides)
        if odd:
            strides[0] *= int(rng.choice([-1, -1, 0, 2]))
        steps = [(n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)] if x.size else [0]
        return strides, -sum(min(step, 0) for step in steps), x.itemsize * bool(x.size) + sum(map(abs, steps))

    def offsets(self, rng, apart):
        """The place of each array: separate, at another one's start or end, or inside it; apart: all separate."""
        found, end, alone = {}, MARGIN, 1.0 if apart else rng.choice([0.6, 0.8, 1.0])
        for name, (_, _, size) in self.layouts.items():
            others = [place for other, place in found.items() if not (self.alone and self.is_alone(other))]
            if rng.random() < alone or not others or (self.alone and self.is_alone(name)):
                start, end = end, end + size
            else:
                other, length = others[rng.integers(len(others))]
                start = other + int(rng.choice([0, length, rng.integers(max(length, 1))]))
            start = -(-start // ALIGNMENT) * ALIGNMENT
            end = max(end, start + size)
            found[name] = start, size
        self.bytes = end + MARGIN
        return {name: start + self.layouts[name][1] for name, (start, _) in found.items()}

    def is_alone(self, name):
        spans_pages = name.startswith(("src[", "dst["))
        return self.arrays[name].dtype.kind == "i" or ("cache" in name and "cos_sin" not in name) or spans_pages

    def put(self, device, memory, offsets):
        """A copy of the memory on the device, with the arguments inside it."""
        copy = device.put(memory.copy())

        def array(name, x):
            if name not in offsets:
                return device.put(x) if isinstance(x, np.ndarray) else x
            return device.xp.ndarray(x.shape, x.dtype, copy.data + offsets[name], self.layouts[name][0])

        return copy, {
            name: rebuilt(x, [array(f"{name}[{i}]", y) for i, y in enumerate(x)]) if isinstance(x, (tuple, list))
            else array(name, x)
            for name, x in self.arguments.items()
        }  # fmt: skip

    def memory(self, offsets, rng):
        """Values of the arrays in place, the last one's where several overlap; random bytes between them."""
        memory = rng.integers(0, 256, self.bytes, np.uint8)
        for name, at in offsets.items():
            x, strides = self.arrays[name], self.layouts[name][0]
            if x.size:
                np.ndarray(x.shape, x.dtype, memory, at, strides)[...] = x
        return memory


def flat(arguments):
    """All arrays by name, elements of tuples numbered."""
    found = {}
    for name, x in arguments.items():
        parts = {f"{name}[{i}]": y for i, y in enumerate(x)} if isinstance(x, (tuple, list)) else {name: x}
        found |= {part: y for part, y in parts.items() if isinstance(y, np.ndarray) and y.ndim}
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cached_call_does_what_one_in_full_does(device, name, made_again, rng):
    check(device, call(name), rng)
    assert made_again or name in NEVER


def test_arrays_without_elements(device, made_again, rng):
    """At any place: their addresses are kernel arguments, too."""
    right = call("combine_topk_swa_indices")
    table = right.arguments["topk_indices"]
    right.arguments |= {"topk_indices": table[:, :0], "topk": 0}
    right.arguments["out"] = right.function(**{**right.arguments, "out": None})
    check(device, right, rng)
    assert made_again


def check(device, right, rng):
    # Slots that share memory with other numbers may name a slot twice: on a device either token is then written. A byte
    # that copy_spans both reads and writes has either content.
    alone = not device.emulated and any("slot_mapping" in name or "dst[" in name for name in flat(right.arguments))
    for i in range(3 if device.emulated else 60):
        placed = Placed(right.arguments, i % 3, rng, alone)
        for j in range(8 if device.emulated else 40):
            offsets = placed.offsets(rng, apart=i == 0 and j < 2)  # a call that is recorded, then repeated
            memory = placed.memory(offsets, rng)
            results = []
            for in_full in (False, True):
                copy, arguments = placed.put(device, memory, offsets)
                results.append([outcome(right.function, arguments, in_full), device.get(copy).tobytes()])
            assert results[0][0] == results[1][0], offsets
            assert results[0][1] == results[1][1], offsets


def outcome(function, arguments, in_full):
    try:
        if not in_full:
            function(**arguments)
            return None
        with recorded_launches():
            function(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
