"""The type of array arguments."""

from __future__ import annotations

from typing import Any, Protocol


class Array(Protocol):
    """An array of any framework that speaks DLPack, for type checkers: NumPy, CuPy, JAX, torch and others.

    Shapes and dtypes are checked by each call. Results are arrays of the first argument's framework; their type is Any.
    An array with `__cuda_array_interface__` alone is accepted by calls, but not by type checkers.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
