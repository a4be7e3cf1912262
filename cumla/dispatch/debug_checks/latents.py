"""Checks of `cumla.debug` for kernels of the compressor of V4.1."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import check_packed, host


def compress_latents(arguments: Any) -> None:
    if arguments.state is None:
        return
    check_rings("slot_mapping", arguments.slots, arguments.state, arguments.positions, arguments.query_start_loc)


def check_rings(name: str, slots: Any, state: Any, positions: Any, query_start_loc: Any) -> None:
    """Slots of rings, the argument `name`: at their positions, and each ring for one request."""
    rings, capacity, _ = state.shape
    slots, at = host(slots), host(positions)[: len(slots)]
    wrong = (slots < -1) | (slots >= rings * capacity) | ((slots >= 0) & (slots % capacity != at % capacity))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{name}: row {row} (position {at[row]}) has slot {slots[row]}, expected -1 or 0 to "
            f"{rings * capacity - 1} with remainder {at[row] % capacity} modulo the capacity {capacity}"
        )
    starts, owner = check_packed("query_start_loc", query_start_loc, len(positions), "tokens"), dict[int, int]()
    for request in range(len(starts) - 1):
        own = slots[starts[request] : starts[request + 1]]
        for ring in np.unique(own[own >= 0] // capacity).tolist():
            other = owner.setdefault(ring, request)
            if other != request:
                raise ValueError(
                    f"{name}: requests {other} and {request} both have ring {ring}, expected rings that differ"
                )
