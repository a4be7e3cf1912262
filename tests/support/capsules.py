"""Arrays of a library with only DLPack, which reuses memory as soon as it is released."""

import ctypes

import numpy as np

RELEASED = 0xEE  # in every byte of memory that was released


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    )  # fmt: skip


# Separate function objects: JAX sets other types for ctypes.pythonapi.PyCapsule_New.
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# Called while a capsule is destroyed: a pointer, because an object's references could not be counted any more.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_exported = {}  # address of a Managed -> what it needs


def _release(address):
    """The deleter: the memory is reused."""
    _, array, owner = _exported.pop(address)
    owner.released += 1
    ctypes.memset(_address(array), RELEASED, array.nbytes)


def _destroy(capsule):
    """A capsule that was not consumed calls the deleter."""
    for kind in KINDS:
        if _is_valid(capsule, kind):
            _release(_pointer(capsule, kind))


_release_function = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_release)
_destroy_function = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)
RELEASE = ctypes.cast(_release_function, ctypes.c_void_p).value
KINDS = (b"dltensor", b"dltensor_versioned")
CODES = {"i": 0, "u": 1, "f": 2, "b": 6, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e8m0fnu": 14}


def _address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


class Foreign:
    """A contiguous array of such a library. The exported tensor owns the memory, not this object.

    Attributes:
        array: NumPy or CuPy array with its memory
        byte_offset: part of the address that is passed separately; lanes as in DLPack
        stream: the stream that the last consumer passed
        released: number of releases of memory
    """

    def __init__(self, array, byte_offset=0, lanes=1):
        self.array, self.byte_offset, self.lanes = array, byte_offset, lanes
        self.stream, self.released = None, 0

    def __dlpack_device__(self):
        return (1, 0) if isinstance(self.array, np.ndarray) else (2, self.array.data.device_id)

    def __dlpack__(self, stream=None):
        self.stream = stream
        return self._export(KINDS[0], lambda tensor: Managed(tensor, None, RELEASE))

    def _export(self, kind, manage):
        array = self.array
        shape, dtype = (ctypes.c_int64 * array.ndim)(*array.shape), np.dtype(array.dtype)
        tensor = Tensor(
            _address(array) - self.byte_offset, *self.__dlpack_device__(), array.ndim,
            CODES[dtype.name if dtype.name in CODES else dtype.kind], 8 * dtype.itemsize, self.lanes, shape, None,
            self.byte_offset,
        )  # fmt: skip
        managed = manage(tensor)
        _exported[ctypes.addressof(managed)] = (managed, shape), array, self
        return new_capsule(ctypes.addressof(managed), kind, ctypes.cast(_destroy_function, ctypes.c_void_p).value)


class InDeviceMemory:
    """An array with only the CUDA array interface. A separate type, as cumla caches types of arrays."""

    def __init__(self, **fields):
        self.__cuda_array_interface__ = fields


class ForeignVersioned(Foreign):
    """An array of a later version of the library, with DLPack 1.x."""

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.stream = stream
        return self._export(KINDS[1], lambda tensor: ManagedVersioned(1, 0, None, RELEASE, 0, tensor))


class Described(Foreign):
    """An array of host memory whose capsule has the given fields, correct or not.

    Attributes:
        device: reported by the array itself
        version: None: a capsule of DLPack 0
        fields: of DLTensor; shape and strides are sequences of integers, or None for a null pointer
    """

    def __init__(self, array, device=(1, 0), version=(1, 0), flags=0, **fields):
        super().__init__(array)
        self.device, self.version, self.flags = device, version, flags
        self.exported = 0
        for name in fields.keys() & {"shape", "strides"}:
            given = fields[name]
            fields[name] = None if given is None else (ctypes.c_int64 * max(1, len(given)))(*given)
        self.fields = fields

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.exported += 1
        return self._export(KINDS[self.version is not None], self._managed)

    def _managed(self, tensor):
        for name, value in self.fields.items():
            setattr(tensor, name, value)
        if self.version is None:
            return Managed(tensor, None, RELEASE)
        return ManagedVersioned(*self.version, None, RELEASE, self.flags, tensor)
