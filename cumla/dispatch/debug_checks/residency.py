"""Checks of `cumla.debug` for kernels of resident rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import check_packed, host, last_positions


def resolve_resident(arguments: Any) -> None:
    lanes, selected = host(arguments.lanes), host(arguments.topk_indices)
    starts, _, _ = last_positions(arguments.query_start_loc, arguments.seq_lens, len(selected))
    rows, hot = arguments.slot_of_row.shape[1], arguments.row_of_slot.shape[1]
    _check_lanes(lanes, len(arguments.clock))
    for r, lane in enumerate(lanes.tolist()):
        mine = selected[starts[r] : starts[r + 1]]
        count = len(np.unique(mine[(mine >= 0) & (mine < rows)]))
        if lane >= 0 and count > hot:
            raise ValueError(f"topk_indices: request {r} selects {count} rows, expected at most {hot}, a lane's slots")


def fetch_resident(arguments: Any) -> None:
    misses, slots, table = host(arguments.misses), host(arguments.slots), host(arguments.block_table)
    source, target = arguments.source, arguments.target
    starts = check_packed("query_start_loc", arguments.query_start_loc, len(misses), "tokens")
    for t, j in np.argwhere(misses >= 0).tolist():
        r = int(np.searchsorted(starts, t, side="right")) - 1
        if not 0 <= r < len(table):
            continue  # padding
        row, slot = int(misses[t, j]), int(slots[t, j])
        if not 0 <= slot < target.num_slots:
            raise ValueError(f"slots: token {t} has slot {slot} for row {row}, expected 0 to {target.num_slots - 1}")
        column = row // source.block_size
        page = table[r, column] if column < table.shape[1] else -1
        if not 0 <= page < len(source.bytes):
            raise ValueError(
                f"block_table: request {r} has page {page} for row {row}, expected 0 to {len(source.bytes) - 1}"
            )


fetch_resident_across = fetch_resident


def _check_lanes(lanes: np.ndarray, num_lanes: int) -> None:
    used = lanes[lanes >= 0]
    if (lanes < -1).any() or (lanes >= num_lanes).any():
        r = int(np.argmax((lanes < -1) | (lanes >= num_lanes)))
        raise ValueError(f"lanes: request {r} has lane {lanes[r]}, expected -1 or 0 to {num_lanes - 1}")
    if len(np.unique(used)) < len(used):
        raise ValueError(f"lanes: got {lanes.tolist()}, expected lanes that differ")
