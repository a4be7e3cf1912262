"""NCCL's communicator with a fake library; test_device.py uses NCCL."""

import pickle
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

import emulation
from cumla.parallel import RankError
from support.fake_nccl import ended, joined, on_ranks

pytestmark = pytest.mark.skipif(bool(emulation.unavailable()), reason=emulation.unavailable() or "")


@pytest.mark.parametrize("start", ["in_process", "join"])
def test_arrays_move(nccl, start):
    import cupy

    comms = nccl.NcclCommunicator.in_process([0, 0]) if start == "in_process" else joined(nccl, [2, 2])

    def run(comm):
        x = cupy.array(np.arange(6, dtype=np.float32) + comm.rank)
        parts = cupy.array(np.stack([np.arange(6) + comm.rank + 10 * to for to in range(2)]).astype(np.float32))
        out = cupy.empty((2, 6), np.float32)
        assert comm.all_gather(x, out) is out
        both = comm.all_gather((x, cupy.array(np.full(3, comm.rank, np.int32))))
        summed, taken = comm.reduce_scatter(parts), comm.all_to_all(parts)
        comm.wait()
        assert comm.traffic == {"all_gather": 24 + 36, "reduce_scatter": 24, "all_to_all": 24}
        return out.get(), both[1].get(), summed.get(), taken.get()

    for rank, (gathered, words, summed, taken) in enumerate(on_ranks(comms, run)):
        mine = np.stack([np.arange(6) + other + 10 * rank for other in range(2)])
        np.testing.assert_array_equal(gathered, np.arange(6) + np.arange(2)[:, None])
        np.testing.assert_array_equal(words, [[0, 0, 0], [1, 1, 1]])
        np.testing.assert_array_equal(summed, mine.sum(axis=0))
        np.testing.assert_array_equal(taken, mine)
    assert [ended(comm) for comm in comms] == ["destroyed", "destroyed"]


class Noted:
    """NCCL's communicator, which records its calls."""

    def __init__(self, comm, notes):
        self._comm, self._notes = comm, notes

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_gather(self, *arguments):
        self._notes.append("sent")
        self._comm.all_gather(*arguments)


def test_ranks_of_one_process_go_in_step(nccl):
    """No rank makes a call before the others are ready, and none continues before all have made it."""
    import cupy

    notes = []

    def run(comm):
        x, out = cupy.zeros(6, np.float32), cupy.empty((2, 6), np.float32)
        comm.all_gather(x, out)  # publishes these shapes
        comm._comm = Noted(comm._comm, notes)
        for late in range(2):
            if comm.rank == late:
                time.sleep(0.2)
                notes.append("came")
            comm.all_gather(x, out)
            notes.append("on")

    assert on_ranks(nccl.NcclCommunicator.in_process([0, 0]), run) == [None, None]
    assert notes.index("came") < notes.index("sent")
    assert [note for note in notes if note != "came"] == ["sent", "sent", "on", "on"] * 2


class Beside:
    """NCCL's communicator; a call runs asynchronously until all ranks have called."""

    running, changed = 0, threading.Condition()

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_gather(self, *arguments):
        with self.changed:
            Beside.running += 1
        threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def _run(self, *arguments):
        self._comm.all_gather(*arguments)
        with self.changed:
            Beside.running -= 1
            self.changed.notify_all()

    @classmethod
    def memory(cls, seconds):
        """CUDA frees memory that another GPU reads when both are idle. False: earlier."""
        with cls.changed:
            return cls.changed.wait_for(lambda: not cls.running, seconds)


@pytest.mark.parametrize("in_step", [True, False])
def test_memory_may_be_asked_for_between_calls(nccl, in_step):
    """The request waits for all GPUs, and a call for all ranks: in one process these could wait for each other."""
    import cupy

    pauses = np.random.default_rng(0).choice([0, 0.01], (2, 12))

    def run(comm):
        x, out = cupy.zeros(6, np.float32), cupy.empty((2, 6), np.float32)
        comm.all_gather(x, out)
        comm._comm, comm._in_step = Beside(comm._comm), in_step
        came = []
        for pause in pauses[comm.rank]:
            time.sleep(pause)
            came.append(Beside.memory(60 if in_step else 0.2))
            comm.all_gather(x, out)
        assert Beside.memory(60)
        return all(came)

    came = on_ranks(nccl.NcclCommunicator.in_process([0, 0]), run)
    assert came == [True, True] if in_step else not all(came)


def test_known_calls_that_differ_are_named_at_once(nccl):
    import cupy

    def run(comm):
        x, y = cupy.zeros(6, np.float32), cupy.zeros((2, 6), np.float32)
        comm.all_gather(x)
        comm.all_gather(y)
        comm.all_gather(x if comm.rank else y)

    start = time.monotonic()
    for error in on_ranks(nccl.NcclCommunicator.in_process([0, 0], time_limit=100), run):
        assert "rank 1 got all_gather of float32 [6], expected all_gather of float32 [2, 6] as rank 0" in str(error)
        assert error.ranks == (1,)
    assert time.monotonic() - start < 90


