"""XLA's custom calls of cumla's operations on GPUs, without Python.

Inside jax.jit an operation is a custom call, which XLA runs in a separate thread for every device. A Python callback
takes 100 to 300 us there, and devices wait for each other's callbacks (the GIL). So only the first call on a device
runs in Python, which records the kernel launches in a note. A compiled handler runs later calls of the same program: it
launches the same kernels with the new addresses. XLA may capture the handler in a command buffer, or call it each time.

An operation that does more than launch kernels runs in Python each time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..arrays import dlpack, streams
from ..arrays.memory import extent
from ..dispatch.relocation import relocate
from ..kernels.cuda.device import capability
from ..kernels.cuda.launch import PROGRAMMATIC_STREAM_SERIALIZATION, Launch, recorded_launches
from . import xla_frame
from .xla_frame import CallFrame
from .xla_handler import CONFIG_WORDS, MAX_ARGUMENT_BYTES, MAX_BUFFERS, MAX_VERSIONS, SLOTS, address_of, make_handler

log = logging.getLogger(__name__)
TARGET = "cumla_launches"
ALIGNMENT = 16  # bytes of the widest access that a launcher selects by an address

Shape = tuple[tuple[int, ...], np.dtype[Any]]
Run = Callable[[list[Any], list[Any]], None]


@dataclass
class CompiledCall:
    """A custom call of a program.

    Attributes:
        run: runs the call in Python: (outputs, inputs) as CuPy arrays, on CuPy's current stream
        shapes: (shape, dtype) of the inputs, then of the outputs
        inputs: number of inputs
        noted: number of notes of its launches; None: the call needs Python each time
    """

    run: Run
    shapes: Sequence[Shape]
    inputs: int
    noted: int | None = 0


@dataclass
class Table:
    """The handler's table: pairs of words, a call's number and the address of its first note."""

    words: np.ndarray = field(default_factory=lambda: np.zeros(2 * SLOTS, np.int64))
    calls: dict[int, CompiledCall] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # keeps alive the notes' memory and the objects that notes refer to
    lock: Any = field(default_factory=threading.RLock)

    def add(self, number: int, call: CompiledCall) -> None:
        with self.lock:
            self.calls.setdefault(number, call)

    def publish(self, number: int, note: np.ndarray, *objects: Any) -> None:
        """Publish a note to the handler, before the call's other notes."""
        with self.lock:
            slot = next(
                (at for at in ((number + i) % SLOTS for i in range(SLOTS // 2)) if self.words[2 * at] in (0, number)),
                None,
            )
            if slot is None:
                return
            self.alive.append((note, objects))
            note[0] = self.words[2 * slot + 1]
            self.words[2 * slot + 1] = note.ctypes.data  # before the number, so that a number in the table has a note
            self.words[2 * slot] = number


TABLE = Table()


def custom_call(name: Any, run: Run, results: Sequence[jax.ShapeDtypeStruct], aliases: dict[int, int]) -> Any:
    """A function of JAX arrays that runs a call on a GPU. `name` identifies the call, equally in every process."""

    def call(*arrays: Any) -> Any:
        shapes = [(x.shape, np.dtype(x.dtype)) for x in (*arrays, *results)]
        number = int.from_bytes(hashlib.sha256(repr((name, shapes)).encode()).digest()[:7], "little") + 1
        TABLE.add(number, CompiledCall(run, shapes, len(arrays)))
        register()
        run_call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases, vmap_method="broadcast_all")
        return run_call(*arrays, call=np.uint64(number))

    return call


def register() -> None:
    """Register the handler with XLA once, even if several threads trace their first programs at the same time."""
    with _registering:
        _register()


_registering = threading.Lock()


@functools.cache
def _register() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    handler = make_handler(
        TABLE.words.ctypes.data, address_of(driver.cuLaunchKernelEx), address_of(driver.cuCtxGetCurrent), in_python()
    )
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="CUDA", traits=1)


@functools.cache
def in_python() -> int:
    """The address of the function for calls that the handler leaves to Python."""
    callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(_in_python)
    TABLE.alive.append(callback)
    return address_of(callback)


def _in_python(address: int, status: int) -> int:
    """Handle a call that the handler leaves to Python: XLA's metadata query, a first call, or a failed launch.

    Returns the address of an error, or 0.
    """
    frame = CallFrame.from_address(address)
    try:
        if frame.extension and frame.extension.contents.type == xla_frame.METADATA:
            extension = ctypes.cast(frame.extension, ctypes.POINTER(xla_frame.MetadataExtension))
            xla_frame.say_what_we_are(extension.contents.metadata.contents)
            return 0
        if status:
            raise RuntimeError(f"cuLaunchKernelEx: got CUDA error {status}")
        make(frame)
        return 0
    except BaseException as error:
        return xla_frame.error_of(frame, f"{type(error).__name__}: {error}")


def make(frame: CallFrame) -> None:
    """Run a call, and record a note of its launches for the next call."""
    number = int(frame.attributes.values[0].contents.value[0])
    call = TABLE.calls.get(number)
    if call is None:
        raise RuntimeError("this program was compiled in another process: trace it here, too")
    addresses = [*frame.arguments.addresses(), *frame.results.addresses()]
    stream, device = xla_frame.stream_of(frame), device_of(addresses)
    context = current_context()
    arrays = [dlpack.row_major_at(at, *shape, device) for at, shape in zip(addresses, call.shapes, strict=True)]
    inputs, outputs = arrays[: call.inputs], arrays[call.inputs :]
    with streams.Current(device, stream):
        call.run(outputs, inputs)
    with TABLE.lock:
        if call.noted is None:
            return
        if call.noted >= MAX_VERSIONS:
            call.noted = None
            return
        call.noted += 1
        try:
            launches = launches_of(functools.partial(call.run, outputs, inputs), device)
        except Exception:  # a lack of memory, for instance: a later call is captured, up to MAX_VERSIONS
            log.debug("%s is not captured", call.shapes, exc_info=True)
            return
        note = None if launches is None else note_of(launches, arrays, context, device)
        if note is None:
            log.debug("%s runs in Python each time", call.shapes)
            call.noted = None
            return
        TABLE.publish(number, note, launches)


def device_of(addresses: Sequence[int]) -> int:
    """The CUDA device of these buffers; empty buffers have no address."""
    import cupy

    runtime = cupy.cuda.runtime
    return next((int(runtime.pointerGetAttributes(at).device) for at in addresses if at), runtime.getDevice())


def current_context() -> int:
    """The CUDA context of this thread, set by XLA."""
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0


def launches_of(run: Callable[[], None], device: int) -> list[Launch] | None:
    """The launches of `run`, recorded without running them; None if `run` does more than launch kernels."""
    import cupy

    driver = ctypes.CDLL("libcuda.so.1")
    with cupy.cuda.Device(device), streams.relaxed_capture():  # XLA may be capturing
        stream = capturing_stream(device)
        graph = None
        with stream:
            stream.begin_capture()
            try:
                with recorded_launches() as launches:
                    run()
            finally:
                graph = stream.end_capture()
        launches = [launch for launch in launches if 0 not in launch.grid]
        nodes = ctypes.c_size_t()
        driver.cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(nodes))
    return launches if launches and nodes.value == len(launches) else None


