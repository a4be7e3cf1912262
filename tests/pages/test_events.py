"""Random sequences of what happens to a request: steps, rejected drafts, preemption by swap, prefix hits, transfers to
other pools, other requests. Its outputs have the bits of the same steps with nothing between them."""

import functools
import json

import numpy as np
import pytest

from cumla import pages
from support.page_groups import MovingFamily, MovingLayer, MovingStack

CASES = {  # by name: the model's caches, given seed, cache format and whether it is the second model
    "C128A": lambda seed, cache_format, second: MovingLayer(3, cache_format, seed),
    "C4A": lambda seed, cache_format, second: MovingLayer(6, cache_format, seed),
    "V3.2": lambda seed, cache_format, second: MovingLayer(12, cache_format, seed),
    "V4.1": lambda seed, cache_format, second: MovingStack(0, cache_format, seed, ((32, 64), (48, 96))[second]),
    "GLM-5.2": lambda seed, cache_format, second: MovingFamily(0, cache_format, seed),
    "GLM-5.3-Flash": lambda seed, cache_format, second: MovingFamily(3, cache_format, seed),
    "Mistral Large 4": lambda seed, cache_format, second: MovingFamily(6, cache_format, seed),
    "Hy4": lambda seed, cache_format, second: MovingFamily(8, cache_format, seed),
}
MOVES = "swap", "hit", "transfer", "other"
MOST_NEW = 4  # tokens of a step: one, and drafts
HOST_PAGES = 40


@functools.cache
def model_of(case, cache_format, second):
    return CASES[case](second, cache_format, second)


def plan(rng, count, longest, description):
    """Events [(kind, tokens computed before, ...)]; a request begins again before it is longer than `longest`."""
    events, tokens, moved = [], 0, 0
    rings = any(not group.tokens for group in description)
    while len(events) < count:
        if not tokens or tokens > longest - MOST_NEW:
            tokens, moved = int(rng.integers(1, longest // 2)), 0
            events.append(("step", 0, tokens, tokens))
        new, kind = int(rng.integers(1, MOST_NEW + 1)), str(rng.choice(["step", "draft", *MOVES]))
        if kind in MOVES:
            if kind == "hit" and not rings:  # a ring has the newest tokens' rows alone
                first = {part.group: part.first for part in description.needs(max(moved, 1)).parts}
                kept = {name: [(start if moved else 0, tokens)] for name, start in first.items()}
                hit = description.hit(tokens + 1 - int(rng.integers(min(40, tokens))), kept)
                tokens = hit.tokens if hit.tokens else tokens
            moved = moved if kind == "other" else tokens  # moves leave other pages behind
            events.append((kind, tokens))
            continue
        accepted = new if kind == "step" else int(rng.integers(1, new + 1))
        events.append((kind, tokens, new, accepted))
        tokens += accepted
    return events


class Run:
    """One request, in either of two models and of two places in its caches.

    Attributes:
        moved: whether moves happen and rejected drafts have other hidden states
    """

    def __init__(self, case, cache_format, moved):
        self.models = [model_of(case, cache_format, second) for second in range(2)]
        self.here, self.place, self.moved = 0, 0, moved
        for model in self.models:
            model.poison(-1)

    @property
    def model(self):
        return self.models[self.here]

    def outputs(self, events):
        found = []
        for kind, tokens, *numbers in events:
            if kind in MOVES:
                if self.moved:
                    getattr(self, kind)(tokens)
            else:
                found.append(self.step(tokens, *numbers))
        return found

    def step(self, tokens, new, accepted):
        with self.other_hidden(tokens + accepted, tokens + new):
            return self.model.step(self.place, tokens, new)[..., :accepted, :].copy()

    def other_hidden(self, first, end):
        return Changed(self.model.hidden(self.place), first, end if self.moved else first)

    def columns(self, tokens):
        """By group, the columns that n tokens need."""
        return {part.group: list(part.pages) for part in self.model.description.needs(tokens).parts}

    def pages(self, place, tokens):
        return {name: self.model.table(name, place)[its] for name, its in self.columns(tokens).items()}

    def swap(self, tokens):
        """Its pages are overwritten by others; it comes back elsewhere."""
        model = self.model
        counts = {group.name: HOST_PAGES for group in model.description}
        memory = pages.host_pool(pages.Pools.bytes_of(model.description, counts), pinned=False)
        device, host = model.pools(), pages.Pools.allocate(model.description, counts, memory)
        out = {name: [[p, i] for i, p in enumerate(its)] for name, its in self.pages(self.place, tokens).items()}
        pages.swap_out(device, host, out)
        model.poison(tokens)
        self.place = 1 - self.place
        back = {name: [[i, p] for i, p in enumerate(its)] for name, its in self.pages(self.place, tokens).items()}
        pages.swap_in(host, device, back)

    def hit(self, tokens):
        """Another request has its first n tokens, and goes on; the first one's pages are used again."""
        there, pools = 1 - self.place, self.model.pools()
        pairs = {
            name: list(zip(its, self.pages(there, tokens)[name], strict=True))
            for name, its in self.pages(self.place, tokens).items()
        }
        pages.copy_pages(pools, pools, pairs)
        self.place = there
        self.other(tokens)

    def transfer(self, tokens):
        source, target = self.model, self.models[1 - self.here]
        header, array = pages.pack(source.pools(), source.of_request(self.place), tokens)
        sealed = json.dumps(pages.verify(header, array))
        target.poison(tokens)
        self.here, self.place = 1 - self.here, tokens % 2
        assert pages.unpack(sealed, array, target.pools(), target.of_request(self.place)) == tokens

    def other(self, tokens):
        """A request with other hidden states in the other place."""
        hidden = self.model.hidden(1 - self.place)
        with Changed(hidden, 0, hidden.shape[-2]):
            self.model.step(1 - self.place, 0, tokens)


class Changed:
    """Other hidden states of positions `first` to `end` - 1 within the context."""

    def __init__(self, hidden, first, end):
        self.part = hidden[..., first:end, :]

    def __enter__(self):
        self.before = self.part.copy()
        self.part += 1

    def __exit__(self, *error):
        self.part[...] = self.before


def check(case, cache_format, rng, count):
    model = model_of(case, cache_format, 0)
    events = plan(rng, count, model.tokens, model.description)
    want = Run(case, cache_format, moved=False).outputs(events)
    got = Run(case, cache_format, moved=True).outputs(events)
    steps = [event for event in events if event[0] not in MOVES]
    for event, ours, theirs in zip(steps, got, want, strict=True):
        assert np.isfinite(ours).all(), event
        assert ours.tobytes() == theirs.tobytes(), (event, events)


@pytest.mark.parametrize("case", CASES)
def test_a_request_goes_on_bit_for_bit(case, rng):
    check(case, "float32", rng, 12)


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["float32", "fp8", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("turn", range(2))
def test_long_sequences_of_events(case, cache_format, turn, rng):
    check(case, cache_format, rng, 80)
