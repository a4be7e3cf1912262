"""Work shared out over the cores: compiled loops over rows, and products of small matrices.

Threads are Python's, and what they call lets go of the GIL. Numba's own would be less to write, but of its layers
one ends every forked child, one the whole process as soon as two threads call at a time, and none can be stopped.
Neither do BLAS's threads fit: small matrices are shared out among threads that spin, and then push ours aside.

One call at a time has the cores; calls of other threads wait. A call that fails, or that Ctrl-C ends, returns when
all threads have left its arrays alone. In a forked child everything starts anew.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

WORTH_A_THREAD = 500_000  # nanoseconds of work: to wake one takes some 50,000, and more where cores are busy
NUM_THREADS = "NUMBA_NUM_THREADS"
LONGEST_PIECE = 2_000_000  # nanoseconds: Ctrl-C waits as long
PIECES_PER_THREAD = 4  # so that a thread that comes late keeps nobody waiting

Work = Callable[[Iterator[int]], None]


def share_out(count: int, nanoseconds: int, loop: Callable[..., None], *arguments: Any) -> None:
    """Call `loop(first, end, *arguments)` for ranges that make up 0 to count - 1, on as many cores as it is worth.

    count        rows of which each can be done on its own
    nanoseconds  what one of them takes a core, roughly
    loop         compiled with nogil=True
    """
    threads = min(num_cores(), 1 + count * nanoseconds // WORTH_A_THREAD)
    if threads == 1:
        loop(0, count, *arguments)
        return
    rows = max(1, min(-(-count // (PIECES_PER_THREAD * threads)), LONGEST_PIECE // max(nanoseconds, 1)))

    def work(firsts: Iterator[int]) -> None:
        for first in firsts:
            loop(first, min(first + rows, count), *arguments)

    with _cores.taken():
        _Job(iter(range(0, count, rows)), work).run(threads)


def for_each(count: int, work: Work) -> None:
    """Call `work` on each core with an iterator; together they yield 0 to count - 1 once. Its products are BLAS's.

    Floating-point errors show as infinities and NaN, not as warnings.
    """

    def quiet(items: Iterator[int]) -> None:
        with np.errstate(all="ignore"):
            work(items)

    with _cores.taken(), _cores.blas_on_one_thread():
        _Job(iter(range(count)), quiet).run(min(num_cores(), count))


@functools.cache
def num_cores() -> int:
    """The cores that this process may use, or as many as NUMBA_NUM_THREADS says."""
    asked = os.environ.get(NUM_THREADS)
    if not asked:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not asked.strip().isdecimal() or int(asked) < 1:
        raise ValueError(f"{NUM_THREADS}: got {asked!r}, expected a positive integer")
    return int(asked)


class _Job:
    """What several threads do together. Each takes the next item until there is none (next() is a step of the GIL)."""

    def __init__(self, items: Iterator[int], work: Work) -> None:
        self._items, self._work = items, work
        self._changed = threading.Condition()
        self._helpers, self._over = 0, False
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        """Do it on so many threads, this one among them. Afterwards none works any more, whatever has happened."""
        try:
            for _ in range(threads - 1):
                try:
                    _cores.pool().submit(self._help)
                except RuntimeError:  # no more threads may be started
                    break
            self._work(self._items)
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        with self._changed:
            if self._over:
                return
            self._helpers += 1
        try:
            self._work(self._items)
        except BaseException as error:
            self._error = error
            self._stop()
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def _stop(self) -> None:
        collections.deque(self._items, maxlen=0)  # nothing is left to take

    def _end(self) -> None:
        interrupted = None
        while True:
            try:
                self._stop()
                with self._changed:
                    self._over = True
                    self._changed.wait_for(lambda: not self._helpers)
                break
            except BaseException as error:  # Ctrl-C again: not before the others have stopped
                interrupted = error
        if interrupted is not None:
            raise interrupted


class _Cores:
    """The cores of this process and the threads on them."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._busy = False
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._blas_limit: Any = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Have the cores, once other threads' calls are done.

        Raises RuntimeError within a call of the same thread, as in a signal handler: the call could not go on.
        """
        with self._turn:
            if self._busy:
                raise RuntimeError(
                    "cumla was called while a call of the same thread was at work (in a signal handler?): "
                    "note what to do there, and do it afterwards"
                )
            try:
                self._busy = True
                yield
            finally:
                self._busy = False

    def pool(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(max(num_cores() - 1, 1), "cumla")
        return self._pool

    @contextlib.contextmanager
    def blas_on_one_thread(self) -> Iterator[None]:
        """Its number of threads is the process's: whoever has the cores sets it and puts it back."""
        with _blas().limit(limits=1, user_api="blas") as self._blas_limit:
            try:
                yield
            finally:
                self._blas_limit = None

    def leave_to_child(self) -> None:
        """What a forked child, which has none of its parent's threads, takes over: BLAS's number of threads."""
        if self._blas_limit is not None:
            self._blas_limit.restore_original_limits()


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


_cores = _Cores()


def _begin_in_child() -> None:
    global _cores
    parents, _cores = _cores, _Cores()
    parents.leave_to_child()


os.register_at_fork(after_in_child=_begin_in_child)
