"""Reads DLPack capsules in place: a tensor's type, shape, strides and address.

NumPy and CuPy refuse types that they could represent as bytes, so they do not get the capsules. A borrowed capsule is
marked as used, so that no other consumer takes its tensor and frees it. Afterwards the capsule's name is restored, and
its own destructor frees the tensor.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

READ_ONLY_FLAG = 1
MAX_NDIM = 64  # NumPy's limit
MAX_BYTES = 2**48  # larger than any tensor
DEVICE_TYPES = {1: "CPU", 2: "CUDA"}
USED_NAMES = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ManagedTensorVersioned(ctypes.Structure):
    """The target of a "dltensor_versioned" capsule. The target of a "dltensor" capsule starts with the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


def _of_python(name: str, result: Any, *arguments: Any) -> Any:
    """A private copy of a CPython function: other users of ctypes.pythonapi set types on the shared function."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule_pointer = _of_python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_capsule_name = _of_python("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)
_set_capsule_name = _of_python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


def read(capsule: Any, name: str, device: tuple[int, int]) -> tuple[Tensor, bool]:
    """The tensor of a capsule of either kind, and whether it is read-only.

    Args:
        device: the DLPack type and number of the device from the array's `__dlpack_device__`

    Raises TypeError for another object, ValueError for a capsule that was already used, is not of DLPack version 0 or
    1, or has a tensor on another device. The errors name the argument `name`.
    """
    if type(capsule).__name__ != "PyCapsule":
        raise TypeError(f"{name}: got {type(capsule).__name__} from __dlpack__, expected a capsule")
    kind = _capsule_name(capsule)
    if kind not in USED_NAMES:
        shown = "without a name" if kind is None else f"named {kind.decode(errors='replace')!r}"
        raise ValueError(f"{name}: got a DLPack capsule {shown}, expected an unused one")
    pointer = _capsule_pointer(capsule, kind)
    tensor, read_only = Tensor.from_address(pointer), False
    if kind == b"dltensor_versioned":
        managed = ManagedTensorVersioned.from_address(pointer)
        if managed.major != 1:
            raise ValueError(f"{name}: got DLPack version {managed.major}.{managed.minor}, expected 1.x")
        tensor, read_only = managed.tensor, bool(managed.flags & READ_ONLY_FLAG)
    if tensor.device_type != device[0] or (device[0] != 1 and tensor.device_id != device[1]):
        raise ValueError(
            f"{name}: got a tensor on {_device(tensor.device_type, tensor.device_id)} from an array that says it is on "
            f"{_device(*device)}"
        )
    return tensor, read_only


def described(tensor: Tensor, itemsize: int, name: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, shape and strides in bytes of a tensor. Another library wrote its fields: each is checked before use.

    Raises ValueError; the message names the argument `name`.
    """
    ndim, offset, data, sizes, steps = tensor.ndim, tensor.byte_offset, tensor.data, tensor.shape, tensor.strides
    if not 0 <= ndim <= MAX_NDIM:
        raise ValueError(f"{name}: got a DLPack tensor of {ndim} dimensions, expected 0 to {MAX_NDIM}")
    if ndim and not sizes:
        raise ValueError(f"{name}: got a DLPack tensor of {ndim} dimensions whose shape is a null pointer")
    if offset > MAX_BYTES:
        raise ValueError(f"{name}: got a DLPack tensor with byte_offset {offset}, expected at most {MAX_BYTES}")
    shape = tuple(sizes[:ndim]) if ndim else ()
    strides = tuple([step * itemsize for step in steps[:ndim]]) if ndim and steps else row_major(shape, itemsize)
    check_extent(name, data, offset, shape, strides, itemsize)
    return (data or 0) + offset, shape, strides


def check_extent(
    name: str, data: int | None, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> None:
    """Raise ValueError for an array that no memory can hold.

    Products of such sizes and strides would overflow, or address memory outside of the array.
    """
    below, above, largest = 0, itemsize, itemsize  # bytes before and after the first address; of all elements
    for size, stride in zip(shape, strides, strict=True):
        if size < 0:
            raise ValueError(f"{name}: got shape {shape}, expected sizes from 0 up")
        if not -MAX_BYTES <= stride <= MAX_BYTES:
            raise ValueError(f"{name}: got strides {strides} bytes, expected at most {MAX_BYTES} either way")
        largest *= size or 1
        if stride < 0:
            below -= (size - 1) * stride
        else:
            above += (size - 1) * stride
    empty = 0 in shape
    if largest > MAX_BYTES or (not empty and below + above > MAX_BYTES):
        raise ValueError(
            f"{name}: got shape {shape} and strides {strides} bytes, expected an extent of at most {MAX_BYTES} bytes"
        )
    if empty:
        return
    if not data:
        raise ValueError(f"{name}: got shape {shape} at a null pointer, expected an address")
    if data + offset < below or data + offset + above > 2**64:
        raise ValueError(f"{name}: got an array that begins or ends outside of the 64-bit address space")


def row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _device(kind: int, number: int) -> str:
    return f"{DEVICE_TYPES.get(kind, f'DLPack device type {kind}')} {number}"


class Borrowed:
    """A capsule whose tensor is borrowed for the lifetime of this object."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        # A capsule stores the address of its name, not the characters, so the name must be a constant.
        self._name, used = next(names for names in USED_NAMES.items() if names[0] == _capsule_name(capsule))
        _set_capsule_name(capsule, used)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _set_capsule_name(self._capsule, self._name)