@functools.cache
def capturing_stream(device: int) -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def note_of(launches: Sequence[Launch], arrays: Sequence[Any], context: int, device: int) -> np.ndarray | None:
    """Launches as words for the handler (xla_handler.py), or None if they depend on more than the buffers."""
    extents = [extent(array) for array in arrays]
    if not context or len(extents) > MAX_BUFFERS:
        return None
    relocation = relocate(launches, extents)
    if relocation is None:
        return None
    lines: list[list[int]] = []
    for launch, places in relocation.launches:
        kernel = launch.kernel
        block = kernel.packed(launch.packed_arguments)
        if len(block) > MAX_ARGUMENT_BYTES:
            return None
        overlap = launch.overlap and capability(device) >= 90
        config = struct.pack("7IxxxxPPIxxxx", *launch.grid, *launch.block, launch.shared_bytes, 0,
                             ATTRIBUTE.ctypes.data if overlap else 0, int(overlap))  # fmt: skip
        argument_words = words(block)
        lines.append(
            [kernel.handle(device), *words(config), len(block), len(argument_words), *argument_words, len(places),
             *itertools.chain(*((kernel.place(argument), array, offset) for argument, array, offset in places))]
        )  # fmt: skip
    together = sorted(relocation.together)
    alignments = [x.address % ALIGNMENT for x in extents]
    note = [0, context, len(extents), *alignments, len(together), *itertools.chain(*together), len(lines)]
    return np.array(note + list(itertools.chain(*lines)), np.int64)


def words(block: bytes) -> list[int]:
    return np.frombuffer(block + bytes(-len(block) % 8), np.int64).tolist()


# CUlaunchAttribute: a kernel may start before the previous one has ended.
ATTRIBUTE = np.array([PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0, 0, 0, 0, 0, 0], np.int64)
assert struct.calcsize("7IxxxxPPIxxxx") // 8 == CONFIG_WORDS
