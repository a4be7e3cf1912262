"""The fake CuPy and driver of an emulated device, as far as cumla and its tests use them."""

import contextlib
import ctypes
import importlib.machinery
import struct
import sys
import types
from unittest import mock

import numpy as np

from cumla.arrays import streams
from cumla.dispatch import backends
from cumla.kernels.cuda import launch, projection, tma
from cumla.kernels.types import stream_workspace

from . import arrays, cublas, launches, queues
from .arrays import Array
from .queues import Device, Stream

NUMPY_FUNCTIONS = (
    "add", "arange", "broadcast_to", "concatenate", "cumsum", "divide", "exp", "full", "maximum", "multiply",
    "negative", "ones", "searchsorted", "sqrt", "stack", "subtract", "where", "zeros_like",
)  # fmt: skip
UNWRITTEN = 0x7F  # in every byte: 3.4e38 as a float, 2e9 as an int
FREELY_SHARED = 48 << 10  # bytes of shared memory that a launch may request unless the kernel is allowed more


@contextlib.contextmanager
def devices():
    """A context in which this machine seems to have the emulated devices, and CuPy."""
    replaced = types.SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name, *rest: library(name, *rest)})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_modules({"cupy": CUPY, "cupy.cuda": CUPY.cuda}))
        for module in (launch, projection, streams, tma):
            stack.enter_context(mock.patch.object(module, "ctypes", replaced))
        for name, module in list(sys.modules.items()):
            if name.startswith("cumla.") and hasattr(module, "cupy"):  # bound at import, possibly to the real one
                stack.enter_context(mock.patch.object(module, "cupy", CUPY))
        stack.enter_context(mock.patch.object(backends, "_usable", set()))
        for cache in (streams.of_handle, streams._stream_number, projection.workspace, projection.cublas_library):
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        stack.callback(queues.forget_everything)
        stack.callback(stream_workspace.release_memory)
        yield
        queues.finish_everything()  # otherwise errors of pending work would be missed


@contextlib.contextmanager
def _modules(stand_ins):
    """Replace the modules of these names. Other modules imported meanwhile stay imported."""
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


LAUNCHABLE = []  # (raw kernel, kernel), by the driver's handle, less 1


class RawKernel:
    """A kernel, compiled for a device at its first launch there. `ptr` is the driver's handle."""

    def __init__(self, code, name):
        self.code, self.name, self.max_dynamic_shared_size_bytes = code, name, FREELY_SHARED

    @property
    def kernel(self):
        queues.refuse_in_capture("a kernel is loaded")
        LAUNCHABLE.append((self, launches.Kernel(self.code, self.name, int(Device().compute_capability))))
        return types.SimpleNamespace(ptr=len(LAUNCHABLE))


class RawModule:
    def __init__(self, code, options):
        self.code = code

    def get_function(self, name):
        return RawKernel(self.code, name)


# ---- libcuda


def library(name, *rest):
    if name.startswith("libcublas.so"):
        return cublas.LIBRARY
    return DRIVER if name.startswith("libcuda.so") else ctypes.CDLL(name, *rest)


CONFIG = struct.Struct("7IPPI")  # CUlaunchConfig


def launch_kernel(config, function, _, extra):
    """cuLaunchKernelEx, whose arguments are addresses, for packed arguments; raises the kernel's errors."""
    *sizes, shared_bytes, stream, _, overlap = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
    kind, arguments, other_kind, size, end = (ctypes.c_void_p * 5).from_address(extra)
    assert (kind, other_kind, end) == (launch.BUFFER_POINTER, launch.BUFFER_SIZE, None)
    argument_bytes = ctypes.c_size_t.from_address(size).value
    raw, kernel = LAUNCHABLE[function - 1]
    if shared_bytes > raw.max_dynamic_shared_size_bytes:
        raise launches.EmulationError(f"{raw.name}: {shared_bytes} bytes of shared memory, which it is not allowed")
    # A copy at 16 bytes past a multiple of 64, as on sm_90 (0x210 in a constant bank).
    memory = ctypes.create_string_buffer(argument_bytes + 64)
    packed = (ctypes.addressof(memory) + 47) // 64 * 64 + 16
    ctypes.memmove(packed, arguments, argument_bytes)
    work = launches.Launch(kernel, sizes[:3], sizes[3:], shared_bytes, packed, memory)
    Stream(handle=stream or 0).add(queues.KernelWork(work, bool(overlap)))
    return 0


def encode_tensor_map(tensor_map, kind, rank, address, sizes, strides, box, element_strides, *options):
    """cuTensorMapEncodeTiled for cumla's arguments and any array, in the format of runtime/copies.cpp."""
    element_bytes = {1: 2}[kind]  # UINT16
    assert (rank, list(element_strides), options) == (3, [1, 1, 1], (0, 3, 3, 0))  # 128-byte swizzle
    assert element_bytes * box[0] == 128
    assert box[2] == 1
    assert max(box) <= 256
    assert tensor_map.value % 64 == 0
    if any(number % 16 for number in (address.value, *strides)) or 0 in sizes or max(strides) >= 1 << 40:
        return 1  # CUDA_ERROR_INVALID_VALUE
    words = struct.pack("10Q", address.value, element_bytes, *sizes, *strides, *box)
    ctypes.memmove(tensor_map, words, len(words))
    return 0


