"""How a kernel is launched, on a device or in Numba's simulator."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..check_results import announce_compilation
from ..numba_common.numbers import KINDS
from .compiler import SIMULATED, cuda, from_dtype
from .compiler import types as numba_types

SIMULATED_THREADS = 8  # per thread block: the simulator runs about 8,000 threads a second
MAX_BLOCKS = 4096  # for grids that stride over rows: enough thread blocks to fill any device

# Empty arrays replace missing arguments.
NO_VECTOR = np.empty(0, np.int32)
NO_TABLE = np.empty((0, 0), np.int32)
NO_SCALE = np.empty(0, np.float32)
NO_PARTS = np.empty((0, 0), np.float32)

_AS_BITS: dict[Any, np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.uint16),
}

_NUMBERS = {
    bool: numba_types.boolean,
    np.bool_: numba_types.boolean,
    int: numba_types.int64,
    np.int64: numba_types.int64,
    float: numba_types.float64,
    np.float32: numba_types.float32,
}


def _as_bits(dtype: Any) -> np.dtype[Any]:
    return _AS_BITS.get(dtype, dtype)


def kind_of(array: Any) -> int:
    """Type of a floating-point array passed as bits: FLOAT32, BFLOAT16 or FLOAT16 of numba_common/numbers.py."""
    return KINDS[array.dtype.name]


def launch(
    kernel: Callable[..., None],
    blocks: int,
    threads: int,
    *arguments: Any,
    shared_bytes: int = 0,
    at_a_time: int = 1,
) -> None:
    """Launch `kernel` with `blocks` thread blocks of `threads` threads on CuPy's current stream; 0 blocks: no launch.

    Args:
        arguments: NumPy or CuPy arrays (floating-point ones are passed as bits), numbers, and named tuples of both
        shared_bytes: dynamic shared memory per thread block
        at_a_time: thread blocks for which an SM must have registers
    """
    if blocks == 0:  # the driver refuses an empty grid
        return
    if SIMULATED:
        configured = _simulated(kernel)[blocks, min(threads, SIMULATED_THREADS), 0, shared_bytes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of values that overflow float32
            configured(*(_simulated_argument(x) for x in arguments))
        return
    types = tuple(type_of(x) for x in arguments)
    device, stream = _current_device_and_stream()
    configured = _configured(kernel, types, blocks, threads, shared_bytes, at_a_time, device, stream)
    configured(*(_device_argument(x) for x in arguments))


def _current_device_and_stream() -> tuple[int, int]:
    cupy = sys.modules["cupy"]
    return cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr


def _is_array(argument: Any) -> bool:
    return bool(getattr(argument, "ndim", 0))


@functools.lru_cache(maxsize=4096)
def _configured(
    kernel: Callable[..., None],
    types: tuple[Any, ...],
    blocks: int,
    threads: int,
    shared_bytes: int,
    at_a_time: int,
    device: int,
    stream: int,
) -> Any:
    with warnings.catch_warnings():
        # Numba warns of grids of fewer than 128 blocks, which are common for decode batches.
        warnings.simplefilter("ignore")
        made = compiled(kernel, types, (threads, at_a_time) if at_a_time > 1 else None)
        if shared_bytes:
            _allow_shared_bytes(made, device)
        return made[blocks, threads, cuda.external_stream(stream) if stream else 0, shared_bytes]


@functools.cache
def compiled(kernel: Callable[..., None], types: tuple[Any, ...], bounds: tuple[int, int] | None) -> Any:
    """The kernel for arguments of these types, compiled once for all strides of the arrays.

    Args:
        bounds: threads of a thread block, and thread blocks for which an SM must have registers
    """
    announce_compilation(kernel.__module__.rpartition(".")[2], cached=False)
    return cuda.jit(signature(types), launch_bounds=bounds)(kernel)


@functools.cache
def _allow_shared_bytes(made: Any, device: int) -> None:
    """Allow a kernel all of the device's dynamic shared memory; launches with more than 48 KiB need this."""
    from cuda.bindings import driver

    most = _attribute(device, "MaxSharedMemoryPerBlockOptin")
    (overload,) = made.overloads.values()
    kernel = driver.CUkernel(int(overload._codelibrary.get_cufunc().handle))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, most, kernel, driver.CUdevice(device))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"shared memory: {status.name} when asked for {most} bytes")


def multiprocessors() -> int:
    """SMs of the current device; in the simulator a small number, so that work is divided there, too."""
    return 2 if SIMULATED else _attribute(sys.modules["cupy"].cuda.runtime.getDevice(), "MultiProcessorCount")


@functools.cache
def _attribute(device: int, name: str) -> int:
    return int(sys.modules["cupy"].cuda.Device(device).attributes[name])


def is_aligned(*arrays: Any) -> bool:
    """Whether every row of these arrays starts at a multiple of 16 bytes."""
    bits = 0
    for array in arrays:
        bits |= array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
        for stride in array.strides[:-1]:
            bits |= stride
    return bits % 16 == 0


def device_function(function: Callable[..., Any]) -> Any:
    """Decorates functions that kernels call: they are inlined, so that arrays in registers stay there."""
    if not SIMULATED:
        return cuda.jit(device=True, forceinline=True)(function)
    # The simulator's calls are slow: it replaces `cuda` in the function's module during each.
    return cuda.jit(device=True)(function) if "cuda" in function.__code__.co_names else function


def type_of(argument: Any) -> Any:
    """The type for which a kernel is compiled: a dtype and ndim, a named tuple's class and members, or a class."""
    if _is_array(argument):
        return argument.dtype, argument.ndim
    if isinstance(argument, tuple):
        return type(argument), tuple(type_of(x) for x in argument)
    return type(argument)


def signature(types: tuple[Any, ...]) -> Any:
    """Numba's signature of a kernel, for arguments of these types (`type_of`)."""
    return numba_types.void(*(_numba_type(x) for x in types))


def _numba_type(python_type: Any) -> Any:
    if not isinstance(python_type, tuple):
        return _NUMBERS[python_type]
    kind, rest = python_type
    if isinstance(rest, tuple):
        return numba_types.NamedTuple([_numba_type(x) for x in rest], kind)
    return numba_types.Array(from_dtype(_as_bits(kind)), rest, "A")  # "A": any strides


def _device_argument(argument: Any) -> Any:
    """A CuPy array as Numba's array, without its stream: Numba would synchronise with it."""
    if isinstance(argument, tuple):
        return type(argument)(*(_device_argument(x) for x in argument))
    if not _is_array(argument):
        return argument
    address = 0 if isinstance(argument, np.ndarray) else argument.data.ptr
    return _device_array(address, argument.shape, argument.strides, _as_bits(argument.dtype).str)


@functools.lru_cache(maxsize=4096)
def _device_array(address: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str) -> Any:
    """Numba's array over memory that it does not own, cached because its constructor is slow."""
    description = {"shape": shape, "strides": strides, "typestr": typestr, "data": (address, False), "version": 2}
    return cuda.from_cuda_array_interface(description, sync=False)


@functools.cache
def _simulated(kernel: Callable[..., None]) -> Any:
    return cuda.jit(kernel)


def _simulated_argument(argument: Any) -> Any:
    """A NumPy array as the simulator's array over the same memory: the simulator would copy a NumPy array."""
    if isinstance(argument, tuple):
        return type(argument)(*(_simulated_argument(x) for x in argument))
    if not isinstance(argument, np.ndarray):
        return argument
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray

    return FakeWithinKernelCUDAArray(FakeCUDAArray(argument.view(_as_bits(argument.dtype))))
