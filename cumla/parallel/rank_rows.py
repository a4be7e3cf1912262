"""The location of a rank's part of the cached rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.types.shard import Shard


@dataclass(frozen=True)
class RankRows:
    """The location of a rank's part of the rows, for one step.

    Attributes:
        shard: how rows are sharded across ranks
        block_table: [num_reqs, B] int32, the rank's pages of each request, enough for its rows of the longest request
        slot_mapping: [n] int64, slots of this step's rows; -1 for rows of other ranks (`local_slot_mapping`)
    """

    shard: Shard
    block_table: Any
    slot_mapping: Any


@dataclass(frozen=True)
class ShardedCompressedCache:
    """A rank's compressed rows of one layer, and the rows that a step adds.

    Attributes:
        cache: uint8 [num_blocks, block_size, 584, 528 or 288] (or rows that are not quantised), of the layer's
            extra_layout
        block_table: [num_reqs, B] int32, the rank's pages of each request
        shard: how compressed rows are sharded across ranks
        k: [n, 512] bfloat16, all rows that this step completes; None: the cache contains them already
        slot_mapping: [n] int64, slots of k in the rank's cache, -1 for rows of other ranks (`local_slot_mapping`)
        topk_indices: [num_tokens, topk] int32, rows that each token selects, counted over all ranks; -1: none. None for
            a C128A layer, which takes all rows
    """

    cache: Any
    block_table: Any
    shard: Shard
    k: Any = None
    slot_mapping: Any = None
    topk_indices: Any = None
