"""What makes a rank that is missing, fails or does something else an error that names it, instead of a hang."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ..dispatch.values import check_integers, finite, shown
from .store import Store

MOST_SECONDS = 1e6  # of a time limit: what waits takes no more
ENDED: tuple[str, tuple[int, ...]] = "ended", ()


class RankError(RuntimeError):
    """Something is wrong with `ranks`, which the message names."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, str(self))


class Agreement:
    """One rank's word with the others.

    store       the same for all ranks, nothing of an earlier run in it
    rank, size  this rank and how many there are
    time_limit  seconds that it waits for others

    Used as a context, it tells the others of an exception that ends it.
    """

    def __init__(self, store: Store, rank: int, size: int, time_limit: float = 60.0) -> None:
        check_integers(1, size=size)
        check_integers(0, int(size) - 1, rank=rank)
        self.store, self.rank, self.size = store, int(rank), int(size)
        self.time_limit = seconds("time_limit", time_limit)
        self._old: list[str] = []

    def exchange(self, what: str, value: Any, time_limit: float | None = None) -> list[Any]:
        """Every rank's value, in their order. All ranks call this with the same `what`, once each.

        Raises RankError if a rank failed or ended instead, or does not come within the time limit.
        """
        mine = f"{what}/{self.rank}"
        self.store.set(mine, (value,))
        limit = self.time_limit if time_limit is None else time_limit
        end = time.monotonic() + limit
        values: list[Any] = [None] * self.size  # each as (value,)
        missing = [rank for rank in range(self.size) if rank != self.rank]
        values[self.rank] = (value,)
        while True:
            for rank in missing:
                values[rank] = self.store.get(f"{what}/{rank}")
            ended = [rank for rank in missing if values[rank] is None and self._word(rank) is not None]
            for rank in ended:  # it may have come after the look above, and ended since
                values[rank] = self.store.get(f"{what}/{rank}")
            missing = [rank for rank in missing if values[rank] is None]
            self.check_others([rank for rank in ended if rank in missing], f"come to {what}")
            if not missing:
                break
            left = end - time.monotonic()
            if left <= 0:
                raise RankError(
                    missing, f"{names(missing)} did not come to {what} within {limit:g} s (rank {self.rank})"
                )
            self.store.wait(left)
        for key in self._old:  # everybody is here, so has read what was said before
            self.store.delete(key)
        self._old = [mine]
        return [value for (value,) in values]

    def agree(self, what: str, value: str) -> None:
        """Raise RankError, on every rank, unless all ranks are about to do the same."""
        self.same(what, self.exchange(what, value))

    def same(self, what: str, values: Sequence[str]) -> None:
        """Raise RankError for values that are not those of most, of rank 0 where that decides nothing."""
        counts = collections.Counter(values)
        common = max(counts, key=lambda value: (counts[value], value == values[0]))
        others = [rank for rank, value in enumerate(values) if value != common]
        if others:
            first = others[0]
            raise RankError(
                others, f"{what}: {names(others)} got {values[first]}, expected {common} as rank {values.index(common)}"
            )

    def check_others(self, ranks: Sequence[int] | None = None, what: str = "go on", failed_only: bool = False) -> None:
        """Raise RankError if one of these ranks, or of all, failed or ended; of others if it failed because of them."""
        for rank in range(self.size) if ranks is None else ranks:
            word = None if rank == self.rank else self._word(rank)
            if word is None or (word == ENDED and failed_only):
                continue
            said, blamed = word
            if blamed:
                raise RankError(blamed, said if blamed == (rank,) else f"{said} (as rank {rank} says)")
            raise RankError([rank], f"rank {rank} {said} and did not {what} (rank {self.rank})")

    def _word(self, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """What a rank that does nothing more left: why, and the ranks that its own error blames."""
        word: tuple[str, tuple[int, ...]] | None = self.store.get(f"ended/{rank}")
        return word

    def end(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank does nothing more, and why, if they can still be told."""
        word = ENDED
        if isinstance(error, RankError):
            word = str(error), error.ranks
        elif error is not None:
            word = f"failed: {type(error).__name__}: {error}", ()
        with contextlib.suppress(OSError):  # who keeps the words may have ended before
            self.store.set(f"ended/{self.rank}", word)

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)


def seconds(name: str, value: Any) -> float:
    """A time limit. Raises TypeError for what is no number, ValueError for one that is not from 0 to MOST_SECONDS."""
    number = finite(name, value)
    if not 0 <= number <= MOST_SECONDS:
        raise ValueError(f"{name}: got {shown(value)}, expected 0 to {MOST_SECONDS:g} seconds")
    return number


def names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
