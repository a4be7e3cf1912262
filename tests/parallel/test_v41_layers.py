"""V4.1's layers on several ranks: every rank selects what one device selects, and has its outputs."""

import dataclasses

import numpy as np
import pytest

from cumla.parallel import RankRows, Shard, ShardedAttention, local_slot_mapping, run_threads
from support.v41_stack import Stack, check_outputs, check_picks

PAGE, SECONDS = 5, 60


class RankStack(Stack):
    """A golden stack whose compressed rows are sharded across ranks; layers of one owner have one part of the rows."""

    def __init__(self, case, comm):
        super().__init__(case)
        self.shard = Shard(comm.rank, comm.size, 3)
        self.layers = [RankLayer(ShardedAttention(layer, comm), self) for layer in self.layers]
        longest = max(x.shape[1] for x in self.hidden)
        columns = -(-longest // (PAGE * comm.size)) + 3
        pages = np.random.default_rng(comm.rank).permutation(len(self.hidden) * columns).astype(np.int32)
        self.table = pages.reshape(len(self.hidden), columns)
        own = {}
        for number, caches in enumerate(self.caches):
            source = self.config.kv_source(number)
            if source is not None:
                own.setdefault(source, np.zeros((len(pages), PAGE, 512), np.float32))
                self.caches[number] = dataclasses.replace(caches, compressed=own[source])

    def step(self, scheduled):
        self.scheduled = [request for request, *_ in scheduled], self.paged.batch(scheduled)[0]
        return super().step(scheduled)


class RankLayer:
    def __init__(self, sharded, stack):
        self.sharded, self.stack = sharded, stack
        self.activations, self.mode = sharded.attention.activations, sharded.attention.mode

    def step(self, x, caches, metadata, selection):
        layer, stack, rows = self.sharded.attention, self.stack, None
        if layer.ratio:
            requests, batch = stack.scheduled
            table = stack.table[requests]
            slots = local_slot_mapping(
                batch.query_start_loc, batch.seq_lens, table, PAGE, stack.shard, num_tokens=len(x),
                compress_ratio=layer.ratio, backend="cpu",
            )  # fmt: skip
            rows = RankRows(stack.shard, table, slots)
        return self.sharded.step(x, caches, metadata, rows, selection)


@pytest.mark.parametrize(("case", "size"), [(0, 1), (0, 3), (1, 2), (2, 2)])
def test_ranks_select_and_give_what_one_device_does(case, size):
    def on(comm):
        stack = RankStack(case, comm)
        tokens = stack.hidden[0].shape[1]
        return stack, stack.run(0, [tokens - 23, 1, 3, 19])

    found = run_threads(size, on, SECONDS)
    for stack, out in found:
        check_picks(stack, case, 0)
        check_outputs(stack, case, 0, out, 1e-5)
        for layer, picks in stack.picks.items():
            for token, chosen in picks[0].items():
                np.testing.assert_array_equal(chosen, found[0][0].picks[layer][0][token])
