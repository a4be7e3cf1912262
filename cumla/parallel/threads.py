"""Ranks that are threads of one process, with NumPy arrays: for machines without a GPU, and for tests.

For tests of results, not of speed, arrays may also be CuPy's on one GPU that all ranks share.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_integers
from .agreement import Agreement, RankError, names, seconds
from .communicator import Move, as_tuple, copy, described, moves, result_of, sent_bytes
from .store import MemoryStore

T = TypeVar("T")
GRACE_SECONDS = 5.0  # time for ranks to end after an interrupt


class ThreadCommunicator:
    """A Communicator between threads. Every call waits for all ranks; an error becomes a RankError on each rank.

    Attributes:
        traffic: bytes that this rank has sent, by function
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement, self.rank, self.size = agreement, agreement.rank, agreement.size
        self.traffic: collections.Counter[str] = collections.Counter()
        self._calls = 0
        agreement.agree("the start", f"{self.size} ranks")

    def memory(self, nbytes: int, like: Any) -> Any:
        return dlpack.empty((nbytes,), np.dtype(np.uint8), like)

    def all_gather(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        return self._run("all_gather", x, out, gather)

    def reduce_scatter(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        return self._run("reduce_scatter", x, out, self._reduce)

    def all_to_all(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        return self._run("all_to_all", x, out, self._take)

    def _run(self, op: str, x: Any, out: Any, receive: Callable[[list[Any], Any], None]) -> Any:
        arrays: list[Move] = moves(op, self.rank, self.size, x, out)
        self._calls += 1
        name = f"call {self._calls}, {op}"
        settle(arrays)
        everyones = self.agreement.exchange(f"call {self._calls}", (described(op, arrays), arrays))
        self.agreement.same(name, [words for words, _ in everyones])
        for i, move in enumerate(arrays):
            receive([theirs[i].sent for _, theirs in everyones], move.received)
        settle(arrays)
        self.agreement.exchange(f"the end of call {self._calls}", True)  # before a rank changes its sent array
        self.traffic[op] += sent_bytes(op, self.size, arrays)
        return result_of(x, arrays, dlpack.framework_of(as_tuple(x)[0]))

    def _reduce(self, sent: list[Any], received: Any) -> None:
        xp = dlpack.namespace_of(received)
        total = xp.zeros(received.shape, np.float32 if received.dtype.itemsize == 2 else received.dtype)
        for x in sent:
            total += x[self.rank].astype(total.dtype)
        received[...] = total.astype(received.dtype)

    def _take(self, sent: list[Any], received: Any) -> None:
        for rank, x in enumerate(sent):
            copy(received[rank : rank + 1], x[self.rank : self.rank + 1])


def gather(sent: list[Any], received: Any) -> None:
    for rank, x in enumerate(sent):
        copy(received[rank : rank + 1], x[None])  # the part of `received` has a leading axis that x lacks


def settle(arrays: list[Move]) -> None:
    """Wait for the work on a device's arrays: other threads' streams do not wait for it."""
    if not isinstance(arrays[0].sent, np.ndarray):
        sys.modules["cupy"].cuda.get_current_stream().synchronize()


def run_threads(size: int, function: Callable[[ThreadCommunicator], T], time_limit: float = 60.0) -> list[T]:
    """Call `function` with a communicator in a thread for each rank. Returns each rank's result.

    Args:
        time_limit: seconds that a rank waits for the others in a call, and that the others have to end after one failed

    Raises RankError, which names the rank that failed, with its error as the cause, or the ranks that do not end. An
    interrupt ends the ranks at their next call, and is raised when they have ended, or after GRACE_SECONDS.
    """
    check_integers(1, size=size)
    time_limit, store = seconds("time_limit", time_limit), MemoryStore()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        agreement = Agreement(store, rank, size, time_limit)
        try:
            with agreement:
                results[rank] = function(ThreadCommunicator(agreement))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(size)]
    end = None
    try:
        for thread in threads:
            thread.start()
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(0.05)
            if errors and end is None:
                end = time.monotonic() + time_limit
            if end is not None and time.monotonic() > end:
                break
    except BaseException as interrupt:  # Ctrl-C
        for rank in range(size):
            Agreement(store, rank, size).end(interrupt)
        end = time.monotonic() + GRACE_SECONDS
        # After an interrupted join a thread counts as dead: check the results of the ranks instead.
        while any(rank not in results and rank not in errors for rank in range(size)) and time.monotonic() < end:
            time.sleep(0.001)
        raise
    # The root cause: an error that does not blame other ranks.
    first = min(errors, key=lambda rank: (isinstance(errors[rank], RankError), rank), default=None)
    if first is not None:
        error = errors[first]
        if isinstance(error, RankError):
            raise error
        raise RankError([first], f"rank {first} failed: {type(error).__name__}: {error}") from error
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running:
        raise RankError(running, f"{names(running)} did not end")
    return [results[rank] for rank in range(size)]
