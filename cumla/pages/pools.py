"""The arrays of all groups of a model, and free pages of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_integers, check_kind
from ..ops.blocks import page_bytes
from .description import Description, Group, PagedCache
from .host import ALIGNMENT, HostPool


class Pool(NamedTuple):
    """One array of a group.

    Attributes:
        group, cache: what it holds
        layer: the layer that owns it
        array: uint8 [pages, bytes of a page]; pages may be any distance apart
    """

    group: Group
    cache: PagedCache
    layer: int
    array: Any


@dataclass(frozen=True)
class Pools:
    """The pages of a model, on a device or on the host: `pools_of` and `Pools.allocate` return one.

    Attributes:
        description: of the model
        pools: the arrays, in the description's order: groups, caches, layers
        num_pages: by group, pages that all of its arrays have
    """

    description: Description
    pools: tuple[Pool, ...]
    num_pages: Mapping[str, int]

    @classmethod
    def allocate(cls, description: Description, num_pages: Mapping[str, int], memory: HostPool | Any = np) -> Pools:
        """Zeroed pages, without padding between them.

        Args:
            num_pages: by group, at least 1; of rings the number of rings
            memory: `HostPool`, whose next bytes are taken, or numpy or cupy

        Raises ValueError, and takes no memory, if the host pool has too little left.
        """
        check_kind(Description, description=description)
        _check_groups("num_pages", num_pages, description)
        counts = {name: int(count) for name, count in num_pages.items()}
        check_integers(1, **{f"num_pages[{name!r}]": count for name, count in num_pages.items()})
        places, size = [], 0
        for group, cache, layer in _arrays(description):
            places.append((group, cache, layer, size))
            size += -(-counts[group.name] * cache.page_bytes // ALIGNMENT) * ALIGNMENT
        whole = memory.take(size) if isinstance(memory, HostPool) else memory.zeros(size, np.uint8)
        pools = []
        for group, cache, layer, start in places:
            count = counts[group.name]
            array = whole[start : start + count * cache.page_bytes].reshape(count, cache.page_bytes)
            pools.append(Pool(group, cache, layer, array))
        return cls(description, tuple(pools), counts)

    @classmethod
    def bytes_of(cls, description: Description, num_pages: Mapping[str, int]) -> int:
        """Bytes that `allocate` takes of an empty host pool."""
        _check_groups("num_pages", num_pages, description)
        return sum(
            -(-int(num_pages[group.name]) * cache.page_bytes // ALIGNMENT) * ALIGNMENT
            for group, cache, _ in _arrays(description)
        )

    @property
    def arrays(self) -> list[Any]:
        """The arrays in order."""
        return [pool.array for pool in self.pools]


def pools_of(description: Description, caches: Sequence[Any]) -> Pools:
    """The pages of the caches that a model's layers have.

    Args:
        description: of the model, with the sizes of these caches' pages
        caches: of each layer in order, draft layers last, LayerCaches; arrays of NumPy, CuPy or torch

    Raises TypeError or ValueError for caches that differ from the description.
    """
    check_kind(Description, description=description)
    count = description.layers + description.drafts
    if not isinstance(caches, Sequence) or len(caches) != count:
        got = len(caches) if isinstance(caches, Sequence) else type(caches).__name__
        raise ValueError(f"caches: got {got}, expected a list of the caches of {count} layers")
    pools, num_pages = [], dict[str, int]()
    for group, cache, layer in _arrays(description):
        name = f"caches[{layer}].{cache.cache}"
        value = getattr(caches[layer], cache.cache, None)
        if value is None:
            raise ValueError(f"{name}: got None, expected pages of {cache.page_bytes} bytes for group {group.name}")
        array = dlpack.borrow(value, name, writable=True)
        pages = page_bytes(name, array[:, None] if array.ndim == 1 else array)
        if pages.shape[1] != cache.page_bytes:
            raise ValueError(
                f"{name}: got pages of {pages.shape[1]} bytes, expected {cache.page_bytes}: {cache.rows} rows of "
                f"{cache.layout}"
            )
        pools.append(Pool(group, cache, layer, pages))
        num_pages[group.name] = min(num_pages.get(group.name, len(pages)), len(pages))
    return Pools(description, tuple(pools), num_pages)


def _arrays(description: Description) -> list[tuple[Group, PagedCache, int]]:
    return [(group, cache, layer) for group in description for cache in group.caches for layer in cache.layers]


def _check_groups(name: str, given: Mapping[str, Any], description: Description) -> None:
    check_kind(Mapping, **{name: given})
    names = [group.name for group in description]
    if set(given) != set(names):
        raise ValueError(f"{name}: got {', '.join(map(str, given))}, expected one for each of {', '.join(names)}")


class FreePages:
    """The pages of pools that no request has: of all groups or of none, a request takes what it needs.

    Args:
        num_pages: by group, such as `Pools.num_pages`
    """

    def __init__(self, num_pages: Mapping[str, int]) -> None:
        check_integers(0, **{f"num_pages[{name!r}]": count for name, count in num_pages.items()})
        self.num_pages = dict(num_pages)
        self._free = {name: list(range(int(count) - 1, -1, -1)) for name, count in num_pages.items()}
        self._users: dict[tuple[str, int], int] = {}

    def left(self, group: str) -> int:
        """Number of free pages."""
        return len(self._free[group])

    def take(self, counts: Mapping[str, int]) -> dict[str, list[int]] | None:
        """So many pages of each group, each with one user; None, and none is taken, where a group has too few."""
        check_integers(0, **{f"counts[{name!r}]": count for name, count in counts.items()})
        if any(count > len(self._free[name]) for name, count in counts.items()):
            return None
        taken = {name: [self._free[name].pop() for _ in range(count)] for name, count in counts.items()}
        self._users.update({(name, page): 1 for name, pages in taken.items() for page in pages})
        return taken

    def share(self, group: str, page: int) -> None:
        """Add a user of a page. Raises ValueError for a page that is free."""
        self._users[group, page] = self._used(group, page) + 1

    def give_back(self, group: str, page: int) -> None:
        """Remove a user of a page, which is free after its last one. Raises ValueError for a page that is free."""
        users = self._used(group, page)
        if users > 1:
            self._users[group, page] = users - 1
        else:
            del self._users[group, page]
            self._free[group].append(page)

    def _used(self, group: str, page: int) -> int:
        users = self._users.get((group, page), 0)
        if not users:
            raise ValueError(f"page: got {page} of {group}, which is free, expected a page that was taken")
        return users


def align(size: int, to: int = 16) -> int:
    """The least multiple of `to` that is not smaller."""
    return math.ceil(size / to) * to
