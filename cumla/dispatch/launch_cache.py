"""Public calls that come again, at a fraction of their cost.

What a public function checks, and what it launches, follows from how its array arguments look (type, shape,
strides, dtype, device, address modulo ALIGNMENT) and from its other arguments; never from what an array holds.
So a function marked `@launch_cached` records the launches of a call, and a later call whose arguments look the
same only puts the new addresses in: every check would pass again. While somebody records launches, every call is
made in full.

Only CuPy arrays and torch's CUDA tensors come this way, to kernels of the "cuda" backend; the rest is called plainly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ..arrays import dlpack, streams
from ..kernels.cuda.launch import Launch, are_recorded, recorded_launches
from ..kernels.types.plan import DecodePlan
from ..kernels.types.verdicts import FAILED, UNPROVEN
from ..layout import CacheLayout
from . import proof
from .values import plain_integers

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)
ALIGNMENT = 16  # bytes: the widest access that a launcher chooses by an address
MOST_KNOWN = 1024  # calls that a function remembers


class KnownCall(NamedTuple):
    """What to do for arguments that look the same.

    launches   each launch, and where its addresses come from: (argument of the kernel, array, offset)
    together   (array, other, distance): arrays that share memory must lie so again
    outputs    (shape, dtype) of the new arrays, which are numbered after those given
    results    numbers of the arrays returned; None where nothing is
    framework  of the first array
    device     its CUDA device
    """

    launches: list[tuple[Launch, list[tuple[int, int, int]]]]
    together: list[tuple[int, int, int]]
    outputs: list[tuple[tuple[int, ...], np.dtype[Any]]]
    results: list[int] | None
    framework: str
    device: int

    def fits(self, addresses: list[int]) -> bool:
        return all(addresses[i] - addresses[j] == distance for i, j, distance in self.together)

    def is_captured(self) -> bool:
        """Whether the caller is capturing a CUDA graph, in which nothing may be allocated."""
        return streams.is_capturing(streams.current(self.framework, self.device))

    def again(self, arrays: list[Any], addresses: list[int]) -> Any:
        """Make the call with other arrays."""
        stream = streams.current(self.framework, self.device)
        if not self.outputs and sys.modules["cupy"].cuda.runtime.getDevice() == self.device:
            self._launch(addresses, stream)
        else:
            with streams.on(self.device, stream):
                new = [sys.modules["cupy"].empty(shape, dtype) for shape, dtype in self.outputs]
                self._launch([*addresses, *(array.data.ptr for array in new)], None)
                arrays = [*arrays, *(dlpack.give(array, self.framework) for array in new)]
        if self.results is None:
            return None
        results = [arrays[i] for i in self.results]
        return results[0] if len(results) == 1 else tuple(results)

    def _launch(self, addresses: list[int], stream: int | None) -> None:
        if stream is None:
            stream = sys.modules["cupy"].cuda.get_current_stream().ptr
        for launch, places in self.launches:
            numbers = launch.numbers.copy()
            for place, array, offset in places:
                numbers[place] = addresses[array] + offset
            launch.kernel.launch(launch, numbers, stream)


def launch_cached(function: F) -> F:
    """Remember the calls of a public function, all of whose work on a device is to launch kernels."""
    function = plain_integers(function)
    known: dict[Any, KnownCall | None] = {}

    def in_full(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        result = function(*arguments, **keywords)
        if UNPROVEN or FAILED:
            proof.prove(function.__name__, arguments, keywords)
        return result

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        arrays: list[Any] = []
        addresses: list[int] = []
        looks: list[Any] = []
        for x in arguments:
            looks.append(LOOKS[x.__class__](x, arrays, addresses))
        for name, x in keywords.items():
            looks.append(name)
            looks.append(LOOKS[x.__class__](x, arrays, addresses))
        if UNKNOWN in looks or not arrays or keywords.get("stream") is not None or are_recorded():
            return in_full(arguments, keywords)
        if keywords.get("plan") is not None and is_captured(arrays[0]):  # graphs plan for themselves
            return in_full(arguments, keywords)
        key = tuple(looks)
        if key not in known:
            if len(known) >= MOST_KNOWN:
                known.clear()
            with recorded_launches() as launches, recorded_outputs() as outputs:
                result = function(*arguments, **keywords)
            if UNPROVEN or FAILED:
                proof.prove(function.__name__, arguments, keywords)
            known[key] = record(launches, arrays, outputs, result)
            log.debug("%s: launches %s", function.__name__, [launch.kernel.raw.name for launch in launches])
            return result
        before = known[key]
        if before is None or not before.fits(addresses) or (before.outputs and before.is_captured()):
            return in_full(arguments, keywords)
        return before.again(arrays, addresses)

    return cast(F, call)


def is_captured(array: Any) -> bool:
    """Whether a CUDA graph is being captured on the stream that a call with this array runs on."""
    framework = dlpack.framework_of(array)
    device = array.get_device() if framework == "torch" else array.data.device_id
    return streams.is_capturing(streams.current(framework, device))


UNKNOWN = object()


def call_key(*arguments: Any) -> tuple[Any, ...] | None:
    """How arguments look, or None with one among them that may be anything."""
    arrays: list[Any] = []
    addresses: list[int] = []
    looks = tuple([LOOKS[x.__class__](x, arrays, addresses) for x in arguments])
    return None if UNKNOWN in looks else looks


def _look_at_cupy(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    memory = x.data
    address = memory.ptr
    arrays.append(x)
    addresses.append(address)
    return x.shape, x.strides, x.dtype, memory.device_id, address % ALIGNMENT


def _look_at_torch(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    device = x.get_device()
    if device < 0:
        return UNKNOWN
    address = x.data_ptr()
    arrays.append(x)
    addresses.append(address)
    return x.shape, x.stride(), x.dtype, device, address % ALIGNMENT


def _look_at_tuple(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    looks = tuple([LOOKS[item.__class__](item, arrays, addresses) for item in x])
    return UNKNOWN if UNKNOWN in looks else looks


def _look_at_value(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    return x.__class__, x


def _look_at_integer(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    return int, int(x)  # what functions make of NumPy's


def _look_at_plan(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    """A plan that is made counts as the memory it has; to make it is more than to launch kernels."""
    if not x.is_made("starts", 0):
        return UNKNOWN
    looks = [x.made_for]
    looks += [LOOKS[memory.__class__](memory, arrays, addresses) for memory in x.workspace.arrays()]
    return tuple(looks)


def _look_away(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    return UNKNOWN


class _Looks(dict[type, Callable[[Any, list[Any], list[int]], Any]]):
    """How to look at an argument of each type, the types of libraries as they come up."""

    def __missing__(self, kind: type) -> Callable[[Any, list[Any], list[int]], Any]:
        cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
        look = _look_away
        if cupy is not None and kind is cupy.ndarray:
            look = _look_at_cupy
        elif torch is not None and kind is torch.Tensor:
            look = _look_at_torch
        elif issubclass(kind, np.integer):
            look = _look_at_integer
        self[kind] = look
        return look


LOOKS = _Looks(dict.fromkeys((type(None), bool, int, float, str, CacheLayout), _look_at_value))
LOOKS[tuple] = LOOKS[list] = _look_at_tuple
LOOKS[DecodePlan] = _look_at_plan


class _Recording(threading.local):
    outputs: list[Any] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recorded_outputs() -> Iterator[list[Any]]:
    """The CuPy arrays that public functions allocate on this thread in the meantime, in order."""
    outputs: list[Any] = []
    _recording.outputs, before = outputs, _recording.outputs
    try:
        yield outputs
    finally:
        _recording.outputs = before


def record_output(native: Any) -> None:
    """Say that an output was allocated."""
    if _recording.outputs is not None:
        _recording.outputs.append(native)


def record(launches: list[Launch], arrays: list[Any], outputs: list[Any], result: Any) -> KnownCall | None:
    """The call that made these launches; None if it cannot be made again from its arrays' addresses."""
    spans = [_span(array) for array in [*arrays, *outputs]]
    again, together = [], set()
    for launch in launches:
        places = []
        for place in launch.kernel.addresses:
            address = launch.numbers[place]
            if not address:
                continue
            owners = [i for i, (start, size) in enumerate(spans) if start <= address < start + size]
            if not owners:
                return None
            places.append((place, owners[0], address - spans[owners[0]][0]))
            together |= {(owners[0], other, spans[owners[0]][0] - spans[other][0]) for other in owners[1:]}
        again.append((launch, places))
    returned = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    numbers, new = [], iter(range(len(arrays), len(spans)))
    for item in returned:
        given = [i for i, array in enumerate(arrays) if array is item]
        numbers.append(given[0] if given else next(new, -1))
    if not again or -1 in numbers or next(new, None) is not None:
        return None
    first = arrays[0]
    framework = dlpack.framework_of(first)
    device = first.get_device() if framework == "torch" else first.data.device_id
    shapes = [(array.shape, array.dtype) for array in outputs]
    return KnownCall(again, sorted(together), shapes, None if result is None else numbers, framework, device)


def _span(array: Any) -> tuple[int, int]:
    """Address and bytes of an array, what lies between its elements included."""
    if dlpack.framework_of(array) == "torch":
        address, size, unit, strides = array.data_ptr(), array.element_size(), array.element_size(), array.stride()
    else:
        address, size, unit, strides = array.data.ptr, array.itemsize, 1, array.strides
    if 0 in array.shape:
        return address, 0
    return address, size + sum((n - 1) * stride * unit for n, stride in zip(array.shape, strides, strict=True))
