"""Memory that the layers of a model share from step to step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import dlpack, streams


class Scratch:
    """Arrays by name, each in the same place from step to step.

    Layers that run one after another, on one stream, share them. One that must grow leaves the smaller one alive: a
    captured CUDA graph may hold its address. Each grows at least twofold, so what is left behind is less than what is
    in use.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, np.dtype[Any]], Any] = {}
        self._outgrown: list[Any] = []
        self._sides: dict[int, streams.Side] = {}

    def side(self, like: Any) -> streams.InOrder:
        """A stream beside the one that the layers run on, on the device of `like`; the same one from step to step.

        On the host, or in a capture before any step outside of one, there is none: work is done in order.
        """
        if isinstance(like, np.ndarray):
            return streams.InOrder()
        device = int(like.data.device_id)
        if device not in self._sides:
            if streams.is_capturing():
                return streams.InOrder()
            self._sides[device] = streams.Side()
        return self._sides[device]

    def array(self, name: str, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """An array beside `like`, a NumPy or CuPy array, with whatever is in it.

        Raises ValueError if it would have to be allocated while a CUDA graph is captured.
        """
        dtype, size = np.dtype(dtype), math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.size < size:
            if not isinstance(like, np.ndarray) and streams.is_capturing():
                raise ValueError(
                    f"{name}: {dtype} {list(shape)} would have to be allocated while a CUDA graph is captured; "
                    "run a step of this size once before"
                )
            if held is not None:
                self._outgrown.append(held)
                size = max(size, 2 * held.size)
            held = self._held[name, dtype] = dlpack.empty((size,), dtype, like)
        return held[: math.prod(shape)].reshape(shape)
