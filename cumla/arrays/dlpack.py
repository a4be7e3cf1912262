"""Any framework's array as a NumPy or CuPy array over the same memory, and results in the caller's framework.

    argument(array, name)        -> an Argument: numpy.ndarray (host memory) or cupy.ndarray (CUDA memory), no copy
    borrow(array, name)          -> only the Argument's array
    give(native, framework)      -> the same memory as an array of that framework, no copy

Only frameworks that the caller has already imported are imported. bfloat16 is borrowed as
ml_dtypes.bfloat16, 8-bit floats as uint8: NumPy and CuPy exchange only their bytes.
NumPy, CuPy, torch and JAX arrays take a direct path; other arrays are read by DLPack, or by
`__cuda_array_interface__` if they lack DLPack.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import capsule, jax_arrays, streams
from .foreign_memory import HostMemory, NoCuPyError, UntilDone, cupy_module, recorded, user_stream
from .memory import overlaps_itself, reach

KDL_CPU, KDL_CUDA, KDL_CUDA_HOST, KDL_CUDA_MANAGED = 1, 2, 3, 13

FLOAT8_CODES = range(7, 15)  # DLPack's type codes of the 8-bit floats
# (DLPack type code, bits) -> dtype of the borrowed array
DLPACK_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(0, bits): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{(1, bits): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{(2, bits): np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (6, 8): np.dtype(np.bool_),
    **{(code, 8): np.dtype(np.uint8) for code in FLOAT8_CODES},  # as bytes
}
FLOAT8_TYPES = frozenset(
    np.dtype(getattr(ml_dtypes, name)) for name in dir(ml_dtypes) if name.startswith("float8_")
)  # fmt: skip

_FRAMEWORK_OF_TYPE: dict[type, str] = {np.ndarray: "numpy"}


def framework_of(array: Any) -> str:
    """ "numpy", "cupy", "torch", "jax", or "other" for any other array with one of the array protocols. "jax" has the
    device of the array, on which `give` puts results.

    Raises TypeError for an object that is no array, and for a JAX tracer, which has no memory.
    """
    kind = _FRAMEWORK_OF_TYPE.get(type(array)) or _framework_of_type(array)
    return jax_arrays.framework_of(array) if kind == "jax" else kind


def _framework_of_type(array: Any) -> str:
    """The framework's name, from the class of an array."""
    kind = _FRAMEWORK_OF_TYPE[type(array)] = _identify(array)
    return kind


def array_type(framework: str) -> type | None:
    """The class of a framework's arrays; None unless the framework is imported. A module of its name may be another
    package, such as a folder without code or a test double, or the framework during its import."""
    found = getattr(sys.modules.get(framework), "__dict__", {}).get(_ARRAY_TYPES[framework])
    return found if isinstance(found, type) else None


_ARRAY_TYPES = {"numpy": "ndarray", "cupy": "ndarray", "torch": "Tensor", "jax": "Array"}


def _identify(array: Any) -> str:
    for kind in _ARRAY_TYPES:
        arrays = array_type(kind)
        if arrays is not None and isinstance(array, arrays):
            if kind == "jax" and "Tracer" in type(array).__name__:
                raise TypeError("got a JAX tracer, expected an array with memory: inside jax.jit use cumla.interop.jax")
            return kind
    if _speaks_dlpack(array) or hasattr(array, "__cuda_array_interface__"):
        return "other"
    raise TypeError(
        f"got {type(array).__name__}, expected an array (NumPy, CuPy, torch, JAX or any with __dlpack__ and "
        "__dlpack_device__)"
    )


def _speaks_dlpack(array: Any) -> bool:
    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")


class Argument(NamedTuple):
    """A borrowed argument of a call.

    Attributes:
        name: name of the argument, for error messages
        native: a NumPy or CuPy array over the same memory; 8-bit floats as bytes
        framework: `framework_of` the caller's array
        read_only: whether the memory must not be written, such as a JAX array's
        float8: the caller's dtype if it is an 8-bit float, such as "float8_e4m3fn"; else ""
    """

    name: str
    native: Any
    framework: str
    read_only: bool = False
    float8: str = ""


