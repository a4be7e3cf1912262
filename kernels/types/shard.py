"""The tokens of a request that a rank stores, if a cache is sharded across ranks."""

from typing import Any, NamedTuple


class Shard(NamedTuple):
    """Round-robin sharding: `interleave` neighbours go to rank 0, the next ones to rank 1, and so on, cyclically.

    A rank's tokens are packed in its own pages: its n-th token is at row n % block_size of the page in column
    n // block_size of its block table. With `interleave` equal to the block size, whole pages are sharded.

    Attributes:
        rank: this rank, from 0
        size: number of ranks
        interleave: neighbouring tokens that go to the same rank
    """

    rank: int
    size: int
    interleave: int = 1

    def local_len(self, length: int) -> int:
        """Number of the rank's tokens in a sequence of `length` tokens."""
        rounds, rest = divmod(length, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)


class ShardedSlots(NamedTuple):
    """The arguments of `cumla.local_slot_mapping`, and the array of its result."""

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    block_size: int
    compress_ratio: int
    shard: Shard
    out: Any


class ShardedIndices(NamedTuple):
    """The arguments of `cumla.localise_indices`, and the arrays of its results; is_valid_token may be None."""

    indices: Any
    token_to_req: Any
    is_valid_token: Any
    block_table: Any
    block_size: int
    shard: Shard
    slots: Any
    lens: Any
