"""Launches kernels; helpers of all launchers.

CuPy's RawKernel inspects the type of every argument in each call. Here the kernel's parameter list, parsed once
from its source, defines how arguments are packed, and one driver call takes the packed block: several times cheaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy import int32

from ...arrays.streams import relaxed_capture
from .device import capability

__all__ = [
    "C_NAMES",
    "C_TYPES",
    "MAX_BLOCKS",
    "Kernel",
    "Launch",
    "PreparedLaunches",
    "are_recorded",
    "int32",
    "is_aligned",
    "most_clusters",
    "named_strides",
    "parameters",
    "pointer",
    "record_launch",
    "recorded_launches",
    "strides",
    "unit",
]

MAX_BLOCKS = 4096  # for grids that stride over rows: enough CTAs to fill any device
C_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "float", "int32": "int", "int64": "int64"}
# C_NAMES by dtype: NumPy takes over a microsecond to format a dtype's name.
C_TYPES = {np.dtype(getattr(ml_dtypes, name, name)): c_name for name, c_name in C_NAMES.items()}

# How an argument of each C type is packed, as in `struct`.
PACKING = {"*": "P", "int": "i", "int64": "q", "uint32": "I", "float": "f", "double": "d", "bool": "?"}


def parameters(text: str, name: str) -> dict[str, str]:
    """The parameters of kernel `name` of a source text: name -> C type, "*" for any pointer."""
    found = re.search(rf"{name}(?<!\w{name})\(([^)]*)\)\s*{{", text)  # begins with letters, which `re` finds quickly
    if found is None:
        raise ValueError(f"{name}: no such kernel in the source")
    words = [parameter.replace("*", " * ").split() for parameter in found[1].split(",")]
    return {parameter[-1]: parameter[-2] for parameter in words}


def packing(text: str, name: str, defines: dict[str, str | int]) -> struct.Struct:
    """Layout of the packed arguments of kernel `name` of a source text; a struct is packed as its members."""
    types = parameters(text, name).values()
    return struct.Struct("".join(_codes(text, str(defines.get(c_type, c_type))) for c_type in types))


def _codes(text: str, c_type: str) -> str:
    """The codes of a value of a C type; for a struct, its members' codes, which must fill whole words of 8 bytes."""
    if c_type in PACKING:
        return PACKING[c_type]
    body = re.search(rf"\nstruct {c_type} {{\n(.*?)\n}};", text, re.DOTALL)
    if body is None:
        raise ValueError(f"{c_type}: unknown type of a kernel's argument")
    codes = ""
    for member_type, star, names in re.findall(r"^    (?:const )?(\w+)(\*?) ([\w\[\],\s]+);", body[1], re.MULTILINE):
        for member in names.split(","):
            count = re.search(r"\[(\d+)\]", member)
            codes += _codes(text, star or member_type) * (int(count[1]) if count else 1)
    if struct.calcsize(codes) % 8:
        raise ValueError(f"{c_type}: {struct.calcsize(codes)} bytes, expected a multiple of 8")
    return codes


