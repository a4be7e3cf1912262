"""Several devices: a context's tokens and the heads are sharded across ranks, partial results are merged."""

from ..kernels.types.shard import Shard
from ..ops.shards import local_block_table, local_seq_lens, local_slot_mapping, localise_indices, merge_partials
from .agreement import Agreement, RankError
from .communicator import Communicator
from .context import ContextAttention, local_window
from .dense_layer import ShardedMLALayer
from .models import RankRows, ShardedAttention
from .queries import CausalPiece, QueryShards, shard_queries
from .sparse_layer import ShardedCompressedCache, ShardedSparseMLALayer
from .store import FileStore, MemoryStore, Store, TcpStore
from .threads import ThreadCommunicator, run_threads

__all__ = [
    "Agreement",
    "CausalPiece",
    "Communicator",
    "ContextAttention",
    "FileStore",
    "MemoryStore",
    "QueryShards",
    "RankError",
    "RankRows",
    "Shard",
    "ShardedAttention",
    "ShardedCompressedCache",
    "ShardedMLALayer",
    "ShardedSparseMLALayer",
    "Store",
    "TcpStore",
    "ThreadCommunicator",
    "local_block_table",
    "local_seq_lens",
    "local_slot_mapping",
    "local_window",
    "localise_indices",
    "merge_partials",
    "run_threads",
    "shard_queries",
]
