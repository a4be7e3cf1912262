"""The launch cache: repeats a public call at a fraction of its cost.

The checks and launches of a public function depend on its arrays' types, shapes, strides, dtypes, devices and addresses
modulo ALIGNMENT, on its other arguments (together the cache key), and on which arrays share memory; never on the values
in arrays. So a function marked `@launch_cached` records the launches of a call. A later call with the same cache key,
whose arrays share memory in the same way, launches them with its own addresses: every check would pass again. While
launches are recorded, every call is made in full.

The cache serves only CuPy arrays and torch's CUDA tensors with kernels of the "cuda" backend; other calls are made in
full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ..arrays import dlpack, streams
from ..arrays.memory import Extent, extent, reach
from ..kernels.cuda.launch import Launch, PreparedLaunches, are_recorded, recorded_launches
from ..kernels.types.plan import DecodePlan, DenseDecodePlan
from ..kernels.types.stream_workspace import StreamWorkspace, forget_workspace, known_workspace
from ..layout import CacheLayout
from . import debug
from .kernel_check import tested
from .ranges import ranged
from .relocation import relocate
from .values import with_plain_integers

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)
ALIGNMENT = 16  # bytes: the widest access that a launcher chooses by an address
MOST_KNOWN = 1024  # cache keys that a function remembers
MOST_VALIDATED = 4096  # cache keys of arguments that passed the checks of layers, models and builders
MOST_RELATIONS = 4  # calls of a cache key: in place and out of place, columns of one array and separate arrays
MOST_FITTING = 256  # addresses that a remembered call remembers


@dataclasses.dataclass(slots=True)
class KnownCall:
    """The recorded call for a cache key.

    Attributes:
        launches: each launch, and the sources of its addresses: (argument of the kernel, array, offset)
        together: (array, other, distance): arrays that share memory must have the same distance again
        apart: (array, other, least, most): a written array and another one, whose extents must not intersect: the
            distance must not be between least and most
        fitting: addresses already compared: comparing those of 14 arrays takes over a microsecond
        outputs: (shape, the framework's dtype) of each new array; new arrays are numbered after the given arrays
        memory: (name, dtype, size) of the arrays of the stream's workspace, whose indices follow those of the new
            arrays
        prepared: the launches, once the call has been repeated
        alike: tensors like `outputs` that share one element, once the call has been repeated with torch
        memory_at: addresses of `memory`, when they were last looked up: (version of the workspace, addresses)
        results: indices of the arrays returned; None if nothing is returned
        framework: of the first array
        device: its CUDA device
        eager: whether a call while a CUDA graph is captured is made in full: it allocates, or it has a plan
    """

    launches: list[tuple[Launch, list[tuple[int, int, int]]]]
    together: list[tuple[int, int, int]]
    apart: list[tuple[int, int, int, int]]
    fitting: set[tuple[int, ...]]
    outputs: list[tuple[tuple[int, ...], Any]]
    memory: list[tuple[str, np.dtype[Any], int]]
    results: list[int] | None
    framework: str
    device: int
    eager: bool
    prepared: PreparedLaunches | None = None
    alike: list[Any] | None = None
    memory_at: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def fits(self, addresses: list[int]) -> bool:
        """Whether the arrays share memory as in the recorded call, and written arrays nowhere else."""
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

    def again(self, arrays: list[Any], addresses: list[int]) -> Any:
        """Repeat the call with other arrays. NOT_REPEATED on a stream that does not have the call's memory, and while a
        CUDA graph is being captured that must not allocate it or needs a plan of its own."""
        cuda = sys.modules["cupy"].cuda
        device = self.device
        stream = streams.current(self.framework, device)
        if stream is None:
            stream = cuda.get_current_stream(device).ptr
        if self.eager and streams.is_capturing(stream):
            return NOT_REPEATED
        if cuda.runtime.getDevice() == device:
            return self._repeat(arrays, addresses, stream)
        with cuda.Device(device):
            return self._repeat(arrays, addresses, stream)

    def _repeat(self, arrays: list[Any], addresses: list[int], stream: int) -> Any:
        """The call's results, computed on this stream of the current device."""
        prepared = self.prepared
        if prepared is None:
            prepared = self.prepared = PreparedLaunches(self.launches, self.device)
        memory = self._addresses_of_memory(stream) if self.memory else []
        if memory is None:
            return NOT_REPEATED
        if self.outputs:
            new, places = self._new_outputs()
            addresses, arrays = addresses + places, arrays + new
        try:
            prepared.launch(addresses + memory if memory else addresses, stream)
        except BaseException:
            if memory:
                forget_workspace(self.device, stream)
            raise
        results = self.results
        if results is None:
            return None
        return arrays[results[0]] if len(results) == 1 else tuple([arrays[i] for i in results])

    def _new_outputs(self) -> tuple[list[Any], list[int]]:
        """New arrays on the current device and stream, and their addresses."""
        if self.framework == "torch":
            torch = sys.modules["torch"]
            if self.alike is None:
                self.alike = [dlpack.torch_element(dtype, self.device).expand(shape) for shape, dtype in self.outputs]
            like, order = torch.empty_like, torch.contiguous_format
            new = [like(x, memory_format=order) for x in self.alike]  # takes half of the time of torch.empty
            return new, [x.data_ptr() for x in new]
        array = sys.modules["cupy"].ndarray
        new = [array(shape, dtype) for shape, dtype in self.outputs]
        return new, [x.data.ptr for x in new]

    def _addresses_of_memory(self, stream: int) -> list[int] | None:
        """Addresses in the stream's workspace; None if it does not have the memory."""
        workspace = known_workspace(self.device, stream)
        if workspace is None:
            return None
        version = workspace.number, StreamWorkspace.allocations
        known, addresses = self.memory_at
        if known != version:
            found = [workspace.address(*wanted) for wanted in self.memory]
            if None in found:
                return None
            addresses = cast(list[int], found)
            self.memory_at = version, addresses
        return addresses


_known_calls: list[dict[Any, tuple[KnownCall | None, ...]]] = []  # of every function


def forget_calls() -> None:
    """Empty the launch cache: for tests that replace what chooses the launches of a call."""
    for known in _known_calls:
        known.clear()


def launch_cached(function: F) -> F:
    """Cache the calls of a public function whose only work on a device is to launch kernels."""
    function = with_plain_integers(function)
    op = function.__name__
    known: dict[Any, tuple[KnownCall | None, ...]] = {}  # calls of a key differ in which arrays share memory
    _known_calls.append(known)

    def recorded(*arguments: Any, **keywords: Any) -> tuple[Any, list[Launch] | None, UsedArrays]:
        allocations = StreamWorkspace.allocations
        with recorded_launches() as launches, recorded_arrays() as used:
            result = function(*arguments, **keywords)
        # The first call on a stream also clears memory: the next one is recorded.
        return result, launches if StreamWorkspace.allocations == allocations else None, used

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if debug.active and debug.is_on():
            return tested(function, op, arguments, keywords)
        arrays: list[Any] = []
        addresses: list[int] = []
        key_parts = [KEY_FUNCTIONS[x.__class__](x, arrays, addresses) for x in arguments]
        key_parts += [KEY_FUNCTIONS[x.__class__](x, arrays, addresses) for x in keywords.values()]
        key = (tuple(keywords), *key_parts)
        calls = known.get(key, ())
        if calls and not are_recorded():
            for before in calls:
                if before is None:
                    return tested(function, op, arguments, keywords)
                if before.fits(addresses):
                    result = before.again(arrays, addresses)
                    return tested(function, op, arguments, keywords) if result is NOT_REPEATED else result
        if UNKNOWN in key_parts or not arrays or keywords.get("stream") is not None or are_recorded():
            return tested(function, op, arguments, keywords)
        planned = keywords.get("plan") is not None
        if planned and is_captured(arrays[0]):  # a captured call makes its own plan
            return tested(function, op, arguments, keywords)
        if not calls and len(known) >= MOST_KNOWN:
            known.clear()
        result, launches, used = tested(recorded, op, arguments, keywords)
        if launches is None:
            return result
        if not debug.thread.unchecked:  # unchecked calls may share memory where others must not
            known[key] = (*calls, record(launches, arrays, used, result, planned))[-MOST_RELATIONS:]
        log.debug("%s: launches %s", op, [launch.kernel.raw.name for launch in launches])
        return result

    return cast(F, ranged(call))


def is_captured(array: Any) -> bool:
    """Whether a CUDA graph is being captured on the stream that a call with this array runs on."""
    framework = dlpack.framework_of(array)
    device = array.get_device() if framework == "torch" else array.data.device_id
    return streams.is_capturing(streams.current(framework, device))


UNKNOWN, NOT_REPEATED = object(), object()


def call_key(*arguments: Any) -> tuple[Any, ...] | None:
    """The cache key of arguments, or None if there is none for the type of one of them."""
    arrays: list[Any] = []
    addresses: list[int] = []
    key_parts = tuple([KEY_FUNCTIONS[x.__class__](x, arrays, addresses) for x in arguments])
    return None if UNKNOWN in key_parts else key_parts


VALIDATED: set[tuple[Any, ...] | None] = set()  # keys of arguments that passed a check; the first part names the check


def remember_validated(key: tuple[Any, ...] | None) -> None:
    """Let arguments with this key pass unchecked from now on; those without a key are checked each time."""
    if key is None:
        return
    if len(VALIDATED) >= MOST_VALIDATED:
        VALIDATED.clear()
    VALIDATED.add(key)


def _key_of_cupy(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    memory = x.data
    address = memory.ptr
    arrays.append(x)
    addresses.append(address)
    return x.shape, x.strides, x.dtype, memory.device_id, address % ALIGNMENT


def _key_of_torch(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    device = x.get_device()
    if device < 0:
        return UNKNOWN
    address = x.data_ptr()
    arrays.append(x)
    addresses.append(address)
    # A null pointer has a key of its own: a tensor whose storage was freed is none that passed the checks.
    return x.shape, x.stride(), x.dtype, device, address % ALIGNMENT if address else None


def _key_of_tuple(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    key_parts = tuple([KEY_FUNCTIONS[item.__class__](item, arrays, addresses) for item in x])
    return UNKNOWN if UNKNOWN in key_parts else key_parts


def _key_of_value(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    return x.__class__, x


def _key_of_integer(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    return int, int(x)  # as functions convert NumPy's integers


def _key_of_plan(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    """A built plan is identified by its buffers, and by batch_invariant, which calls check. A call that builds a plan
    does more than launch kernels."""
    if not x.is_made(x.arrays[0], 0):
        return UNKNOWN
    known = x.workspace.cache_key
    if known is None:
        memory: list[Any] = x.workspace.arrays()
        places: list[int] = []
        parts = tuple([KEY_FUNCTIONS[array.__class__](array, [], places) for array in memory])
        known = x.workspace.cache_key = parts, memory, places
    parts, memory, places = known
    arrays += memory
    addresses += places
    return x.made_for, x.batch_invariant, parts


def _no_key(x: Any, arrays: list[Any], addresses: list[int]) -> Any:
    return UNKNOWN


class _KeyFunctions(dict[type, Callable[[Any, list[Any], list[int]], Any]]):
    """The key function for each argument type; types of libraries are added on first use."""

    def __missing__(self, kind: type) -> Callable[[Any, list[Any], list[int]], Any]:
        key_function = _no_key
        if kind is dlpack.array_type("cupy"):
            key_function = _key_of_cupy
        elif kind is dlpack.array_type("torch"):
            key_function = _key_of_torch
        elif issubclass(kind, np.integer):
            key_function = _key_of_integer
        self[kind] = key_function
        return key_function


KEY_FUNCTIONS = _KeyFunctions(dict.fromkeys((type(None), bool, int, float, str, CacheLayout), _key_of_value))
KEY_FUNCTIONS[tuple] = KEY_FUNCTIONS[list] = _key_of_tuple
KEY_FUNCTIONS[DecodePlan] = KEY_FUNCTIONS[DenseDecodePlan] = _key_of_plan


class UsedArrays(NamedTuple):
    """The CuPy arrays that public functions allocated, and the given arrays that they wrote, in order."""

    outputs: list[Any]
    written: list[Any]


class _Recording(threading.local):
    used: UsedArrays | None = None


_recording = _Recording()


@contextlib.contextmanager
def recorded_arrays() -> Iterator[UsedArrays]:
    """Records the arrays that public functions allocate and write on this thread within the context."""
    used = UsedArrays([], [])
    _recording.used, before = used, _recording.used
    try:
        yield used
    finally:
        _recording.used = before


def record_output(native: Any) -> None:
    """Record an allocated output."""
    if _recording.used is not None:
        _recording.used.outputs.append(native)


def record_written(arrays: Mapping[str, Any]) -> None:
    """Record the given arrays, by name, that kernels are about to write."""
    if _recording.used is not None:
        _recording.used.written.extend(arrays.values())


def record(
    launches: list[Launch], arrays: list[Any], used: UsedArrays, result: Any, planned: bool = False
) -> KnownCall | None:
    """The call that made these launches, with a plan or without; None if its arrays' addresses are not enough to repeat
    it."""
    outputs, first = used.outputs, arrays[0]
    framework = dlpack.framework_of(first)
    device = first.get_device() if framework == "torch" else first.data.device_id
    memory: list[tuple[tuple[str, np.dtype[Any], int], Any]] = []
    extents = [_extent(array) for array in [*arrays, *outputs]]
    relocation = relocate(launches, extents)
    if relocation is None:
        memory = _memory_of_stream(framework, device)
        relocation = relocate(launches, [*extents, *(_extent(array) for _, array in memory)])
    if relocation is None:
        return None
    together = relocation.together
    returned = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    indices, new = [], iter(range(len(arrays), len(arrays) + len(outputs)))
    for item in returned:
        positions = [i for i, array in enumerate(arrays) if array is item]
        indices.append(positions[0] if positions else next(new, -1))
        together |= {(positions[0], i, 0) for i in positions[1:]}
    if not relocation.launches or -1 in indices or next(new, None) is not None:
        return None
    shared, apart = _relations(extents[: len(arrays)], {array.data.ptr for array in used.written})
    launched, used_memory = _without_unused(relocation.launches, len(arrays) + len(outputs))
    return KnownCall(
        launched,
        sorted(together | shared),
        apart,
        set(),
        [(array.shape, dlpack.dtype_in(framework, array.dtype)) for array in outputs],
        [memory[i][0] for i in used_memory],
        None if result is None else indices,
        framework,
        device,
        planned or bool(outputs or used_memory),
    )


Places = list[tuple[Launch, list[tuple[int, int, int]]]]


def _without_unused(launches: Places, first: int) -> tuple[Places, list[int]]:
    """Launches in which the arrays from number `first` on are only those that occur, and which of them these are."""
    used = sorted({array - first for _, places in launches for _, array, _ in places if array >= first})
    number = {first + old: first + new for new, old in enumerate(used)}
    renumbered = [
        (launch, [(argument, number.get(array, array), offset) for argument, array, offset in places])
        for launch, places in launches
    ]
    return renumbered, used


def _memory_of_stream(framework: str, device: int) -> list[tuple[tuple[str, np.dtype[Any], int], Any]]:
    """The arrays of the workspace of the call's stream, and what each was last asked for: name, dtype, size."""
    stream = streams.current(framework, device)
    if stream is None:
        stream = sys.modules["cupy"].cuda.get_current_stream(device).ptr
    workspace = None if streams.is_capturing(stream) else known_workspace(device, stream)
    if workspace is None:
        return []
    return [((*key, workspace.requested[key]), array) for key, array in workspace.named_arrays().items()]


def _relations(
    extents: list[Extent], written: set[int]
) -> tuple[set[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
    """KnownCall's `together` and `apart` for arrays; the written arrays are at these addresses.

    Strides, shapes and the distance of two arrays determine whether an output shares elements with another array. The
    recorded call has passed that check, so a call with the same distances, or with disjoint extents, passes as well.
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
