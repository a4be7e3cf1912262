"""Golden stacks of V4.1 on ranks."""

import dataclasses

import numpy as np

from cumla.parallel import RankRows, Shard, ShardedAttention, local_slot_mapping

from .v41_stack import Stack

PAGE = 6  # rows of a page on a rank, of layers with a row for each position; half of them at ratio 2


class RankStack(Stack):
    """A golden stack whose compressed rows are sharded across ranks; layers of one owner have one part of the rows.

    Attributes:
        table: int32 [requests, pages], the rank's pages of PAGE positions' rows
    """

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
                shape = len(pages), PAGE // self.config.compress_ratios[source], 512
                own.setdefault(source, np.zeros(shape, np.float32))
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
            page = PAGE // layer.ratio
            table = stack.table[requests]
            slots = local_slot_mapping(
                batch.query_start_loc, batch.seq_lens, table, page, stack.shard, num_tokens=len(x),
                compress_ratio=layer.ratio, backend="cpu",
            )  # fmt: skip
            rows = RankRows(stack.shard, table, slots)
        return self.sharded.step(x, caches, metadata, rows, selection)
