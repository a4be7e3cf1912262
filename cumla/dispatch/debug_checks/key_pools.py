"""Checks of `cumla.debug` for kernels of pooled index keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from .latents import check_rings
from .values import check_slots, host


def indexer_kpool_and_insert(arguments: Any) -> None:
    slots, positions, pool = host(arguments.slots), host(arguments.positions), len(arguments.ape)
    check_slots("slot_mapping", arguments.slots, arguments.pages.num_slots, arguments.positions)
    wrong = (slots >= 0) & ((positions[: len(slots)] + 1) % pool != 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"slot_mapping: row {row} (position {positions[row]}) has slot {slots[row]}, expected -1 where a token "
            f"completes no pool of {pool}"
        )
    check_rings(
        "state_slot_mapping", arguments.state_slots, arguments.state, arguments.positions, arguments.query_start_loc
    )
