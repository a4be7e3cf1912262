"""Which of a request's tokens a rank has, where several ranks share a cache."""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """Tokens dealt out in turn: `interleave` neighbours to rank 0, as many to rank 1, and so on, and around again.

    A rank's tokens lie one behind another in its own pages, so the n-th that it has is at row n % block_size of the
    page in column n // block_size of its block table. With `interleave` the block size, whole pages are dealt out.

    rank        this rank, from 0
    size        ranks
    interleave  neighbouring tokens that go to the same rank
    """

    rank: int
    size: int
    interleave: int = 1

    def local_len(self, length: int) -> int:
        """How many of a sequence's tokens, of which there are `length`, the rank has."""
        rounds, rest = divmod(length, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)
