"""Parallel work on the cores: compiled loops over rows, and products of small matrices.

Threads are Python's, and the code they call releases the GIL. Numba's own threads would be less code, but one of its
threading layers ends every forked child, another ends the process when two threads call at once, and none can be
interrupted. BLAS's threads are unsuitable too: they split small matrices among spinning threads, which displace ours.

One call uses the cores at a time; calls of other threads wait. A call that fails, or is ended by Ctrl-C, returns when
no thread uses its arrays any more. A forked child starts with new threads.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

WORTH_A_THREAD = 500_000  # nanoseconds of work: waking a thread takes about 50,000, and more on busy cores
NUM_THREADS = "NUMBA_NUM_THREADS"
LONGEST_PIECE = 2_000_000  # nanoseconds: the longest delay of Ctrl-C
PIECES_PER_THREAD = 4  # other threads then take the pieces of a late thread

Work = Callable[[Iterator[int]], None]


def parallel_for(count: int, nanoseconds: int, loop: Callable[..., None], *arguments: Any) -> None:
    """Call `loop(first, end, *arguments)` for ranges that cover 0 to count - 1; the time of all rows decides the cores.

    Args:
        count: independent rows
        nanoseconds: approximate time of a row on a core
        loop: compiled with nogil=True
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
        _Job(_Items(range(0, count, rows)), work).run(threads)


def for_each(count: int, work: Work) -> None:
    """Call `work` on each core with an iterator; together the iterators yield 0 to count - 1 once. Products use BLAS.

    Floating-point errors result in infinities and NaN, not in warnings.
    """

    def quiet(items: Iterator[int]) -> None:
        with np.errstate(all="ignore"):
            work(items)

    with _cores.taken(), _cores.blas_on_one_thread():
        _Job(_Items(range(count)), quiet).run(min(num_cores(), count))


@functools.cache
def num_cores() -> int:
    """The cores that this process may use, or NUMBA_NUM_THREADS if set."""
    asked = os.environ.get(NUM_THREADS)
    if not asked:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not asked.strip().isdecimal() or int(asked) < 1:
        raise ValueError(f"{NUM_THREADS}: got {asked!r}, expected a positive integer")
    return int(asked)


class _Items(Iterator[int]):
    """Items for several threads, each item once. A range's own iterator repeats and drops items without a GIL."""

    def __init__(self, items: range) -> None:
        self._left = collections.deque(items)  # a deque's methods are atomic with and without a GIL

    def __next__(self) -> int:
        try:
            return self._left.popleft()
        except IndexError:
            raise StopIteration from None

    def stop(self) -> None:
        """Remove the items that are left."""
        self._left.clear()


class _Job:
    """Work of several threads. Each takes the next item until none is left."""

    def __init__(self, items: _Items, work: Work) -> None:
        self._items, self._work = items, work
        self._changed = threading.Condition()
        self._helpers, self._over = 0, False
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        """Run the work on this number of threads, including this one. Returns or raises when all have stopped."""
        try:
            for _ in range(threads - 1):
                try:  # in the caller's context, in which self-tests record what a thread compiles
                    _cores.pool().submit(contextvars.copy_context().run, self._help)
                except RuntimeError:  # no more threads can be started
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
            self._items.stop()
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def _end(self) -> None:
        interrupted = None
        while True:
            try:
                self._items.stop()
                with self._changed:
                    self._over = True
                    self._changed.wait_for(lambda: not self._helpers)
                break
            except BaseException as error:  # Ctrl-C again: raised after the others have stopped
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
        """Hold the cores, after other threads' calls have ended.

        Raises RuntimeError within a call of the same thread, as in a signal handler, which would deadlock.
        """
        with self._turn:
            if self._busy:
                raise RuntimeError(
                    "cumla was called during another call of the same thread (in a signal handler?): "
                    "make the call after the handler has returned"
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
        """Set BLAS's number of threads, which is global to the process, to 1, and restore it at the end."""
        with _blas().limit(limits=1, user_api="blas") as self._blas_limit:
            try:
                yield
            finally:
                self._blas_limit = None

    def leave_to_child(self) -> None:
        """Restore BLAS's number of threads in a forked child, which has none of its parent's other threads."""
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
