"""How a kernel is launched, on a device or in Numba's simulator."""

from __future__ import annotations

import functools
import sys
import typing
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numba
import numpy as np
from numba import cuda

from ..numba_common.numbers import KINDS

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
SIMULATED_THREADS = 8  # a thread block: the simulator runs about 8,000 threads a second
MAX_BLOCKS = 4096  # where thread blocks go through the rows in turns: enough to fill any device

# What kernels get for an argument that is not given: an array that has nothing in it.
NO_VECTOR = np.empty(0, np.int32)
NO_TABLE = np.empty((0, 0), np.int32)
NO_SCALE = np.empty(0, np.float32)

_AS_BITS: dict[Any, np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.uint16),
}

_NUMBERS = {bool: numba.boolean, int: numba.int64, float: numba.float64, np.float32: numba.float32}


def _as_bits(dtype: Any) -> np.dtype[Any]:
    return _AS_BITS.get(dtype, dtype)


def kind_of(array: Any) -> int:
    """What the bits of a floating-point array are: FLOAT32, BFLOAT16 or FLOAT16 of kernels/numbers.py."""
    return KINDS[array.dtype.name]


def launch(kernel: Callable[..., None], blocks: int, threads: int, *arguments: Any) -> None:
    """Run `kernel` with `blocks` thread blocks of `threads` threads, on CuPy's current stream.

    arguments  NumPy or CuPy arrays (of which floating-point ones arrive as bits), numbers, and tuples of numbers
    """
    if SIMULATED:
        _simulated(kernel)[blocks, min(threads, SIMULATED_THREADS)](*(_simulated_argument(x) for x in arguments))
        return
    types = tuple((x.dtype, x.ndim) if _is_array(x) else type(x) for x in arguments)
    device, stream = _current_device_and_stream()
    _configured(kernel, types, blocks, threads, device, stream)(*(_device_argument(x) for x in arguments))


def _current_device_and_stream() -> tuple[int, int]:
    cupy = sys.modules["cupy"]
    return cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr


def _is_array(argument: Any) -> bool:
    return bool(getattr(argument, "ndim", 0))


@functools.lru_cache(maxsize=4096)
def _configured(
    kernel: Callable[..., None], types: tuple[Any, ...], blocks: int, threads: int, device: int, stream: int
) -> Any:
    with warnings.catch_warnings():
        # Numba finds fault with every grid of less than 128 blocks, and a decode batch is no larger.
        warnings.simplefilter("ignore")
        return compiled(kernel, types)[blocks, threads, cuda.external_stream(stream) if stream else 0]


@functools.cache
def compiled(kernel: Callable[..., None], types: tuple[Any, ...]) -> Any:
    """The kernel for arguments of these types: once for all strides of the arrays."""
    return cuda.jit(signature(types))(kernel)


def signature(types: tuple[Any, ...]) -> Any:
    """Numba's signature of a kernel. An array is (dtype, ndim), anything else its Python type."""
    return numba.void(*(_numba_type(x) for x in types))


def _numba_type(python_type: Any) -> Any:
    if isinstance(python_type, tuple):
        dtype, ndim = python_type
        return numba.types.Array(numba.from_dtype(_as_bits(dtype)), ndim, "A")  # "A": any strides
    if python_type in _NUMBERS:
        return _NUMBERS[python_type]
    fields = typing.get_type_hints(python_type)
    return numba.types.NamedTuple([_NUMBERS[fields[name]] for name in python_type._fields], python_type)


def _device_argument(argument: Any) -> Any:
    """A CuPy array as Numba's, without a word about streams, for which Numba would synchronise."""
    if not _is_array(argument):
        return argument
    description = {
        "shape": argument.shape,
        "strides": argument.strides,
        "typestr": _as_bits(argument.dtype).str,
        "data": (0 if isinstance(argument, np.ndarray) else argument.data.ptr, False),
        "version": 2,
    }
    return cuda.from_cuda_array_interface(description, owner=argument, sync=False)


@functools.cache
def _simulated(kernel: Callable[..., None]) -> Any:
    return cuda.jit(kernel)


def _simulated_argument(argument: Any) -> Any:
    """A NumPy array as the simulator's, over the same memory: given a plain one, it would work on a copy."""
    if not isinstance(argument, np.ndarray):
        return argument
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(argument.view(_as_bits(argument.dtype)))
