"""DLPack capsules, read in place: what they say of a tensor and where its memory is.

NumPy and CuPy refuse types that they could carry as bytes, so capsules are not given to them. A capsule that was
read is not marked as used: its own destructor frees the tensor when it is let go of, and until then it must be kept.
"""

from __future__ import annotations

import ctypes
from typing import Any

READ_ONLY_FLAG = 1


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
    """What a "dltensor_versioned" capsule points to; a plain "dltensor" capsule starts with the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = (ctypes.py_object,)


def read(capsule: Any, name: str) -> tuple[Tensor, bool]:
    """What a capsule of either kind says of its tensor, and whether that is read-only.

    Raises ValueError, which speaks of the argument `name`, for a DLPack that is not of version 0 or 1.
    """
    kind = _capsule_name(capsule)
    pointer = _capsule_pointer(capsule, kind)
    if kind != b"dltensor_versioned":
        return Tensor.from_address(pointer), False
    managed = ManagedTensorVersioned.from_address(pointer)
    if managed.major != 1:
        raise ValueError(f"{name}: got DLPack version {managed.major}.{managed.minor}, expected 1.x")
    return managed.tensor, bool(managed.flags & READ_ONLY_FLAG)
