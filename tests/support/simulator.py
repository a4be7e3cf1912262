"""Numba's simulator with threads that run one at a time.

The simulator's own threads run concurrently while another one polls them all, and passing Python's lock takes most of
the time. Here one thread of a block runs until it ends or waits for the others, then the next: from first to
last in every other block, from last to first in those between, so that a missing `syncthreads` shows in one of the
two orders. The launching thread does all work, except for waiting threads, which keep their stacks.
"""

import collections
import functools
import threading

import numpy as np
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator.kernelapi import Dim3


def install():
    """Replace the simulator's threads in all later launches of this process."""
    simulator.BlockManager = Block


class Abandoned(BaseException):
    """Ends the threads that wait when another one has failed."""


class Block:
    """Replaces the simulator's BlockManager. One thread at a time runs, and only it changes the state here.

    Attributes:
        todo: indices of threads that have not begun
        waiting: a lock for each that is in syncthreads and waits for others
        ready: indices of threads whose barrier is complete
    """

    def __init__(self, function, grid_dim, block_dim, debug):
        self._function, self._size = function, block_dim
        self._values = np.zeros(block_dim, np.bool_)  # results of syncthreads_count and similar functions
        self._error, self._ended = None, threading.Semaphore(0)

    def run(self, block_index, *arguments):
        threads = list(np.ndindex(*self._size))
        self.todo = collections.deque(reversed(threads) if sum(block_index) % 2 else threads)
        self.waiting, self.ready = collections.deque(), collections.deque()
        self._block_index, self._call = Dim3(*block_index), functools.partial(self._function, *arguments)
        self.begin()
        self._ended.acquire()
        if self._error is not None:
            raise self._error

    def begin(self):
        """Run threads that have not begun, on the calling system thread."""
        this = threading.current_thread()
        this.blockIdx = self._block_index
        for name in ("syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or"):
            setattr(this, name, getattr(self, name))
        while self.todo:
            index = self.todo.popleft()
            this.threadIdx, this.thread_id = Dim3(*index), np.ravel_multi_index(index[::-1], self._size[::-1])
            try:
                self._call()
            except Abandoned:
                break
            except Exception as error:
                where = f"tid={list(index)} ctaid={list(self._block_index)}"
                self._error = type(error)(f"{where}: {error}" if str(error) else where).with_traceback(
                    error.__traceback__
                )
                self.todo.clear()
        self._pass_on()

    def _pass_on(self):
        """Continue a waiting thread."""
        if not self.ready:
            self.ready, self.waiting = self.waiting, self.ready
        (self.ready.popleft() if self.ready else self._ended).release()

    def syncthreads(self):
        others_came = threading.Semaphore(0)
        self.waiting.append(others_came)
        if self.todo:
            Helper.begin(self)
        else:
            self._pass_on()
        others_came.acquire()
        if self._error is not None:
            raise Abandoned

    def _all_values(self, value):
        this = threading.current_thread().threadIdx
        self._values[this.x, this.y, this.z] = value
        self.syncthreads()
        values = self._values.copy()
        self.syncthreads()
        return values

    def syncthreads_count(self, value):
        return np.count_nonzero(self._all_values(value))

    def syncthreads_and(self, value):
        return int(self._all_values(value).all())

    def syncthreads_or(self, value):
        return int(self._all_values(value).any())


IDLE = collections.deque()


class Helper(threading.Thread):
    """A system thread that continues where others wait; later launches reuse it."""

    def __init__(self):
        super().__init__(daemon=True)
        self._work, self._block = threading.Semaphore(0), None
        self.start()

    @staticmethod
    def begin(block):
        helper = IDLE.pop() if IDLE else Helper()
        helper._block = block
        helper._work.release()

    def run(self):
        while True:
            self._work.acquire()
            block, self._block = self._block, None
            block.begin()
            del block
            IDLE.append(self)