class Kernel:
    """A CUDA kernel, called like CuPy's RawKernel: `kernel(grid, block, arguments, shared_mem=bytes)`.

    Attributes:
        arguments: CuPy arrays, addresses and numbers; a number takes the C type of its parameter, and a struct is
            passed as its members, in order
        overlap: whether the kernel may start before the previous kernel of the stream has ended (programmatic dependent
            launch, sm_90 and later). The kernel must then wait (`griddepcontrol.wait`) before it accesses memory

    Raises CuPy's CUDADriverError if the driver refuses the launch. A grid without CTAs does nothing.
    """

    def __init__(self, raw: Any, packing: struct.Struct, parameters: Iterable[str]) -> None:
        import cupy

        self.raw = raw  # the RawKernel
        self._packing, self._parameters = packing, tuple(parameters)
        self._array = cupy.ndarray
        self._device = cupy.cuda.runtime.getDevice
        self._stream = cupy.cuda.get_current_stream
        self._functions: dict[int, int] = {}  # handles by device
        self._most_shared = 0

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        overlap: bool = False,
    ) -> None:
        array = self._array
        packed_arguments = [x.data.ptr if x.__class__ is array else x for x in arguments]
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        recorded_launches = _thread.recorded_launches
        if recorded_launches is not None:
            recorded_launches.append(Launch(self, grid, block, shared_mem, overlap, packed_arguments))
        self._launch(grid, block, shared_mem, overlap, packed_arguments, self._stream().ptr)

    def _launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        overlap: bool,
        packed_arguments: list[Any],
        stream: int,
    ) -> None:
        if 0 in grid:
            return
        device = self._device()
        function = self._functions.get(device) or self.handle(device)
        overlap = overlap and capability(device) >= 90
        packing = self._packing
        launch_kernel, memory, config, attribute, extra = _thread.memory or _prepare_thread()
        HEAD.pack_into(memory, 0, *grid, *block, shared_bytes, stream, attribute, overlap, packing.size)
        packing.pack_into(memory, ARGUMENTS_AT, *packed_arguments)
        status = launch_kernel(config, function, None, extra)
        if status:
            import cupy

            raise cupy.cuda.driver.CUDADriverError(status)

    def arguments(self, **named: Any) -> tuple[Any, ...]:
        """Arguments, named as the kernel's parameters, in the parameters' order; a struct is a tuple of its members.

        Raises TypeError if one is missing or unknown.
        """
        if named.keys() != set(self._parameters):
            odd = ", ".join(sorted(named.keys() ^ set(self._parameters)))
            raise TypeError(f"{odd}: got {', '.join(named)}, expected {', '.join(self._parameters)}")
        found: list[Any] = []
        for name in self._parameters:
            value = named[name]
            if value.__class__ is tuple:
                found.extend(value)
            else:
                found.append(value)
        return tuple(found)

    def handle(self, device: int) -> int:
        """The driver's function, loaded on the current device, `device`."""
        function = self._functions.get(device)
        if function is None:
            with relaxed_capture():  # this may load code
                if self._most_shared:
                    self.raw.max_dynamic_shared_size_bytes = self._most_shared
                function = self._functions[device] = self.raw.kernel.ptr
        return function

    @property
    def argument_bytes(self) -> int:
        """Size of the packed arguments."""
        return self._packing.size

    def packed(self, packed_arguments: list[Any]) -> bytes:
        """Arguments in the driver's format."""
        return self._packing.pack(*packed_arguments)

    def layout_of_arguments(self) -> list[tuple[int, str]]:
        """The offset and the code, as in `struct`, of each packed argument."""
        codes = self._packing.format
        return [(struct.calcsize(codes[: i + 1]) - struct.calcsize(code), code) for i, code in enumerate(codes)]

    def place(self, argument: int) -> int:
        """Offset of an address among the packed arguments, in bytes."""
        return struct.calcsize(self._packing.format[: argument + 1]) - struct.calcsize("P")

    @property
    def addresses(self) -> list[int]:
        """Indices of the arguments that are addresses."""
        return [i for i, code in enumerate(self._packing.format) if code == "P"]

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Shared memory that a launch may ask for, on any device."""
        return self._most_shared or int(self.raw.max_dynamic_shared_size_bytes)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._most_shared = size
        self._functions.clear()  # the attribute is set on each device's function


class Launch(NamedTuple):
    """One launch of a kernel; grid and block have three dimensions."""

    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    overlap: bool
    packed_arguments: list[Any]


class _LaunchMemory(ctypes.Structure):
    """The driver's arguments for a launch (cuda.h), in one allocation."""

    _fields_ = (
        # CUlaunchConfig
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
        ("argument_bytes", ctypes.c_size_t),  # placed here so that HEAD ends with it
        # CUlaunchAttribute
        ("attribute_id", ctypes.c_uint64),
        ("attribute_value", ctypes.c_uint64),
        ("attribute_rest", ctypes.c_uint64 * 7),
        ("extra", ctypes.c_void_p * 5),
        ("arguments", ctypes.c_uint64 * 512),
    )


HEAD = struct.Struct("7IPPIN")  # _LaunchMemory up to argument_bytes
REST = struct.Struct("14Q")  # from there to the arguments
STREAM_AT, ARGUMENTS_AT = _LaunchMemory.stream.offset, _LaunchMemory.arguments.offset
PROGRAMMATIC_STREAM_SERIALIZATION = 6
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # kind of the next entry of `extra`


