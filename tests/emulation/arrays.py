"""Arrays in the memory of an emulated device: host memory with CuPy's interface; NumPy computes.

They are not NumPy arrays, which cumla would treat as host memory. As on a device, memory past an allocation
cannot be accessed.
"""

import ctypes
import mmap

import numpy as np

from . import queues
from .queues import Device

PAGE = mmap.PAGESIZE
GUARD = 16 << 20  # bytes on both sides of an allocation; wrong indices rarely skip more
ALIGNMENT = 256  # alignment of allocations, as CuPy's
MAP_NORESERVE = 0x4000  # a constant of Linux; Python has no name for it before 3.13
LIBC = ctypes.CDLL(None)
VIEWS = ("reshape", "view", "transpose", "swapaxes")  # methods that read no value, if they do not copy


class Memory:
    """An allocation that ends at a page boundary; the surrounding pages are inaccessible."""

    def __init__(self, size, device_id):
        queues.refuse_in_capture("memory is allocated")
        inside = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        pages = -(-inside // PAGE) * PAGE
        self._map = mmap.mmap(-1, pages + 2 * GUARD, MAP_NORESERVE | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (start, start + GUARD + pages):
            if LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(GUARD), 0):
                raise MemoryError("no pages for an emulated device's memory")
        self.ptr, self.size, self.device_id = start + GUARD + pages - inside, size, device_id

    def __del__(self):
        if queues is None:  # the interpreter is shutting down
            return
        if queues.is_anything_queued():  # CuPy's pool reuses it for later work on the same stream
            queues.kept.append(self._map)


class UnownedMemory:
    """Memory that `owner` owns."""

    def __init__(self, ptr, size, owner, device_id=0):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def memset_async(self, value, size):
        queues.current_stream().add(lambda: ctypes.memset(self.ptr, value, size))


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """cupy.ndarray. NumPy does what the class does not define."""

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        if memptr is None:
            memptr = MemoryPointer(Memory(dtype.itemsize * int(np.prod(shape, dtype=np.int64)), Device.current), 0)
        memory = memptr.mem
        room = (ctypes.c_uint8 * memory.size).from_address(memory.ptr)
        self.data, self._view = memptr, np.ndarray(shape, dtype, room, memptr.ptr - memory.ptr, strides)

    @property
    def _host(self):
        """The contents once all work on the current stream is done."""
        queues.current_stream().synchronize()
        return self._view

    @classmethod
    def of(cls, host, memory=None):
        """A NumPy array in device memory: a copy, or a view if its memory already is device memory."""
        if memory is None:
            array = cls(host.shape, host.dtype)
            array._view[...] = host
            return array
        array = cls.__new__(cls)
        array.data, array._view = MemoryPointer(memory, host.ctypes.data - memory.ptr), host
        return array

    @property
    def device(self):
        return Device(self.data.device_id)

    def get(self, stream=None):
        (stream or queues.current_stream()).synchronize()
        return self._view.copy("K")

    def set(self, array):
        self._assign(..., array.copy())

    def fill(self, value):
        self._assign(..., value)

    def __getitem__(self, key):
        parts = key if isinstance(key, tuple) else (key,)
        is_view = all(x is None or x is ... or isinstance(x, int | slice) for x in parts)
        return self._given((self._view if is_view else self._host)[own(key)])

    def __setitem__(self, key, value):
        refuse_host(value)
        self._assign(own(key), value)

    def _assign(self, key, value):
        value = value._view if isinstance(value, Array) else value

        def work():
            self._view[key] = value

        queues.current_stream().add(work)

    def __len__(self):
        return len(self._view)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __int__(self):
        return int(self._host)

    def __float__(self):
        return float(self._host)

    def __bool__(self):
        return bool(self._host)

    def __array__(self, *arguments, **keywords):
        raise TypeError("an array on a device does not become one on the host without get()")

    def __array_ufunc__(self, function, method, *arguments, **keywords):
        for argument in arguments:
            refuse_host(argument)
        return self._given(getattr(function, method)(*own(arguments), **own(keywords)))

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._view, name)
        if not callable(value):
            return self._given(value)
        if name not in VIEWS:
            queues.current_stream().synchronize()
        return lambda *arguments, **keywords: self._given(value(*own(arguments), **own(keywords)))

    def _given(self, result):
        """A NumPy result as a CuPy array: in this array's memory if it is a view of it."""
        if not isinstance(result, np.ndarray | np.generic):
            return result
        result = np.asarray(result)
        with self.device:
            return Array.of(result, self.data.mem if np.may_share_memory(result, self._view) else None)


def own(value, finished=True):
    """Arguments with NumPy arrays for our own, after the current stream's work if finished."""
    if isinstance(value, Array):
        return value._host if finished else value._view
    if isinstance(value, tuple | list):
        return type(value)(own(item, finished) for item in value)
    return {name: own(item, finished) for name, item in value.items()} if isinstance(value, dict) else value


def refuse_host(value):
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("an array on the host and one on a device do not go together")