def test_calls_end_where_the_store_is_gone(nccl):
    """The rank that runs the store may have ended: the GPU's pending calls are ended all the same."""
    import cupy

    class Gone:
        def __getattr__(self, name):
            raise ConnectionError("is gone")

    def run(comm):
        comm.all_gather(cupy.zeros(3, np.float32))
        comm._agreement.store = Gone()
        if comm.rank == 1:
            raise ValueError("out of luck")
        comm._over.wait(100)
        comm.wait()

    comms = nccl.NcclCommunicator.in_process([0, 0])
    reported, own = on_ranks(comms, run)
    assert "rank 0: ConnectionError: is gone" in str(reported)
    assert isinstance(own, ValueError)
    assert [ended(comm) for comm in comms] == ["aborted", "aborted"]


def test_what_differs_is_named_before_it_is_sent(nccl):
    import cupy

    comms = nccl.NcclCommunicator.in_process([0, 0], time_limit=10)
    results = on_ranks(comms, lambda comm: comm.all_gather(cupy.zeros(3 + comm.rank, np.float32)))
    for error in results:
        assert "rank 1 got all_gather of float32 [4], expected all_gather of float32 [3] as rank 0" in str(error)
        assert error.ranks == (1,)
    assert [ended(comm) for comm in comms] == ["aborted", "aborted"]
    with pytest.raises(type(results[0]), match="rank 1 got all_gather"):  # from now on
        comms[0].wait()


def test_a_failure_is_reported(nccl):
    import cupy

    def run(comm):
        comm.all_gather(cupy.zeros(3, np.float32))
        if comm.rank == 1:
            raise ValueError("out of luck")
        comm._over.wait(10)  # until the watching thread has noticed
        comm.all_gather(cupy.zeros(3, np.float32))

    reported, own = on_ranks(nccl.NcclCommunicator.in_process([0, 0]), run)
    assert isinstance(own, ValueError)
    assert "rank 1 failed: ValueError: out of luck" in str(reported)
    assert reported.ranks == (1,)


def test_ranks_that_do_not_fit(nccl, monkeypatch):
    from cumla.parallel import MemoryStore

    for error in joined(nccl, [2, 3], time_limit=1):
        assert isinstance(error, RankError)
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "deviceGetPCIBusId", lambda device: "0000:1")
    first, second = joined(nccl, [2, 2])
    assert "rank 1 got GPU 0000:1" in str(first)
    assert first.ranks == second.ranks == (1,)
    with pytest.raises(RankError, match=r"rank 1 did not reach the start within 0\.2 s"):
        nccl.NcclCommunicator(MemoryStore(), 0, 2, time_limit=0.2)


def mpi(size, bcast):
    """mpi4py's communicator, of rank 0."""
    return types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: size, bcast=bcast)


def test_started_by_mpirun(nccl):
    import cupy

    with nccl.NcclCommunicator.from_mpi(mpi(1, lambda value, root: value)) as comm:
        assert comm.all_gather(cupy.zeros(3, np.int32)).get().tolist() == [[0, 0, 0]]


def test_all_ranks_report_that_rank_0_cannot_be_reached(nccl, monkeypatch):
    reported = []

    def bcast(value, root):
        reported.append(pickle.loads(pickle.dumps(value)))
        return value

    def unknown(host):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(RankError, match=r"rank 0 cannot be reached at its host name, .*: Name or service not known"):
        nccl.NcclCommunicator.from_mpi(mpi(2, bcast))
    assert [error.ranks for error in reported] == [(0,)]


def test_arrays_elsewhere_and_of_no_sum(nccl):
    import cupy

    (comm,) = nccl.NcclCommunicator.in_process([0])
    with comm:
        with pytest.raises(ValueError, match="x: got an array elsewhere, expected it on CUDA device 0"):
            comm.all_gather(np.zeros(3))
        with pytest.raises(TypeError, match="x: got dtype int16, expected one of"):
            comm.reduce_scatter(cupy.zeros((1, 3), np.int16))


STUCK = """if True:
    import contextlib, sys, time, types

    class Device(contextlib.nullcontext):
        def synchronize(self):
            time.sleep(60)

    sys.modules["cupy"] = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=Device))
    from cumla.arrays import streams
    streams.relaxed_capture = contextlib.nullcontext
    from cumla.interop import nccl_endings
    nccl_endings.GRACE_SECONDS = 1.0
    nccl_endings.end_process_if_stuck(3, "rank 1: rank 0 failed")
    print("did all it had to")
"""


def test_a_process_with_a_call_that_has_no_end_ends():
    """CUDA waits for its GPUs when a process exits."""
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (1, "did all it had to\n"), ended.stderr
    assert "rank 1: rank 0 failed; its call on CUDA device 3 cannot be ended, so the process is" in ended.stderr
