"""Kernels of a device that need not be here: their launches have all words that the driver would read."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from ..types.described import DescribedArray
from .launch import Kernel, Launch, record_launch


class DescribedKernel(Kernel):
    """A kernel of a described device: its launches are recorded and not made.

    Attributes:
        raw: the program's file, its kernel's name, target and macros
    """

    def __init__(self, raw: Any, packing: struct.Struct, parameters: Iterable[str]) -> None:
        self.raw, self._packing, self._parameters = raw, packing, tuple(parameters)
        self._array = DescribedArray
        self._functions, self._most_shared = {}, 0

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        overlap: bool = False,
    ) -> None:
        packed_arguments = [x.data.ptr if x.__class__ is DescribedArray else x for x in arguments]
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        record_launch(Launch(self, grid, block, shared_mem, overlap, packed_arguments))

    def handle(self, device: int) -> int:
        raise RuntimeError(f"{self.raw}: got a launch of a described kernel, expected only its description")
