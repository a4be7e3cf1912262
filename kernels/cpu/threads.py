"""How many cores work: of Numba's threads those that are worth it, or all cores on independent small matrices.

For small matrices neither Numba's threads nor BLAS's fit: BLAS would share out what is too small for it, and its
threads and Numba's spin for milliseconds after each call and push each other aside.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator

import numba
import numpy as np
from threadpoolctl import ThreadpoolController

ENTRIES_PER_THREAD = 1 << 21  # of an array that is filled: about a millisecond


@contextlib.contextmanager
def enough_for(entries: int) -> Iterator[None]:
    """As many of Numba's threads as filling so many entries is worth: to wake more takes longer than it saves.

    On cores that are busy it takes very much longer: a parallel loop ends when its last thread has had its turn.
    """
    most = numba.get_num_threads()
    numba.set_num_threads(min(most, 1 + entries // ENTRIES_PER_THREAD))
    try:
        yield
    finally:
        numba.set_num_threads(most)


# BLAS's number of threads is the process's: one call at a time sets it and puts it back.
_one_call = threading.Lock()


def for_each(count: int, work: Callable[[Iterator[int]], None]) -> None:
    """Call `work` on each of Numba's number of threads with an iterator; together they yield 0 to count - 1 once.

    Floating-point errors show as infinities and NaN, not as warnings.
    """
    items = iter(range(count))  # next() of a range is one step under the GIL

    def quiet() -> None:
        with np.errstate(all="ignore"):
            work(items)

    helpers = min(numba.get_num_threads(), count) - 1
    with _one_call, _blas().limit(limits=1, user_api="blas"):
        running = [_pool().submit(quiet) for _ in range(helpers)]
        quiet()
        for helper in running:
            helper.result()


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(numba.config.NUMBA_NUM_THREADS, "cumla")


# A fork has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
