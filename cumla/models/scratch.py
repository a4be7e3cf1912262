"""Temporary memory that the layers of a model share from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import streams
from ..kernels.types.plan import Workspace


class Scratch(Workspace):
    """The workspace of layers that run one after another, on one stream, and a second stream."""

    def __init__(self) -> None:
        super().__init__(owner="scratch")
        self._side: streams.Side | None = None

    def side(self, like: Any) -> streams.InOrder:
        """A second stream in addition to the layers' own, on the device of `like`; the same one in every step.

        On the host, and in a capture before which no step ran outside a capture, work runs in order instead.
        """
        if isinstance(like, np.ndarray):
            return streams.InOrder()
        if self._side is None:
            if streams.is_capturing():
                return streams.InOrder()
            self._side = streams.Side()
        return self._side