def borrow(array: Any, name: str = "array", writable: bool = False, stream: int | None = None) -> Any:
    """`array` as a NumPy or CuPy array over the same memory. Arguments and errors as in `argument`, with any_float8."""
    return argument(array, name, writable, stream, any_float8=True).native


def argument(
    array: Any, name: str, writable: bool = False, stream: int | None = None, any_float8: bool = False
) -> Argument:
    """`array` borrowed as the argument `name`.

    Args:
        writable: whether the array will be written: read-only memory, such as JAX's, is then an error
        stream: handle of the stream that will use the array; DLPack makes it wait for the array's pending work. None:
            CuPy's current stream. NumPy, CuPy and torch arrays are ready on their user's current stream
        any_float8: whether 8-bit floats other than e4m3 are allowed; False where bytes are read as e4m3

    Raises TypeError for an object that is no array or has a type without a counterpart, ValueError for memory that
    cannot be used or written.
    """
    kind = _FRAMEWORK_OF_TYPE.get(array.__class__)
    if kind is None:
        try:
            kind = _framework_of_type(array)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
    try:
        borrowed: Argument = _BORROW[kind](array, name, stream)
    except NoCuPyError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:
        if str(error).startswith(f"{name}: ") or isinstance(error, MemoryError) or _is_of_cupy(error):
            raise
        error_type = TypeError if isinstance(error, TypeError) else ValueError
        got = f"got a {type(array).__name__} whose memory cannot be used"
        raise error_type(f"{name}: {got}, expected a plain array: {error}") from error
    if borrowed.float8 and not any_float8:
        check_float8(name, borrowed.float8)
    if not writable:
        return borrowed
    if borrowed.read_only:
        instead = "; JAX arrays never change: cumla.interop.jax returns results instead" if kind == "jax" else ""
        raise ValueError(f"{name}: got a read-only {kind} array, expected a writable array{instead}")
    if overlaps_itself(borrowed.native):
        strides = borrowed.native.strides
        raise ValueError(f"{name}: got strides {strides} bytes, expected elements that do not overlap, to write")
    return borrowed


def _is_of_cupy(error: Exception) -> bool:
    """Whether an error comes from the device, independent of the argument."""
    return type(error).__module__.startswith("cupy")


def check_float8(name: str, dtype: str) -> None:
    """Raise TypeError for an 8-bit float other than e4m3: its bytes would be read as e4m3."""
    if dtype.startswith("float8_") and dtype != "float8_e4m3fn":
        raise TypeError(f"{name}: got dtype {dtype}, expected float8_e4m3fn or bytes (uint8)")


def _argument(name: str, native: Any, framework: str, read_only: bool) -> Argument:
    """A NumPy or CuPy array as an Argument, 8-bit floats as bytes."""
    if native.dtype in FLOAT8_TYPES:
        return Argument(name, native.view(np.uint8), framework, read_only, native.dtype.name)
    return Argument(name, native, framework, read_only)


def _borrow_numpy(array: Any, name: str, stream: int | None) -> Argument:
    if array.__class__ is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise _masked(name, "a masked array")
        array = np.asarray(array)  # slices of an np.matrix would be matrices
    return _argument(name, array, "numpy", not array.flags.writeable)


def _borrow_cupy(array: Any, name: str, stream: int | None) -> Argument:
    return _argument(name, array, "cupy", False)


def _borrow_torch(tensor: Any, name: str, stream: int | None) -> Argument:
    torch = sys.modules["torch"]
    if tensor.__class__ is not torch.Tensor and hasattr(tensor, "get_mask"):
        raise _masked(name, f"a torch {type(tensor).__name__}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: got a torch tensor of layout {tensor.layout}, expected a strided one")
    if tensor.is_neg():
        raise ValueError(f"{name}: got a view with its negative bit set, expected the tensor's resolve_neg()")
    (dtype, float8), device = _torch_type(tensor.dtype, name), tensor.device
    if device.type == "cuda":
        size, address = dtype.itemsize, tensor.data_ptr()
        if not address and tensor.numel():
            raise _freed(name, tensor)
        strides = tuple([stride * size for stride in tensor.stride()])
        native = _over_device_memory(address, tensor.shape, strides, dtype, device.index, tensor)
        return Argument(name, native, "torch", False, float8)
    if device.type != "cpu":
        raise ValueError(f"{name}: got a torch tensor on {device}, expected one on the CPU or a CUDA device")
    last = tensor.storage_offset() + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        raise _freed(name, tensor)
    if tensor.dtype is torch.bfloat16:
        native = tensor.view(torch.int16).numpy().view(dtype)
    else:
        native = (tensor.view(torch.uint8) if dtype == np.uint8 else tensor).numpy()
    return Argument(name, native, "torch", False, float8)


