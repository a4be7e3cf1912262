"""Relocates recorded launches to other arrays: finds the array of each address, and the offset in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..arrays.memory import Extent
from ..kernels.cuda.launch import Launch


class Relocation(NamedTuple):
    """Attributes:
    launches: each launch, and for its addresses (argument of the kernel, array, offset from the array's address)
    together: (array, other, distance): if an address is within several arrays, the one that the kernel means is
        unknown, so their addresses must have the same distances again
    """

    launches: list[tuple[Launch, list[tuple[int, int, int]]]]
    together: set[tuple[int, int, int]]


def relocate(launches: Sequence[Launch], extents: Sequence[Extent]) -> Relocation | None:
    """Launches relative to the arrays with these extents; None if an address belongs to none of them."""
    found, together = [], set()
    for launch in launches:
        places = []
        for argument in launch.kernel.addresses:
            address = launch.packed_arguments[argument]
            if not address:
                continue
            owners = [i for i, extent in enumerate(extents) if extent.contains(address)]
            if not owners:
                return None
            start = extents[owners[0]].address
            places.append((argument, owners[0], address - start))
            together |= {(owners[0], other, extents[other].address - start) for other in owners[1:]}
        found.append((launch, places))
    return Relocation(found, together)
