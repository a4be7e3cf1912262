"""A prefix cache over all page groups, preemption by swap to host memory, and requests that another process packed, for
the server of serving.py.

    python examples/deepseek_v4.py --prefix-cache --host-pages 64

A model has a `description` (cumla.pages.describe) and the `caches` of its layers. Pages of the server are numbered by
pool; latent rows and windows of draft layers are in the pool "window" of the examples' models.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cumla import pages

POOLS = {"rows": "window", "draft_window": "window"}  # by group; the others have pools of their own


@dataclass
class Prefix:
    """The pages of a computed prefix.

    Attributes:
        tokens: the prefix
        pages: by pool and column
        kept: by group, intervals of positions whose rows the pages have
    """

    tokens: list[int]
    pages: dict[str, dict[int, int]]
    kept: dict[str, list[tuple[int, int]]]


class PageCache:
    """Prefixes whose pages are kept, and requests that are swapped out.

    Args:
        free: the server's Pages
        host_pages: pages of each group in host memory; 0: preempted requests start again
        most: prefixes that are kept, those used last

    Attributes:
        hits: by request, the tokens that were not computed
        swapped: number of requests that were swapped out
    """

    def __init__(self, model: Any, free: Any, host_pages: int = 0, most: int = 8) -> None:
        self.description, self.free, self.most, self.xp = model.description, free, most, model.xp
        self.device = pages.pools_of(model.description, model.caches)
        self.prefixes: list[Prefix] = []
        self.hits: dict[int, int] = {}
        self.swapped = 0
        if host_pages:
            counts = {group.name: host_pages for group in self.description}
            memory = pages.host_pool(pages.Pools.bytes_of(self.description, counts))
            self.host, self.host_free = pages.Pools.allocate(self.description, counts, memory), pages.FreePages(counts)
        else:
            self.host = None

    def keep(self, request: Any) -> None:
        """Keep what a hit of the request's computed tokens needs. Rings go on changing, so theirs are copied."""
        tokens = request.tokens[: request.computed]
        if any(prefix.tokens == tokens for prefix in self.prefixes):
            return
        prefix, copied = Prefix(tokens, {}, {}), {}
        for part in self.description.needs(len(tokens)).parts:
            pool = POOLS.get(part.group, part.group)
            prefix.kept[part.group] = [(part.first, part.end)]
            for column in part.pages:
                page = request.pages[pool][column]
                if self.description.group(part.group).lifetime == "ring":
                    own = self.free.take(pool)
                    if own is None:
                        del prefix.kept[part.group]
                        continue
                    copied[part.group], page = [(page, own)], own
                elif column not in prefix.pages.get(pool, {}):
                    self.free.share(pool, page)
                prefix.pages.setdefault(pool, {})[column] = page
        pages.copy_pages(self.device, self.device, copied)
        self.prefixes.append(prefix)
        if len(self.prefixes) > self.most:
            self.evict()

    def evict(self) -> bool:
        """Free the pages of the prefix that was used least recently. Returns whether there was one."""
        if not self.prefixes:
            return False
        for pool, columns in self.prefixes.pop(0).pages.items():
            for page in columns.values():
                self.free.give_back(pool, page)
        return True

    def admit(self, request: Any) -> bool:
        """Give a waiting request its own pages, or those of a prefix. False: it waits for free pages."""
        if request.swapped:
            return self.swap_in(request)
        if request.packed is not None:
            return self.unpack(request)
        if not request.computed and not request.pages:
            self.reuse(request)
        return True

    def reuse(self, request: Any) -> None:
        """Begin a request with the longest hit. Pages that it writes into are copied, the others are shared."""
        best, source = 0, None
        for prefix in self.prefixes:
            common = 0
            for ours, theirs in zip(request.tokens, prefix.tokens, strict=False):
                if ours != theirs:
                    break
                common += 1
            found = self.description.hit(min(common + 1, len(request.tokens)), prefix.kept).tokens
            if found > best:
                best, source = found, prefix
        if source is None:
            return
        needs, copied, given = self.description.needs(best), {}, {}
        for part in needs.parts:
            pool = POOLS.get(part.group, part.group)
            is_ring = self.description.group(part.group).lifetime == "ring"
            for column in part.pages:
                page = source.pages[pool][column]
                if is_ring or column == part.written:
                    own = given.get(pool, {}).get(column)
                    own = self.free.take(pool) if own is None else own
                    if own is None:  # too few pages: the request is computed from its beginning
                        self._give_back(given)
                        return
                    copied.setdefault(part.group, []).append((page, own))
                    page = own
                elif column not in given.get(pool, {}):
                    self.free.share(pool, page)
                given.setdefault(pool, {})[column] = page
        pages.copy_pages(self.device, self.device, copied)
        self._begin(request, given, best)
        self.hits[request.number] = best
        self.prefixes.sort(key=lambda prefix: prefix is source)  # the last to be evicted

    def swap_out(self, request: Any) -> bool:
        """Copy what the request needs to the host, before its pages are freed. False: the host has too few pages."""
        if self.host is None or not request.computed:
            return False
        parts = self.description.needs(request.computed).parts
        taken = self.host_free.take({part.group: len(part.pages) for part in parts})
        if taken is None:
            return False
        pairs = {}
        for part in parts:
            its = request.pages[POOLS.get(part.group, part.group)]
            pairs[part.group] = [
                (its[column], page) for column, page in zip(part.pages, taken[part.group], strict=True)
            ]
        pages.swap_out(self.device, self.host, pairs)
        request.swapped = taken
        self.swapped += 1
        return True

    def swap_in(self, request: Any) -> bool:
        """Copy a request back into free pages; False, and nothing is done, if there are too few."""
        given = self.take(request.computed)
        if given is None:
            return False
        pairs = {}
        for part in self.description.needs(request.computed).parts:
            own = (given[POOLS.get(part.group, part.group)][column] for column in part.pages)
            pairs[part.group] = list(zip(request.swapped[part.group], own, strict=True))
        pages.swap_in(self.host, self.device, pairs)
        self.drop(request)
        self._begin(request, given, request.computed)
        return True

    def unpack(self, request: Any) -> bool:
        """Copy a request that another process packed into free pages; False, and nothing is done, if there are too few.

        Raises ValueError, before anything is written, for bytes or a header of something else.
        """
        header, array = request.packed
        header = pages.verify(header, array)
        given = self.take(header["tokens"])
        if given is None:
            return False
        self._begin(request, given, header["tokens"])
        pages.unpack(header, self.xp.asarray(array), self.device, self.tables(request))
        request.packed = None
        return True

    def take(self, tokens: int) -> dict[str, dict[int, int]] | None:
        """Free pages for what a request of so many tokens needs, by pool and column; None if there are too few."""
        given: dict[str, dict[int, int]] = {}
        for part in self.description.needs(tokens).parts:
            pool = POOLS.get(part.group, part.group)
            for column in part.pages:
                own = given.get(pool, {}).get(column)
                while own is None:
                    own = self.free.take(pool)
                    if own is None and not self.evict():
                        self._give_back(given)
                        return None
                given.setdefault(pool, {})[column] = own
        return given

    def tables(self, request: Any) -> dict[str, np.ndarray]:
        """The request's pages by group, as `pack` and `unpack` take them."""
        return {
            group.name: np.array(request.pages.get(POOLS.get(group.name, group.name), []), np.int32)
            for group in self.description
        }

    def drop(self, request: Any) -> None:
        """Free the request's pages in host memory, and forget what another process packed."""
        request.packed = None
        for group, its in request.swapped.items():
            for page in its:
                self.host_free.give_back(group, page)
        request.swapped = {}

    def _begin(self, request: Any, given: dict[str, dict[int, int]], computed: int) -> None:
        """A request with these pages by pool and column; other columns have none."""
        request.computed = computed
        for pool, columns in given.items():
            request.pages[pool] = [columns.get(column, -1) for column in range(max(columns) + 1)]

    def _give_back(self, given: dict[str, dict[int, int]]) -> None:
        for pool, columns in given.items():
            for page in columns.values():
                self.free.give_back(pool, page)