def _masked(name: str, what: str) -> TypeError:
    return TypeError(f"{name}: got {what}, whose mask would be lost, expected a plain one")


def _freed(name: str, tensor: Any) -> ValueError:
    size = tensor.untyped_storage().nbytes()
    return ValueError(
        f"{name}: got a tensor of shape {tuple(tensor.shape)} whose storage was resized to {size} bytes, expected one "
        "with memory for its elements"
    )


def _torch_type(torch_dtype: Any, name: str) -> tuple[np.dtype[Any], str]:
    """The dtype of the borrowed array, and the name of an 8-bit float."""
    known = _TORCH_TYPES.get(torch_dtype)
    if known is None:
        text = str(torch_dtype).removeprefix("torch.")
        try:
            dtype = np.dtype(getattr(ml_dtypes, text, text))
        except TypeError:
            raise TypeError(f"{name}: got {torch_dtype}, which has no counterpart in NumPy") from None
        known = (np.dtype(np.uint8), text) if dtype in FLOAT8_TYPES else (dtype, "")
        _TORCH_TYPES[torch_dtype] = known
    return known


_TORCH_TYPES: dict[Any, tuple[np.dtype[Any], str]] = {}


def _borrow_jax(array: Any, name: str, stream: int | None) -> Argument:
    jax_arrays.check(array, name)
    devices = array.devices()
    if len(devices) != 1:
        raise ValueError(f"{name}: got a JAX array sharded over {len(devices)} devices, expected one device")
    framework = jax_arrays.framework_of(array)
    if next(iter(devices)).platform == "cpu":
        return _argument(name, np.asarray(array), framework, True)
    return _borrow_dlpack(array, name, stream)._replace(framework=framework, read_only=True)


def _borrow_other(array: Any, name: str, stream: int | None) -> Argument:
    if _speaks_dlpack(array):
        return _borrow_dlpack(array, name, stream)
    return _borrow_cuda_interface(array, name, stream)


def _borrow_cuda_interface(array: Any, name: str, stream: int | None) -> Argument:
    """Borrow by the only protocol of Numba's device arrays. The consumer must wait for the producer's stream."""
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise _masked(name, f"a {type(array).__name__} with a mask (__cuda_array_interface__)")
    dtype = np.dtype(interface["typestr"])
    pointer, read_only = interface["data"]
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or capsule.row_major(shape, dtype.itemsize)
    capsule.check_extent(name, pointer, 0, shape, strides, dtype.itemsize)
    device = _device_of_pointer(pointer) if pointer else 0
    user, producer = user_stream(stream), interface.get("stream")
    if producer is not None and producer != user:
        cuda = cupy_module().cuda
        with cuda.Device(device):
            streams.of_handle(user, device).wait_event(recorded(streams.of_handle(producer, device)))
    owner = UntilDone(array, device, user)
    native = _over_device_memory(pointer, shape, strides, dtype, device, owner)
    return _argument(name, native, "other", bool(read_only))


_BORROW: dict[str, Callable[[Any, str, int | None], Argument]] = {
    "numpy": _borrow_numpy,
    "cupy": _borrow_cupy,
    "torch": _borrow_torch,
    "jax": _borrow_jax,
    "other": _borrow_other,
}


