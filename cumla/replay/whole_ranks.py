"""Whole attention layers of a replay on one of several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..kernels.types.shard import Shard
from ..parallel import Communicator, local_block_table, local_slot_mapping
from ..parallel.models import RankRows, ShardedDeepseekV4Attention, ShardedDeepseekV32Attention
from .blocks import BLOCK_TOKENS
from .options import WHOLE_RATIOS, ReplayOptions
from .ranks import Sharding, sharding_of
from .step_batch import SWA_BLOCK, StepBatch
from .whole import V32, WholeLayer, allocated_like, cache_bytes


class RankWholeLayer(WholeLayer):
    """One layer of one rank: its share of the compressed rows, or of V3.2's latent rows, and the rest whole."""

    def __init__(self, index: int, name: str, options: ReplayOptions, longest: int, comm: Communicator) -> None:
        super().__init__(index, name, options, longest, comm.rank)
        self.comm, self.backend, self.sent = comm, options.backend, 0
        self.ratio = 1 if name == V32 else WHOLE_RATIOS[name]
        self.shared = "rows" if name == V32 else "compressed" if self.ratio > 1 else None
        sharded = ShardedDeepseekV32Attention if name == V32 else ShardedDeepseekV4Attention
        self.sharded: Any = sharded(self.attention, comm)
        self.whole_cache_bytes, self.whole_compressed_bytes = self.cache_bytes, 0
        if self.shared is not None:
            whole = getattr(self.caches, self.shared)
            self.whole_compressed_bytes = cache_bytes(whole)
            self.caches = replace(self.caches, **{self.shared: allocated_like(whole, self.sharding.rows, self.xp)})

    @property
    def sharding(self) -> Sharding:
        """The rows of a block."""
        rows = SWA_BLOCK if self.name == V32 else BLOCK_TOKENS // self.ratio
        return sharding_of(rows, self.comm.rank, self.comm.size)

    @property
    def compressed_bytes(self) -> int:
        """What the rank's share takes."""
        return 0 if self.shared is None else cache_bytes(getattr(self.caches, self.shared))

    def step_of_rank(self, hidden: Any, batch: StepBatch, metadata: Any, observe: Any) -> Any:
        rows = None
        if self.shared is not None:
            with observe("map"):
                rows = self._rows(batch)
        before = sum(self.comm.traffic.values())
        out = self.sharded.step(hidden, self.caches, metadata, rows, observe=self.observed(observe))
        self.sent = sum(self.comm.traffic.values()) - before
        return out

    def _rows(self, batch: StepBatch) -> RankRows:
        sharding, common = self.sharding, batch.common
        pages = common.block_table_tensor if self.name == V32 else batch.block_table
        table = local_block_table(pages, Shard(*sharding.table), backend=self.backend)
        slots = local_slot_mapping(
            common.query_start_loc, common.seq_lens, table, sharding.rows, sharding.shard, num_tokens=batch.num_tokens,
            compress_ratio=self.ratio, backend=self.backend,
        )  # fmt: skip
        return RankRows(sharding.shard, table, slots)