DRIVER = types.SimpleNamespace(
    cuLaunchKernelEx=launch_kernel, cuThreadExchangeStreamCaptureMode=queues.exchange_capture_mode,
    cuTensorMapEncodeTiled=encode_tensor_map, cuStreamGetCaptureInfo_v2=queues.capture_info,
    cuGraphGetNodes=queues.graph_nodes, cuStreamGetId=queues.stream_number,
)  # fmt: skip


# ---- cupy


def copy_memory(target, source, size, kind, stream):
    Stream(handle=stream).add(lambda: ctypes.memmove(target, source, size))


class PointerAttributes:
    """runtime.pointerGetAttributes of an address. devicePointer is of host memory; device 1 is not supported."""

    def __init__(self, address):
        self.device, self.devicePointer = 0, address if address in PINNED else 0


class Pinned:
    """Addresses in host memory that `hostAlloc` returned."""

    def __init__(self):
        self.memory = {}

    def __contains__(self, address):
        return any(start <= address < start + len(memory) for start, memory in self.memory.items())

    def allocate(self, size, flags):
        memory = ctypes.create_string_buffer(max(size, 1))
        self.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address):
        queues.finish_everything()
        del self.memory[address]


PINNED = Pinned()


def on_device(function):
    """A NumPy function for arrays on a device. With an out it is queued, as CuPy's elementwise functions are."""

    def call(*arguments, **keywords):
        if keywords.get("out") is not None:
            operands = arrays.own((arguments, keywords), finished=False)
            queues.current_stream().add(lambda: function(*operands[0], **operands[1]))
            return keywords["out"]
        result = function(*arrays.own(arguments), **arrays.own(keywords))
        for argument in arguments:
            if isinstance(argument, Array) and np.may_share_memory(result, argument._view):
                return Array.of(result, argument.data.mem)
        return Array.of(result)

    return call


def empty(shape, dtype=float):
    """An array filled with values that no test expects as a result."""
    made = Array(shape, dtype)
    ctypes.memset(made.data.ptr, UNWRITTEN, made.nbytes)  # without a queue, as the memory is fresh
    return made


def zeros(shape, dtype=float):
    return Array(shape, dtype)  # uninitialised, as device memory is; pages that are not touched take no host memory


def empty_like(array):
    return empty(array.shape, array.dtype)


def array(value, dtype=None):
    return Array.of(np.array(arrays.own(value), dtype))


def asarray(value, dtype=None):
    return value if isinstance(value, Array) and dtype in (None, value.dtype) else array(value, dtype)


def from_dlpack(array):
    if not isinstance(array, Array):
        raise TypeError("no other library is emulated")
    return array


def make_module():
    cupy = types.ModuleType("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None, origin="tests/emulation/cupy.py")
    for name in NUMPY_FUNCTIONS:
        setattr(cupy, name, on_device(getattr(np, name)))
    cupy.ndarray, cupy.RawModule, cupy.from_dlpack = Array, RawModule, from_dlpack
    cupy.empty, cupy.empty_like, cupy.zeros, cupy.array, cupy.asarray = empty, empty_like, zeros, array, asarray
    cublas_functions = types.SimpleNamespace(
        gemmStridedBatchedEx=cublas.gemm_strided_batched, getVersion=lambda handle: 130000
    )
    runtime = types.SimpleNamespace(
        CUDARuntimeError=RuntimeError, getDevice=lambda: Device.current,
        getDeviceCount=lambda: len(Device.CAPABILITIES),
        streamIsCapturing=lambda handle: Stream(handle=handle).is_capturing(), pointerGetAttributes=PointerAttributes,
        deviceGetAttribute=lambda attribute, device: 0,  # no clusters, the only attribute that is read
        hostAlloc=PINNED.allocate, freeHost=PINNED.free, deviceSynchronize=queues.finish_everything,
        memcpyAsync=copy_memory, memcpyHostToDevice=1, memcpyDeviceToHost=2,
    )  # fmt: skip
    cupy.cuda = types.ModuleType("cupy.cuda")
    vars(cupy.cuda).update(
        runtime=runtime, cublas=cublas_functions, device=types.SimpleNamespace(get_cublas_handle=lambda: 0),
        Device=Device, MemoryPointer=arrays.MemoryPointer, UnownedMemory=arrays.UnownedMemory, Stream=Stream,
        Event=queues.Event, get_current_stream=queues.current_stream,
    )  # fmt: skip
    return cupy


CUPY = make_module()
