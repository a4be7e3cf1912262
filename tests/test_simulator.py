"""Numba's simulator with the tests' threads (support/simulator.py)."""

import numpy as np
import pytest

from cumla.kernels.numba_cuda import launch
from cumla.kernels.numba_cuda.compiler import cuda

pytestmark = pytest.mark.skipif(not launch.SIMULATED, reason="for the simulator")


def shift(numbers, by, waits):
    """Each block rotates its numbers in shared memory."""
    shared = cuda.shared.array(8, np.int32)
    i, first = cuda.threadIdx.x, cuda.blockIdx.x * cuda.blockDim.x
    shared[i] = numbers[first + i]
    if waits:
        cuda.syncthreads()
    numbers[first + i] = shared[(i + by) % 8]


@pytest.mark.parametrize("by", [1, 7])
def test_threads_wait_for_one_another(by):
    numbers = np.arange(32, dtype=np.int32)
    launch.launch(shift, 4, 8, numbers, by, True)
    assert numbers.reshape(4, 8).tolist() == np.roll(np.arange(32).reshape(4, 8), -by, axis=1).tolist()


@pytest.mark.parametrize("by", [1, 7])
def test_a_missing_barrier_shows(by):
    """A thread reads values of the next or of the previous thread."""
    numbers = np.arange(32, dtype=np.int32)
    launch.launch(shift, 4, 8, numbers, by, False)
    assert numbers.reshape(4, 8).tolist() != np.roll(np.arange(32).reshape(4, 8), -by, axis=1).tolist()


def sums(totals):
    """Sums the numbers of the remaining threads; one thread leaves in every round."""
    shared = cuda.shared.array(8, np.int32)
    for last in range(7, -1, -1):
        if cuda.threadIdx.x > last:
            return
        shared[cuda.threadIdx.x] = last
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for i in range(last + 1):
                totals[last] += shared[i]
        cuda.syncthreads()


def test_threads_that_have_ended_are_not_waited_for():
    totals = np.zeros(8, np.int32)
    launch.launch(sums, 1, 8, totals)
    assert totals.tolist() == [n * (n + 1) for n in range(8)]


def counts(found):
    i = cuda.threadIdx.x
    count, every, some = cuda.syncthreads_count(i % 3), cuda.syncthreads_and(i < 7), cuda.syncthreads_or(i == 7)
    found[i, 0], found[i, 1], found[i, 2] = count, every, some


def test_values_of_all_threads():
    found = np.zeros((8, 3), np.int32)
    launch.launch(counts, 1, 8, found)
    assert (found == [5, 0, 1]).all()


def fails(numbers, thread):
    cuda.syncthreads()
    if cuda.threadIdx.x == thread:
        raise ValueError("a number")
    cuda.syncthreads()
    numbers[0] += 1


@pytest.mark.parametrize("thread", [0, 3, 7])
def test_what_a_thread_raises_ends_the_others(thread):
    numbers = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=rf"tid=\[{thread}, 0, 0\] ctaid=\[0, 0, 0\]: a number"):
        launch.launch(fails, 2, 8, numbers, thread)
    assert numbers[0] == 0
    launch.launch(fails, 1, 8, numbers, 8)
    assert numbers[0] == 8
