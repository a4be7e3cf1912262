"""The state of rows that are resident in device memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..dispatch.values import check_integers
from ..ops.indices import INT32_MAX
from ..ops.residency import MOST_HOT_ROWS


class Residency(NamedTuple):
    """Which rows of requests are in device memory; layers that share a selection share it. `resolve_resident` takes its
    arrays: `cumla.resolve_resident(topk, query_start_loc, seq_lens, lanes, *residency)`.

    Attributes:
        slot_of_row: int32 [lanes, rows], the slot of each row; -1: not in device memory
        row_of_slot: int32 [lanes, hot rows], the row of each slot; -1: none
        last_use: int32 [lanes, hot rows], the step that last used each slot; 0: none
        clock: int32 [lanes], steps of each lane
    """

    slot_of_row: Any
    row_of_slot: Any
    last_use: Any
    clock: Any

    @classmethod
    def allocate(cls, lanes: int, rows: int, hot_rows: int, xp: Any = np) -> Residency:
        """State without rows.

        Args:
            lanes: requests that have slots at a time
            rows: of the longest request
            hot_rows: slots of a lane, at least the rows that the tokens of one step of a request select. A device cache
                of lanes * hot_rows rows has them
            xp: numpy or cupy
        """
        check_integers(1, INT32_MAX, lanes=lanes, rows=rows)
        check_integers(1, min(MOST_HOT_ROWS, INT32_MAX // lanes), hot_rows=hot_rows)
        shapes = (lanes, rows), (lanes, hot_rows)
        return cls(
            xp.full(shapes[0], -1, np.int32), xp.full(shapes[1], -1, np.int32), xp.zeros(shapes[1], np.int32),
            xp.zeros(lanes, np.int32),
        )  # fmt: skip

    def clear(self, lane: int) -> None:
        """Give up the rows of a lane: for a new request, and for one whose rows in host memory were replaced."""
        check_integers(0, len(self.clock) - 1, lane=lane)
        self.slot_of_row[lane] = -1
        self.row_of_slot[lane] = -1
        self.last_use[lane] = 0
        self.clock[lane] = 0
