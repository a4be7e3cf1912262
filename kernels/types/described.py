"""Arrays of a device that need not be here: shapes, strides and addresses, from which launchers choose kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from .plan import Workspace


class Address:
    """An address on a device, like CuPy's MemoryPointer."""

    __slots__ = ("device_id", "ptr")

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __add__(self, offset: int) -> Address:
        return Address(self.ptr + offset, self.device_id)


class DescribedArray:
    """An array without contents, with the part of CuPy's interface that launchers use.

    Args:
        shape: sizes
        dtype: NumPy's dtype, or its name
        data: the address of the first element. Nothing needs to be there
        strides: in bytes; None: row-major
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, data: Address, strides: tuple[int, ...] | None = None):
        dtype = np.dtype(dtype)
        self.data = data
        # NumPy computes shapes and strides of views; it never reads what is at the address.
        interface = {
            "version": 3, "shape": tuple(shape), "typestr": f"|V{dtype.itemsize}", "data": (data.ptr, False),
            "strides": strides,
        }  # fmt: skip
        self._view = np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)

    @classmethod
    def of(cls, array: np.ndarray, device: int) -> DescribedArray:
        """The description of an array that stands for one on CUDA device `device`."""
        return cls(array.shape, array.dtype, Address(array.ctypes.data, device), array.strides)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.data.device_id)

    def __len__(self) -> int:
        return len(self._view)

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "strides", "dtype", "ndim", "size", "nbytes", "itemsize"):
            raise AttributeError(f"{name}: a description of an array has no such attribute")
        return getattr(self._view, name)

    def __getitem__(self, key: Any) -> DescribedArray:
        return self.of(self._view[key], self.data.device_id)

    def reshape(self, *shape: Any) -> DescribedArray:
        return self.of(self._view.reshape(*shape, copy=False), self.data.device_id)


class DescribedWorkspace(Workspace):
    """The memory of calls whose launches are only described: arrays that exist, and are zero where kernels need it."""

    def _allocated(self, size: int, dtype: np.dtype[Any], like: Any, current: Any) -> Any:
        memory = np.empty(size, dtype)  # gives an address; the pages are never touched
        self._kept = [*getattr(self, "_kept", ()), memory]
        return DescribedArray.of(memory, like.data.device_id)

    def array(self, name: str, size: int, dtype: Any, like: Any, clear: Any = None) -> Any:
        return super().array(name, size, dtype, like)
