"""Golden layers whose caches are described as page groups: requests move from one to another by described pages."""

import numpy as np

from cumla import pages
from support.family_stack import FamilyStack
from support.models import GoldenLayer, V4Layer, V32Layer
from support.v41_stack import SPECULATIVE, Stack

POISON = 0xFF  # NaN in every format


class Moving:
    """A model's caches with their description.

    Attributes:
        description: of all its layers
    """

    def bytes_of(self, cache, layer):
        """A cache of a layer as bytes [pages, bytes of a page]."""
        array = getattr(self.caches_of(layer), cache.cache)
        return array.reshape(len(array), -1).view(np.uint8)

    def pools(self):
        """The caches as the package takes them."""
        count = self.description.layers + self.description.drafts
        return pages.pools_of(self.description, [self.caches_of(layer) for layer in range(count)])

    def of_request(self, request):
        """The request's pages by group."""
        return {group.name: self.table(group.name, request) for group in self.description}

    def tables(self, requests):
        return {group.name: np.stack([self.table(group.name, r) for r in requests]) for group in self.description}

    def pages(self):
        """(group, cache, layer, bytes) of every array."""
        for group in self.description:
            for cache in group.caches:
                for layer in cache.layers:
                    yield group, cache, layer, self.bytes_of(cache, layer)

    def poison(self, tokens):
        """Fill all caches with NaN, and rings with a step that seems to be run again at position `tokens`."""
        for _, cache, layer, array in self.pages():
            array[:] = POISON
            if cache.cache == "restart_positions":
                getattr(self.caches_of(layer), cache.cache)[:] = tokens

    def receive(self, other, source, request, tokens, without=None):
        """Copy the pages that a hit of n tokens needs, of a request of another model's caches.

        without: (group, column) of a page that is left out
        """
        needs = self.description.needs(tokens)
        for group, cache, layer, array in self.pages():
            for column in needs.part(group.name).pages:
                if (group.name, column) != without:
                    page = other.bytes_of(cache, layer)[other.table(group.name, source)[column]]
                    array[self.table(group.name, request)[column]] = page


class MovingLayer(Moving):
    """A golden layer of V3.2 or V4, for two requests."""

    def __init__(self, case, cache_format="float32", seed=0):
        self.golden = GoldenLayer(case)
        self.made = (V4Layer if self.golden.record["model"] == "v4" else V32Layer)(
            self.golden, requests=2, cache_format=cache_format, seed=seed
        )
        layers = None if isinstance(self.made, V4Layer) else 1
        self.config = self.made.layer.config
        self.description = pages.describe(self.config, layers=layers, cache_format=cache_format)
        self.tokens = self.golden.tokens

    def hidden(self, request):
        return self.golden.hidden

    def caches_of(self, layer):
        return self.made.caches

    def table(self, group, request):
        pool = "window" if group == "rows" else group
        return self.made.paged.tables[pool][request]

    def step(self, request, first, count):
        return self.made.step([(request, first, count)], given=False)[0]


class MovingStack(Moving):
    """A golden stack of V4.1, whose second request has the hidden states of the first."""

    def __init__(self, case=0, cache_format="float32", seed=0, sizes=(32, 64)):
        self.made = Stack(case, cache_format, seed=seed, pages=sizes)
        self.made.hidden[1] = self.made.hidden[0]
        self.config = self.made.config
        self.description = pages.describe(
            self.config, cache_format=cache_format, block_size=sizes[0], compressed_block_size=sizes[1],
            num_speculative_tokens=SPECULATIVE,
        )  # fmt: skip
        self.tokens = self.made.hidden[0].shape[1]

    def hidden(self, request):
        return self.made.hidden[request]

    def caches_of(self, layer):
        return self.made.caches[layer]

    def table(self, group, request):
        return np.array([request]) if group == "rings" else self.made.paged.tables[group][request]

    def step(self, request, first, count):
        return self.made.step([(request, first, count)])[0]


class MovingFamily(Moving):
    """A golden stack of GLM, Mistral Large 4 or Hy4, whose second request has the hidden states of the first."""

    def __init__(self, case=0, cache_format="float32", seed=0):
        self.made = FamilyStack(case, cache_format, seed=seed)
        assert len(self.made.hidden) > 1
        self.made.hidden[1] = self.made.hidden[0]
        self.config = self.made.config
        self.description = pages.describe(self.config, cache_format=cache_format, num_speculative_tokens=3)
        self.tokens = self.made.hidden[0].shape[1]

    def hidden(self, request):
        return self.made.hidden[request]

    def caches_of(self, layer):
        return self.made.caches.get(layer)  # None for a layer of linear attention

    def table(self, group, request):
        return np.array([request]) if group == "rings" else self.made.paged.tables["window"][request]

    def step(self, request, first, count):
        return self.made.step([(request, first, count)])[0]
