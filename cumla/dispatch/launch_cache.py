"""Public calls that come again, at a fraction of their cost.

What a public function checks, and what it launches, follows from its arrays' types, shapes, strides, dtypes, devices
and addresses modulo ALIGNMENT, from its other arguments (together the cache key), and from which arrays share memory;
never from what an array holds. So a function marked `@launch_cached` records the launches of a call, and a later call
with the same cache key, whose arrays share memory as those did, only puts the new addresses in: every check would pass
again. While launches are recorded, every call is made in full.

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
from ..arrays.memory import Extent, extent, reach
from ..kernels.cuda.launch import Launch, are_recorded, recorded_launches
from ..kernels.types.plan import DecodePlan
from ..kernels.types.verdicts import FAILED, UNPROVEN
from ..layout import CacheLayout
from . import debug, proof
from .relocation import relocate
from .values import plain_integers

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)
ALIGNMENT = 16  # bytes: the widest access that a launcher chooses by an address
MOST_KNOWN = 1024  # cache keys that a function remembers
MOST_RELATIONS = 4  # calls of a cache key: in place and out of place, columns of one array and arrays of their own
MOST_FITTING = 256  # addresses that a remembered call remembers


class KnownCall(NamedTuple):
    """What to do for arguments with the same cache key.

    launches   each launch, and where its addresses come from: (argument of the kernel, array, offset)
    together   (array, other, distance): arrays that share memory must have the same distance again
    apart      (array, other, least, most): an array that is written and another one, whose extents must not intersect:
               the distance must not be between least and most
    fitting    addresses that were compared and fit: to compare those of 14 arrays takes over a microsecond
    outputs    (shape, dtype) of the new arrays, which are numbered after those given
    results    numbers of the arrays returned; None where nothing is
    framework  of the first array
    device     its CUDA device
    """

    launches: list[tuple[Launch, list[tuple[int, int, int]]]]
    together: list[tuple[int, int, int]]
    apart: list[tuple[int, int, int, int]]
    fitting: set[tuple[int, ...]]
    outputs: list[tuple[tuple[int, ...], np.dtype[Any]]]
    results: list[int] | None
    framework: str
    device: int

    def fits(self, addresses: list[int]) -> bool:
        """Whether the arrays share memory where they did, and nowhere else if they are written."""
        where = tuple(addresses)
        if where in self.fitting:
            return True
        together = all(where[other] - where[array] == distance for array, other, distance in self.together)
        if not together or any(least < where[j] - where[i] < most for i, j, least, most in self.apart):
            return False
        if len(self.fitting) >= MOST_FITTING:
            self.fitting.clear()
        self.fitting.add(where)
        return True

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
    known: dict[Any, tuple[KnownCall | None, ...]] = {}  # those of a key differ in which arrays share memory

    def in_full(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        result = function(*arguments, **keywords)
        if UNPROVEN or FAILED:
            proof.prove(function.__name__, arguments, keywords)
        return result

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if debug.active and debug.is_on():
            return in_full(arguments, keywords)
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
        calls = known.get(key, ())
        for before in calls:
            if before is None or (before.outputs and before.is_captured()):
                return in_full(arguments, keywords)
            if before.fits(addresses):
                return before.again(arrays, addresses)
        if not calls and len(known) >= MOST_KNOWN:
            known.clear()
        with recorded_launches() as launches, recorded_arrays() as used:
            result = function(*arguments, **keywords)
        if UNPROVEN or FAILED:
            proof.prove(function.__name__, arguments, keywords)
        if not debug.is_unchecked():  # whose arrays may share memory as others must not
            known[key] = (*calls, record(launches, arrays, used, result))[-MOST_RELATIONS:]
        log.debug("%s: launches %s", function.__name__, [launch.kernel.raw.name for launch in launches])
        return result

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


class UsedArrays(NamedTuple):
    """The CuPy arrays that public functions allocate and those given to them that they write, in order."""

    outputs: list[Any]
    written: list[Any]


class _Recording(threading.local):
    used: UsedArrays | None = None


_recording = _Recording()


@contextlib.contextmanager
def recorded_arrays() -> Iterator[UsedArrays]:
    """What public functions allocate and write on this thread in the meantime."""
    used = UsedArrays([], [])
    _recording.used, before = used, _recording.used
    try:
        yield used
    finally:
        _recording.used = before


def record_output(native: Any) -> None:
    """Note that an output was allocated."""
    if _recording.used is not None:
        _recording.used.outputs.append(native)


def record_written(native: Any) -> None:
    """Note that a given array is written."""
    if _recording.used is not None:
        _recording.used.written.append(native)


def record(launches: list[Launch], arrays: list[Any], used: UsedArrays, result: Any) -> KnownCall | None:
    """The call that made these launches; None if it cannot be made again from its arrays' addresses."""
    outputs = used.outputs
    extents = [_extent(array) for array in [*arrays, *outputs]]
    relocation = relocate(launches, extents)
    if relocation is None:
        return None
    together = relocation.together
    returned = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    numbers, new = [], iter(range(len(arrays), len(extents)))
    for item in returned:
        given = [i for i, array in enumerate(arrays) if array is item]
        numbers.append(given[0] if given else next(new, -1))
        together |= {(given[0], i, 0) for i in given[1:]}
    if not relocation.launches or -1 in numbers or next(new, None) is not None:
        return None
    shared, apart = _relations(extents[: len(arrays)], {array.data.ptr for array in used.written})
    first = arrays[0]
    framework = dlpack.framework_of(first)
    device = first.get_device() if framework == "torch" else first.data.device_id
    return KnownCall(
        relocation.launches,
        sorted(together | shared),
        apart,
        set(),
        [(array.shape, array.dtype) for array in outputs],
        None if result is None else numbers,
        framework,
        device,
    )


def _relations(
    extents: list[Extent], written: set[int]
) -> tuple[set[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
    """KnownCall's `together` and `apart` of arrays, those that are written being at these addresses.

    Whether an output shares elements with another array follows from strides, shapes and their distance. The call that
    is recorded has passed that check, as would one with the same distances, or with extents that do not intersect.
    """
    together: set[tuple[int, int, int]] = set()
    apart: list[tuple[int, int, int, int]] = []
    full = [i for i, extent in enumerate(extents) if extent.size]
    for at, i in enumerate(full):
        for j in full[at + 1 :]:
            a, b = extents[i], extents[j]
            if a.address not in written and b.address not in written:
                continue
            if a.intersects(b):
                together.add((i, j, b.address - a.address))
            else:
                apart.append((i, j, a.low - b.high, a.high - b.low))
    return together, apart


def _extent(array: Any) -> Extent:
    """The extent of a CuPy array or a torch tensor."""
    if dlpack.framework_of(array) != "torch":
        return extent(array)
    unit = array.element_size()
    return Extent(array.data_ptr(), *reach(array.shape, tuple(stride * unit for stride in array.stride()), unit))
