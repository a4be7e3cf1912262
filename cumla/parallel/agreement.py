"""Detects ranks that are missing, fail or diverge, and raises an error that names them instead of a hang."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ..dispatch.values import check_integers, finite, shown
from .store import Store

MOST_SECONDS = 1e6  # largest time limit: waiting functions take no more
ENDED: tuple[str, tuple[int, ...]] = "ended", ()


class RankError(RuntimeError):
    """An error caused by `ranks`. The message names them."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ranks, str(self))


class Agreement:
    """One rank's messages to and from the others.

    Args:
        store: the same for all ranks, without values of an earlier run
        rank, size: this rank and the number of ranks
        time_limit: seconds to wait for other ranks

    As a context manager, it reports an exception that ends the context to the other ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, time_limit: float = 60.0) -> None:
        check_integers(1, size=size)
        check_integers(0, int(size) - 1, rank=rank)
        self.store, self.rank, self.size = store, int(rank), int(size)
        self.time_limit = seconds("time_limit", time_limit)
        self._old: list[str] = []

    def exchange(self, what: str, value: Any, time_limit: float | None = None) -> list[Any]:
        """Every rank's value, in the order of ranks. All ranks call this once with the same `what`.

        Raises RankError if a rank failed, ended or does not call this within the time limit.
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
            for rank in ended:  # the rank may have set its value after the check above, and ended since
                values[rank] = self.store.get(f"{what}/{rank}")
            missing = [rank for rank in missing if values[rank] is None]
            self.check_others([rank for rank in ended if rank in missing], f"reach {what}")
            if not missing:
                break
            left = end - time.monotonic()
            if left <= 0:
                raise RankError(missing, f"{names(missing)} did not reach {what} within {limit:g} s (rank {self.rank})")
            self.store.wait(left)
        for key in self._old:  # all ranks are here, so they have read the earlier values
            self.store.delete(key)
        self._old = [mine]
        return [value for (value,) in values]

    def agree(self, what: str, value: str) -> None:
        """Raise RankError on every rank unless all ranks give the same value."""
        self.same(what, self.exchange(what, value))

    def same(self, what: str, values: Sequence[str]) -> None:
        """Raise RankError for ranks whose value is not the most common one; rank 0's value decides a tie."""
        counts = collections.Counter(values)
        common = max(counts, key=lambda value: (counts[value], value == values[0]))
        others = [rank for rank, value in enumerate(values) if value != common]
        if others:
            first = others[0]
            raise RankError(
                others, f"{what}: {names(others)} got {values[first]}, expected {common} as rank {values.index(common)}"
            )

    def check_others(self, ranks: Sequence[int] | None = None, what: str = "go on", failed_only: bool = False) -> None:
        """Raise RankError if one of `ranks` (None: any) failed or ended. The error names the ranks that caused it."""
        for rank in range(self.size) if ranks is None else ranks:
            word = None if rank == self.rank else self._word(rank)
            if word is None or (word == ENDED and failed_only):
                continue
            said, blamed = word
            if blamed:
                raise RankError(blamed, said if blamed == (rank,) else f"{said} (as rank {rank} says)")
            raise RankError([rank], f"rank {rank} {said} and did not {what} (rank {self.rank})")

    def _word(self, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """The last message of a rank that ended: the reason, and the ranks that caused it."""
        word: tuple[str, tuple[int, ...]] | None = self.store.get(f"ended/{rank}")
        return word

    def end(self, error: BaseException | None = None) -> None:
        """Report to the others that this rank has ended, and why, if the store is still reachable."""
        word = ENDED
        if isinstance(error, RankError):
            word = str(error), error.ranks
        elif error is not None:
            word = f"failed: {type(error).__name__}: {error}", ()
        with contextlib.suppress(OSError):  # the process with the store may have ended before
            self.store.set(f"ended/{self.rank}", word)

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)


def seconds(name: str, value: Any) -> float:
    """A time limit. Raises TypeError unless it is a number, ValueError unless it is from 0 to MOST_SECONDS."""
    number = finite(name, value)
    if not 0 <= number <= MOST_SECONDS:
        raise ValueError(f"{name}: got {shown(value)}, expected 0 to {MOST_SECONDS:g} seconds")
    return number


def names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
