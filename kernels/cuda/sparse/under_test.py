"""The small case of a self-test runs the programs that were compiled for the call, not programs for its own size."""

from __future__ import annotations

from ...check_results import macros_under_test
from .division import Division

DECODE, EXACT, PLAN = "sm90/decode/decode.cu", "common/sparse/exact.cu", "common/sparse/plan.cu"
PORTABLE = ("sm80/sparse/attention.cu", "sm80/sparse/heads64.cu")
HIGHEST = 64  # heads of a tile of a program without the macro


def tile_heads() -> int | None:
    """Heads of a tile of the tested programs of a decode; None outside a self-test."""
    for file in (DECODE, EXACT, *PORTABLE):
        macros = macros_under_test(file)
        if macros is not None:
            return int(macros.get("TILE_HEADS", HIGHEST))
    return None


def division(tiles: int, blocks: int, max_ranges: int) -> Division | None:
    """A division of tiles of up to `blocks` blocks that needs the tested programs; None outside a self-test."""
    decode, exact, plan = (macros_under_test(file) for file in (DECODE, EXACT, PLAN))
    parts = 1 if decode is None else int(decode["PARTS"])
    if parts > 1:
        return Division(tiles * parts, False, False, parts, cluster=True)
    if plan is not None:
        return Division(min(max_ranges, tiles * blocks), True, True)
    if exact is not None and exact["COMBINES"]:
        return Division(2 * tiles, False, True, 2)
    return None if decode is None and exact is None else Division(min(max_ranges, tiles), False, False)