class PreparedLaunches:
    """Launches to be repeated with other addresses on other streams: all else that the driver reads is written once.

    Args:
        launches: each launch, and the sources of its addresses: (argument of the kernel, array, offset)
        device: the current CUDA device, on which they run

    Any number of threads may repeat them.
    """

    def __init__(self, launches: Sequence[tuple[Launch, Sequence[tuple[int, int, int]]]], device: int) -> None:
        launches = [(launch, places) for launch, places in launches if 0 not in launch.grid]
        lengths = [-(-(ARGUMENTS_AT + launch.kernel.argument_bytes) // 16) * 2 for launch, _ in launches]  # words
        self._kernels = [launch.kernel for launch, _ in launches]  # kept: their code must stay loaded
        self._words = (ctypes.c_uint64 * sum(lengths))()
        self._places: list[tuple[int, int, int]] = []  # (word, array, offset)
        self._streams: list[int] = []  # words
        self._calls: list[tuple[int, int, None, int]] = []  # the driver's arguments
        self._lock = threading.Lock()  # the driver reads the words without the interpreter's lock
        start = 0
        for (launch, places), kernel, length in zip(launches, self._kernels, lengths, strict=True):
            at = ctypes.addressof(self._words) + 8 * start
            sizes = *launch.grid, *launch.block, launch.shared_bytes
            overlap, size = launch.overlap and capability(device) >= 90, kernel.argument_bytes
            HEAD.pack_into(self._words, 8 * start, *sizes, 0, at + HEAD.size, overlap, size)
            REST.pack_into(self._words, 8 * start + HEAD.size, *_rest(at))
            ctypes.memmove(at + ARGUMENTS_AT, kernel.packed(launch.packed_arguments), size)
            first = start + ARGUMENTS_AT // 8
            self._places += [(first + kernel.place(argument) // 8, array, offset) for argument, array, offset in places]
            self._streams.append(start + STREAM_AT // 8)
            self._calls.append((at, kernel.handle(device), None, at + _LaunchMemory.extra.offset))
            start += length

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch all of them, with the arrays at these addresses, on this stream of the current device. Raises CuPy's
        CUDADriverError if the driver refuses."""
        launch_kernel, *_ = _thread.memory or _prepare_thread()
        words = self._words
        with self._lock:
            for word, array, offset in self._places:
                words[word] = addresses[array] + offset
            for word in self._streams:
                words[word] = stream
            for call in self._calls:
                status = launch_kernel(*call)
                if status:
                    import cupy

                    raise cupy.cuda.driver.CUDADriverError(status)


def _rest(address: int) -> tuple[int, ...]:
    """The words of a _LaunchMemory at this address between its head and the arguments."""
    buffer = BUFFER_POINTER, address + ARGUMENTS_AT, BUFFER_SIZE, address + _LaunchMemory.argument_bytes.offset
    return PROGRAMMATIC_STREAM_SERIALIZATION, 1, *(0,) * 7, *buffer, 0


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


def most_clusters(kernel: Kernel, size: int, threads: int, shared_bytes: int) -> int:
    """Number of clusters of `size` CTAs of a kernel that the current device runs at a time."""
    import cupy

    attribute = CLUSTER_DIMENSION | size << 64 | 1 << 96 | 1 << 128  # its value: three 32-bit words
    memory, found = _LaunchMemory(), ctypes.c_int()
    at = ctypes.addressof(memory) + _LaunchMemory.attribute_id.offset
    HEAD.pack_into(memory, 0, size, 1, 1, threads, 1, 1, shared_bytes, 0, at, 1, 0)
    ctypes.memmove(at, attribute.to_bytes(24, "little"), 24)
    function = ctypes.c_void_p(kernel.handle(cupy.cuda.runtime.getDevice()))
    status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters(
        ctypes.byref(found), function, ctypes.byref(memory)
    )
    return 0 if status else found.value


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        memory: the thread's _LaunchMemory, as other threads may launch while the driver reads it, and addresses in it;
            None before the thread's first launch
        recorded_launches: the launches since `recorded_launches` began
    """

    memory: tuple[Any, _LaunchMemory, int, int, int] | None = None
    recorded_launches: list[Launch] | None = None


_thread = _Thread()


def _prepare_thread() -> tuple[Any, _LaunchMemory, int, int, int]:
    import cupy

    cupy.cuda.Device().use()  # a thread that has not called the runtime yet has no context
    launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch_kernel.argtypes = (ctypes.c_void_p,) * 4
    memory = _LaunchMemory()
    address = ctypes.addressof(memory)
    REST.pack_into(memory, HEAD.size, *_rest(address))
    attribute, extra = (address + field.offset for field in (_LaunchMemory.attribute_id, _LaunchMemory.extra))
    _thread.memory = launch_kernel, memory, address, attribute, extra
    return _thread.memory


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """The launches on this thread within the context, in order."""
    launches: list[Launch] = []
    _thread.recorded_launches, before = launches, _thread.recorded_launches
    try:
        yield launches
    finally:
        _thread.recorded_launches = before


def record_launch(launch: Launch) -> None:
    """Record a launch that is not made, if this thread's launches are being recorded."""
    if _thread.recorded_launches is not None:
        _thread.recorded_launches.append(launch)


def are_recorded() -> bool:
    """Whether this thread's launches are being recorded."""
    return _thread.recorded_launches is not None


def strides(array: Any) -> tuple[int, ...]:
    """Strides in elements; Python integers, which a kernel takes as 64-bit."""
    size = array.dtype.itemsize
    return tuple([stride // size for stride in array.strides])


def named_strides(name: str, axes: str, array: Any) -> dict[str, int]:
    """Strides in elements by the kernels' parameter names: `q_stride_h` for axis "h" of `q`."""
    size = array.dtype.itemsize
    return {f"{name}_stride_{axis}": stride // size for axis, stride in zip(axes, array.strides, strict=False)}


def pointer(array: Any | None) -> int:
    """The address of an array, or a null pointer."""
    return 0 if array is None else array.data.ptr


def is_aligned(*arrays: Any) -> bool:
    """Whether every row of these arrays starts at a multiple of 16 bytes."""
    bits = 0
    for array in arrays:
        bits |= array.data.ptr
        for stride in array.strides[:-1]:
            bits |= stride
    return bits % 16 == 0


def unit(row_bytes: int, *arrays: Any) -> str:
    """The widest type whose size divides `row_bytes` and the addresses of all rows of these arrays."""
    bits = row_bytes
    for array in arrays:
        bits |= array.data.ptr
        for stride in array.strides[:-1]:
            bits |= stride
    for size, name in ((16, "uint4"), (8, "uint2"), (4, "uint32"), (2, "uint16")):
        if bits % size == 0:
            return name
    return "uint8"