def _borrow_dlpack(array: Any, name: str, stream: int | None = None) -> Argument:
    device_type, device_id = _device_of(array, name)
    on_device = device_type == KDL_CUDA
    user = {"stream": user_stream(stream)} if on_device else {}
    try:
        exported = array.__dlpack__(**user, max_version=(1, 1))
    except TypeError:
        exported = array.__dlpack__(**user)
    tensor, read_only = capsule.read(exported, name, (device_type, device_id))
    dtype = DLPACK_TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(
            f"{name}: got DLPack type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes, "
            "which has no counterpart in NumPy"
        )
    address, shape, strides = capsule.described(tensor, dtype.itemsize, name)
    owned = array, capsule.Borrowed(exported)
    if on_device:
        owner = UntilDone(owned, device_id, user["stream"])
        native = _over_device_memory(address, shape, strides, dtype, device_id, owner)
    elif 0 in shape:
        native = np.empty(shape, dtype)
    else:
        native = np.asarray(HostMemory(address, shape, strides, dtype, read_only, owned)).view(dtype)
    float8 = str(getattr(array, "dtype", "")).rpartition(".")[2] if tensor.code in FLOAT8_CODES else ""
    return Argument(name, native, "other", read_only, float8 if float8.startswith("float8_") else "")


def _device_of(array: Any, name: str) -> tuple[int, int]:
    """DLPack's type and number of an array's device. Raises ValueError for a device that cumla does not support."""
    said = array.__dlpack_device__()
    try:
        device_type, device_id = map(int, said)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{name}: got {said!r:.80} from __dlpack_device__, expected a device's type and number"
        ) from None
    if device_type not in (KDL_CPU, KDL_CUDA):
        what = {KDL_CUDA_HOST: "pinned host", KDL_CUDA_MANAGED: "managed"}.get(device_type, f"type {device_type}")
        raise ValueError(f"{name}: got an array in {what} memory, expected plain CPU or CUDA device memory")
    if device_type == KDL_CUDA and not 0 <= device_id < cupy_module().cuda.runtime.getDeviceCount():
        raise ValueError(f"{name}: got an array on CUDA device {device_id}, expected a device that CuPy finds")
    return device_type, device_id


@functools.lru_cache(maxsize=4096)
def row_major_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
    """A buffer of a compiled program as a CuPy array, 8-bit floats as bytes. The program keeps the memory alive and
    orders the work. The array is cached, because a program often has its buffers at the same addresses."""
    dtype = np.dtype(np.uint8) if dtype in FLOAT8_TYPES else np.dtype(dtype)
    return _over_device_memory(address, shape, capsule.row_major(shape, dtype.itemsize), dtype, device, None)


def _over_device_memory(
    address: int, shape: Any, strides: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: Any
) -> Any:
    """A CuPy array over CUDA memory that `owner` keeps alive."""
    cupy = cupy_module()
    shape = tuple(shape)
    low, high = reach(shape, strides, dtype.itemsize)
    memory = cupy.cuda.UnownedMemory(address + low, high - low, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides)


def _device_of_pointer(pointer: int) -> int:
    return int(cupy_module().cuda.runtime.pointerGetAttributes(pointer).device)


def give(native: Any, framework: str) -> Any:
    """A NumPy or CuPy array as an array of `framework` over the same memory."""
    if framework == "torch":
        return _give_torch(native)
    return jax_arrays.give(native, framework) if framework == "jax" else native


def give_shared(native: Any, framework: str) -> Any:
    """`give` for memory that may be written later: a copy for JAX, whose arrays must not change."""
    return give(native.copy() if framework == "jax" else native, framework)


def _give_torch(native: Any) -> Any:
    torch = sys.modules["torch"]
    if not isinstance(native, np.ndarray):
        return torch.from_dlpack(native)
    if native.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(native.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(native)


def namespace_of(native: Any) -> Any:
    """The module of a borrowed array, numpy or cupy."""
    return np if isinstance(native, np.ndarray) else cupy_module()


def dtype_in(framework: str, dtype: np.dtype[Any]) -> Any:
    """A dtype as arrays of CuPy or torch have it."""
    return getattr(sys.modules["torch"], dtype.name) if framework == "torch" else dtype


def empty_torch(shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
    """An uninitialised torch tensor on a CUDA device, from torch's allocator on torch's current stream."""
    return sys.modules["torch"].empty(shape, dtype=dtype_in("torch", dtype), device=device)


@functools.cache
def torch_element(dtype: Any, device: int) -> Any:
    """A torch tensor of one element on a CUDA device, with no dimension."""
    return sys.modules["torch"].empty((), dtype=dtype, device=device)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    """An uninitialised array on the device of `like`; host memory is aligned to 64 bytes, so that XLA can share it."""
    if not isinstance(like, np.ndarray):
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    block = np.empty(size + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size].view(dtype).reshape(shape)
