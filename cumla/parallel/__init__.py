"""More than one device: tokens of a context and heads dealt out to ranks, and their results made one."""

from ..kernels.types.shard import Shard
from ..ops.shards import local_block_table, local_seq_lens, local_slot_mapping, localise_indices, merge_partials

__all__ = [
    "Shard",
    "local_block_table",
    "local_seq_lens",
    "local_slot_mapping",
    "localise_indices",
    "merge_partials",
]
