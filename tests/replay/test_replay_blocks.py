"""The block pool and the scheduler: no block is lost or owned twice, and no request is stuck."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumla.replay.blocks import BLOCK_TOKENS, BLOCKS_PER_HASH, BlockPool
from cumla.replay.scheduler import Scheduler
from cumla.replay.trace import HASH_TOKENS, TraceRequest


def check_pool(pool, held):
    """held: block lists of the live requests."""
    counts = Counter(block for blocks in held for block in blocks)
    assert pool.holders == [counts[block] for block in range(pool.num_blocks)]
    free, idle = list(pool._free), [block for prefix in pool._idle for block in pool._shared[prefix]]
    everything = Counter(free) + Counter(idle) + Counter(set(counts))
    assert everything == Counter(range(pool.num_blocks)), "a block is nowhere, or in two places"
    assert pool.num_used == len(counts)
    assert pool.num_idle == len(idle)


class Contents:
    """Takes the part of Offload: what blocks contain. It has room for three prefixes."""

    def __init__(self):
        self.of_block, self.stored = {}, {}

    def __contains__(self, prefix):
        return prefix in self.stored

    def store(self, prefixes, pinned):
        for prefix, blocks in prefixes:
            self.stored[prefix] = [self.of_block.get(block) for block in blocks]
        for prefix in [prefix for prefix in self.stored if prefix not in pinned][:-3]:
            del self.stored[prefix]

    def restore(self, prefixes):
        for prefix, blocks in prefixes:
            self.of_block.update(zip(blocks, self.stored.pop(prefix), strict=True))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pool_invariants(data):
    contents = Contents()
    pool, live = BlockPool(data.draw(st.integers(2, 14)), data.draw(st.sampled_from([None, contents]))), []
    for _ in range(data.draw(st.integers(1, 30))):
        if live and data.draw(st.booleans()):
            _, blocks = live.pop(data.draw(st.integers(0, len(live) - 1)))
            pool.release(blocks)
        else:
            # Prefixes of a few families: 0, then 0 or 1 at each later place.
            prefixes = [(i, data.draw(st.integers(0, 1)) if i else 0) for i in range(data.draw(st.integers(0, 4)))]
            shared = pool.find(prefixes)
            own = data.draw(st.integers(0, 3)) + (len(prefixes) - len(shared)) * BLOCKS_PER_HASH
            room = pool.num_blocks - pool.num_used - sum(BLOCKS_PER_HASH for prefix in shared if prefix in pool._idle)
            swapped = sum(BLOCKS_PER_HASH for prefix in shared if prefix not in pool._shared)
            blocks = pool.acquire(shared, own)
            assert (blocks is None) == (own + swapped > room)
            if blocks is not None:
                others = {block for _, other in live for block in other}
                assert not others & set(blocks[len(shared) * BLOCKS_PER_HASH :]), "a new block is already in use"
                wanted = [prefix for prefix in shared for _ in range(BLOCKS_PER_HASH)]
                assert not pool.offload or [contents.of_block[block] for block in blocks[: len(wanted)]] == wanted
                contents.of_block.update(dict.fromkeys(blocks[len(wanted) :]))
                live.append((prefixes, blocks))
                if data.draw(st.booleans()):
                    for i, prefix in enumerate(prefixes):
                        its = blocks[i * BLOCKS_PER_HASH : (i + 1) * BLOCKS_PER_HASH]
                        contents.of_block.update(dict.fromkeys(its, prefix))
                        pool.publish(prefix, its)
        check_pool(pool, [blocks for _, blocks in live])
    for _, blocks in live:
        pool.release(blocks)
    check_pool(pool, [])
    assert pool.acquire([], pool.num_blocks) is not None


def run(requests, num_blocks, batch_tokens=600, max_running=8):
    """All steps of a schedule, as [[(index, start, count)]], with the invariants checked after each."""
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(requests, pool, batch_tokens, max_running)
    steps = []
    while step := scheduler.next_step():
        counts = [s.count for s in step]
        assert sum(counts) <= batch_tokens
        assert counts == sorted(counts, key=lambda count: count > 1), "not decode-first"
        steps.append([(s.sequence.index, s.start, s.count) for s in step])
        scheduler.finish_step(step)
        check_pool(pool, [sequence.blocks for sequence in scheduler.running])
        assert len(steps) < 10_000
    assert pool.num_used == 0
    return scheduler, steps


requests_strategy = st.lists(
    st.builds(
        lambda time, length, output, family: TraceRequest(
            time, length, output, tuple(family * 100 * (i > 0) + i for i in range(-(-length // HASH_TOKENS)))
        ),
        st.sampled_from([0.0, 1.0, 500.0, 60_000.0]),
        st.integers(1, 2100),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
).map(lambda requests: sorted(requests, key=lambda request: request.timestamp))


@given(requests_strategy, st.integers(0, 10), st.integers(1, 900), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_token_runs_once_and_in_order(requests, spare_blocks, batch_tokens, max_running):
    largest = max(-(-request.total_length // BLOCK_TOKENS) for request in requests)
    batch_tokens = max(batch_tokens, 40)
    scheduler, steps = run(requests, largest + spare_blocks, batch_tokens, max_running)
    assert sorted(sequence.index for sequence in scheduler.finished) == list(range(len(requests)))
    reached = {sequence.index: sequence.shared for sequence in scheduler.finished}
    for index, start, count in (s for step in steps for s in step):
        assert start == reached[index]
        assert count == 1 or start + count <= requests[index].input_length
        reached[index] += count
    for index, request in enumerate(requests):
        assert reached[index] == request.total_length


def test_prefix_is_shared_once_it_is_computed():
    requests = [TraceRequest(time, 1024, 2, (0, index)) for index, time in ((1, 0.0), (2, 0.0), (3, 5000.0))]
    requests.append(TraceRequest(5000.0, 512, 1, (0,)))
    scheduler, _ = run(requests, 100)
    shared = {sequence.index: sequence.shared for sequence in scheduler.finished}
    # The second starts before the first has computed anything; the last must keep a token to run.
    assert shared == {0: 0, 1: 0, 2: 512, 3: 0}


def test_equal_ids_at_other_positions_are_not_shared():
    requests = [TraceRequest(0.0, 1100, 1, (5, 6, 7)), TraceRequest(9000.0, 1100, 1, (6, 7, 8))]
    scheduler, _ = run(requests, 100)
    assert [sequence.shared for sequence in scheduler.finished] == [0, 0]


def test_small_cache_makes_requests_wait():
    requests = [TraceRequest(0.0, 700, 3, (10 * i, 10 * i + 1)) for i in range(4)]
    scheduler, steps = run(requests, 3)  # space for one request at a time
    assert [sequence.waited for sequence in scheduler.finished] == [False, True, True, True]
    assert all(len(step) == 1 for step in steps)


def test_idle_time_is_skipped():
    requests = [TraceRequest(time, 10, 1, (0,)) for time in (1000.0, 1e9)]
    _, steps = run(requests, 4)
    assert steps == [[(0, 0, 10)], [(1, 0, 10)]]


def test_too_large_for_the_cache():
    with pytest.raises(ValueError, match="larger than the whole cache"):
        run([TraceRequest(0.0, 1000, 1, (0, 1))], 2)


def test_token_keys_differ_between_tokens():
    scheduler, _ = run([TraceRequest(0.0, 600, 5, (3, 9)), TraceRequest(0.0, 600, 5, (3, 8))], 20)
    first, second = (np.asarray(sequence.token_keys) for sequence in scheduler.finished)
    assert len(set(first.tolist())) == len(first) == 604
    np.testing.assert_array_equal(first[:512], second[:512])
    assert not set(first[512:].tolist()) & set(second[512:].tolist())
