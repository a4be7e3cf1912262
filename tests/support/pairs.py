"""Arrays of every framework, and the table of conversions between them (docs/interop.md).

A library that is not installed has no rows and no column.
"""

import importlib
import importlib.util

import ml_dtypes
import numpy as np

from cumla.arrays import dlpack
from support.capsules import Foreign, ForeignVersioned

DTYPES = ("uint8", "int32", "bool", "float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu")
SHAPE = (3, 4)


def installed(module):
    """Whether a library is installed; it is imported, as a caller with its arrays has imported it."""
    if importlib.util.find_spec(module) is None:
        return False
    importlib.import_module(module)
    return True


def bytes_of_pattern(dtype):
    """Bytes that are values of any dtype, 0 and 1, with the alignment that XLA needs to share memory."""
    count = SHAPE[0] * SHAPE[1] * numpy_type(dtype).itemsize
    raw = dlpack.empty((count,), np.dtype(np.uint8), np.empty(0))
    raw[:] = np.random.default_rng(3).integers(0, 2, count)
    return raw


def numpy_type(dtype):
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


class VersionedProducer:
    """An array of another library with DLPack 1.x."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class UnversionedProducer(VersionedProducer):
    """An array with DLPack before 1.0."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


class CudaInterface:
    """An array with only `__cuda_array_interface__`."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def numpy_array(dtype):
    return bytes_of_pattern(dtype).view(numpy_type(dtype)).reshape(SHAPE)


def torch_tensor(dtype, device="cpu"):
    import torch

    raw = torch.from_numpy(bytes_of_pattern(dtype)).to(device)
    return raw.view(getattr(torch, dtype)).view(SHAPE)


def jax_array(dtype, platform="cpu"):
    import jax

    return jax.device_put(numpy_array(dtype), jax.devices(platform)[0])


def cupy_array(dtype):
    import cupy

    return cupy.asarray(bytes_of_pattern(dtype)).view(numpy_type(dtype)).reshape(SHAPE)


def numba_array(dtype):
    from numba import cuda

    if numpy_type(dtype).kind not in "biuf":
        return None
    return cuda.to_device(numpy_array(dtype))


def cuda_interface(dtype):
    return CudaInterface(cupy_array(dtype)) if numpy_type(dtype).kind in "biuf" else None


def host_producers():
    """Name -> function of a dtype's name that makes an array in host memory."""
    producers = {"NumPy": numpy_array}
    if installed("torch"):
        producers["torch"] = torch_tensor
    producers["any, DLPack 1"] = lambda dtype: ForeignVersioned(numpy_array(dtype))
    producers["any, DLPack 0"] = lambda dtype: Foreign(numpy_array(dtype))
    if installed("jax"):
        producers["JAX"] = jax_array
    return producers


def cuda_producers():
    """Name -> function of a dtype's name that makes an array in device memory, or None if there is no such array."""
    producers = {"CuPy": cupy_array, "Numba": numba_array}
    producers["any, CUDA array interface"] = cuda_interface
    if installed("torch"):
        producers["torch"] = lambda dtype: torch_tensor(dtype, "cuda")
        producers["any, DLPack 1"] = lambda dtype: VersionedProducer(torch_tensor(dtype, "cuda"))
        producers["any, DLPack 0"] = lambda dtype: UnversionedProducer(torch_tensor(dtype, "cuda"))
    if installed("jax"):
        producers["JAX"] = lambda dtype: jax_array(dtype, "cuda")
    return producers


def consumers(on_device):
    """Name in the table -> name that `dlpack.give` knows."""
    return {"CuPy" if on_device else "NumPy": "native", "torch": "torch", "JAX": "jax"}


def address(array):
    """Address of an array's memory."""
    for attribute in ("data_ptr", "unsafe_buffer_pointer"):
        if hasattr(array, attribute):
            return getattr(array, attribute)()
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def to_host_bytes(array):
    """An array's bytes, row by row."""
    native = dlpack.borrow(array)
    host = native if isinstance(native, np.ndarray) else native.get()
    return np.ascontiguousarray(host).view(np.uint8).reshape(-1)


def carried(array, consumer):
    """The dtype that `consumer` gets for `array` through cumla. Raises AssertionError if memory was copied."""
    native = dlpack.borrow(array)
    given = dlpack.give(native, consumer)
    assert address(given) == address(native), "copied"
    expected = to_host_bytes(array)
    np.testing.assert_array_equal(to_host_bytes(given), expected)
    return str(given.dtype).removeprefix("torch.")


def table(producers, on_device):
    """The lines of the table, for the frameworks installed here: the dtype of each array in each consumer."""
    keys = [key for key in consumers(on_device).values() if key == "native" or installed(key)]
    lines = [f"| from | {' | '.join(DTYPES)} |", "|" + "---|" * (1 + len(DTYPES))]
    for name, produce in producers.items():
        lines.append(f"| {name} | {' | '.join(_cell(produce(dtype), keys) for dtype in DTYPES)} |")
    return lines


def _cell(array, keys):
    if array is None:
        return "-"
    seen = [carried(array, key) for key in keys]
    return seen[0] if len(set(seen)) == 1 else ", ".join(seen)
