"""Two ranks, each of which packs and swaps its own part: steps, rejected drafts, preemption and transfers in random
order. Outputs have the bits of the same steps with nothing between them."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from cumla import pages
from cumla.parallel import run_threads
from support.page_groups import POISON
from support.ranked import INTERLEAVE, PAGE, Ranked
from support.ranked_stack import PAGE as STACK_PAGE
from support.ranked_stack import RankStack

SECONDS = 300
MOST_NEW = 4  # tokens of a step: one, and drafts
HOST_PAGES = 60


def with_pages(description, positions):
    """The description with rank's pages of so many positions on a rank."""
    groups = []
    for group in description:
        if group.name == "rank_rows":
            caches = []
            for cache in group.caches:
                rows = positions // cache.positions
                size = rows * cache.row_bytes
                caches.append(dataclasses.replace(cache, rows=rows, page_bytes=size, stride=size))
            group = dataclasses.replace(group, tokens=2 * positions, caches=tuple(caches))
        groups.append(group)
    return dataclasses.replace(description, groups=tuple(groups))


class OfLayer:
    """A golden layer of V3.2 or V4 on a rank."""

    def __init__(self, case, comm):
        self.made, self.pages_of = Ranked(case, comm), np.random.default_rng(comm.rank)
        layers = 1 if self.made.is_v32 else None
        of = pages.describe(
            self.made.layer.config, 2, rank=comm.rank, interleave=INTERLEAVE, layers=layers, cache_format="float32"
        )
        positions = PAGE * max(self.made.ratio, 1)
        self.description = with_pages(of, positions)
        self.hidden = self.made.whole.golden.hidden

    def step(self, tokens, new):
        return self.made.sharded.step(**self.made.arguments(tokens, new))

    def caches(self):
        return [self.made.caches]

    def tables(self):
        tables = {name: table[0] for name, table in self.made.whole.paged.tables.items()}
        tables |= {"rank_rows": self.made.table[0], "rows": tables["window"]}
        return {group.name: tables[group.name] for group in self.description}


class OfStack:
    """A golden stack of V4.1 on a rank."""

    def __init__(self, case, comm):
        self.made, self.pages_of = RankStack(case, comm), np.random.default_rng(comm.rank)
        of = pages.describe(
            self.made.config, 2, rank=comm.rank, interleave=3, cache_format="float32", block_size=64,
            compressed_block_size=128, num_speculative_tokens=5,
        )  # fmt: skip
        self.description = with_pages(of, STACK_PAGE)
        self.hidden = self.made.hidden[0]

    def step(self, tokens, new):
        return self.made.step([(0, tokens, new)])[0]

    def caches(self):
        return self.made.caches

    def tables(self):
        tables = {name: table[0] for name, table in self.made.paged.tables.items()}
        tables |= {"rank_rows": self.made.table[0], "rings": np.array([0])}
        return {group.name: tables[group.name] for group in self.description}


CASES = {
    "C4A": functools.partial(OfLayer, 6), "V3.2": functools.partial(OfLayer, 12), "V4.1": functools.partial(OfStack, 0)
}  # fmt: skip


def plan(rng, count, longest):
    """Events [(kind, tokens computed before, ...)] of one request."""
    tokens = int(rng.integers(longest // 3, longest // 2))
    events = [("step", 0, tokens, tokens)]
    while len(events) < count and tokens <= longest - MOST_NEW:
        new, kind = int(rng.integers(1, MOST_NEW + 1)), str(rng.choice(["step", "draft", "swap", "transfer"]))
        if kind in ("step", "draft"):
            accepted = new if kind == "step" else int(rng.integers(1, new + 1))
            events.append((kind, tokens, new, accepted))
            tokens += accepted
        else:
            events.append((kind, tokens))
    return events


class Run:
    """One request on one rank, in either of two models."""

    def __init__(self, kind, comm, moved):
        self.models, self.here, self.moved = [kind(comm), kind(comm)], 0, moved

    @property
    def model(self):
        return self.models[self.here]

    def pools(self):
        return pages.pools_of(self.model.description, self.model.caches())

    def outputs(self, events):
        found = []
        for kind, tokens, *numbers in events:
            if numbers:
                found.append(self.step(tokens, *numbers))
            elif self.moved:
                getattr(self, kind)(tokens)
        return found

    def step(self, tokens, new, accepted):
        rejected = self.model.hidden[..., tokens + accepted : tokens + new, :]
        before = rejected.copy()
        rejected += self.moved
        out = self.model.step(tokens, new)[..., :accepted, :].copy()
        rejected[...] = before
        return out

    def poison(self):
        """Fill the caches with NaN; afterwards the request has other pages of the rank's rows."""
        for pool in self.pools().pools:
            pool.array[:] = POISON
        table = self.model.made.table
        table[:] = self.model.pages_of.permutation(table.ravel()).reshape(table.shape)

    def pages(self, tokens):
        tables = self.model.tables()
        return {part.group: tables[part.group][list(part.pages)] for part in self.model.description.needs(tokens).parts}

    def swap(self, tokens):
        of = self.model.description
        counts = {group.name: HOST_PAGES for group in of}
        memory = pages.host_pool(pages.Pools.bytes_of(of, counts), pinned=False)
        host = pages.Pools.allocate(of, counts, memory)
        out = {name: [[p, i] for i, p in enumerate(its)] for name, its in self.pages(tokens).items()}
        pages.swap_out(self.pools(), host, out)
        self.poison()
        back = {name: [[i, p] for i, p in enumerate(its)] for name, its in self.pages(tokens).items()}
        pages.swap_in(host, self.pools(), back)

    def transfer(self, tokens):
        header, array = pages.pack(self.pools(), self.model.tables(), tokens)
        sealed = json.dumps(pages.verify(header, array))
        self.here = 1 - self.here
        self.poison()
        assert header["rank"] == self.model.description.groups[0].rank
        pages.unpack(sealed, array, self.pools(), self.model.tables())


def check(case, rng, count):
    def on(comm, seed):
        want, got = (Run(CASES[case], comm, moved) for moved in (False, True))
        events = plan(np.random.default_rng(seed), count, want.model.hidden.shape[-2])
        return events, want.outputs(events), got.outputs(events)

    for events, want, got in run_threads(2, functools.partial(on, seed=int(rng.integers(1 << 30))), SECONDS):
        steps = [event for event in events if len(event) > 2]
        for event, ours, theirs in zip(steps, got, want, strict=True):
            assert np.isfinite(ours).all(), event
            assert ours.tobytes() == theirs.tobytes(), (event, events)


@pytest.mark.parametrize("case", ["C4A", "V4.1"])
def test_a_part_of_another_rank_is_refused(case):
    def on(comm):
        run = Run(CASES[case], comm, moved=True)
        run.step(0, 40, 40)
        header, array = pages.pack(run.pools(), run.model.tables(), 40)
        of, other = run.model.description, 1 - comm.rank
        theirs = dataclasses.replace(of, groups=tuple(dataclasses.replace(x, rank=other) for x in of))
        before = [pool.array.copy() for pool in run.pools().pools]
        with pytest.raises(ValueError, match=f"header: got rank {comm.rank}, expected {other}"):
            pages.unpack(header, array, pages.pools_of(theirs, run.model.caches()), run.model.tables())
        for pool, array in zip(run.pools().pools, before, strict=True):
            np.testing.assert_array_equal(pool.array, array)

    run_threads(2, on, SECONDS)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_moves_its_own_part(case, rng):
    check(case, rng, 10)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("turn", range(3))
def test_long_sequences_on_ranks(case, turn, rng):
    check(case, rng, 60)
