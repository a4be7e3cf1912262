"""NCCL between threads, for emulated devices: calls wait for the stream, and then for the other ranks.

Kernels for windows are launched to overlap with the kernel ahead of them; some versions of NCCL do not wait for it.
"""

# ruff: noqa: N802 (NCCL's names)

import collections
import contextlib
import ctypes
import queue
import sys
import threading
from typing import ClassVar
from unittest import mock

import numpy as np

import emulation
from emulation import queues

SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
SECONDS = 20  # until a call gives up


class Rank:
    """The object behind a communicator's handle."""

    MAIL: ClassVar[dict] = collections.defaultdict(
        lambda: collections.defaultdict(queue.Queue)
    )  # messages of a run, by (from, to)

    def __init__(self, size, address, rank):
        self.size, self.rank, self.mail, self.ended = size, rank, self.MAIL[address], None


class Collective(queues.Work):
    """A call, run by the launching thread, because it waits for other ranks.

    Args:
        early: whether it starts like a kernel that is launched to overlap and does not wait
    """

    def __init__(self, do, early):
        super().__init__(do)
        self.early = early

    def enqueue(self, stream):
        if self.early:
            stream.start_early()
        else:
            stream.synchronize()
        return self.do()


class Library:
    """NCCL's functions, with the names and parameters of nccl.h; LibraryWithWindows has the functions of windows."""

    VERSION = 22606

    def __init__(self):
        self.ranks, self._addresses, self._lock = [], iter(range(1 << 30)), threading.Lock()

    def of(self, handle):
        return self.ranks[handle - 1]

    def _join(self, size, address, rank):
        with self._lock:
            self.ranks.append(Rank(size, address, rank))
            return len(self.ranks)

    def ncclGetErrorString(self, status):
        return b"out of order"

    def ncclGetVersion(self, version):
        version._obj.value = self.VERSION
        return 0

    def ncclGetUniqueId(self, identity):
        ctypes.memmove(identity, next(self._addresses).to_bytes(128, "little"), 128)
        return 0

    def ncclCommInitRank(self, handle, size, identity, rank):
        handle._obj.value = self._join(size, bytes(identity.bytes), rank)
        return 0

    def ncclCommInitAll(self, handles, size, devices):
        address = next(self._addresses)
        handles[:] = [self._join(size, address, rank) for rank in range(size)]
        return 0

    def ncclGroupStart(self):
        return 0

    def ncclGroupEnd(self):
        return 0

    def _call(self, stream, do, early=False):
        """Make a call, or record it in the graph being captured."""
        stream, collective = sys.modules["cupy"].cuda.Stream(handle=stream), Collective(do, early)
        if stream.is_capturing():
            stream.add(collective)
            return 0
        return collective.enqueue(stream)

    def ncclSend(self, address, count, kind, peer, handle, stream):
        return self._call(stream, lambda: self._send(address, count * SIZES[kind], peer, handle))

    def ncclRecv(self, address, count, kind, peer, handle, stream):
        return self._call(stream, lambda: self._receive(address, count * SIZES[kind], peer, handle))

    def _send(self, address, size, peer, handle):
        rank = self.of(handle)
        rank.mail[rank.rank, peer].put(ctypes.string_at(address, size))
        return 0

    def _receive(self, address, size, peer, handle):
        rank = self.of(handle)
        try:
            words = rank.mail[peer, rank.rank].get(timeout=SECONDS)
        except queue.Empty:
            return 1
        assert len(words) == size
        ctypes.memmove(address, words, len(words))
        return 0

    def ncclAllGather(self, sent, received, count, kind, handle, stream):
        return self._call(stream, lambda: self._gather(sent, received, count * SIZES[kind], handle))

    def _gather(self, sent, received, size, handle):
        peers = range(self.of(handle).size)
        for peer in peers:
            self._send(sent, size, peer, handle)
        return max(self._receive(received + peer * size, size, peer, handle) for peer in peers)

    def ncclReduceScatter(self, sent, received, count, kind, op, handle, stream):
        assert (kind, op) == (7, 0)
        return self._call(stream, lambda: self._reduce(sent, received, count, handle))

    def _reduce(self, sent, received, count, handle):
        peers = range(self.of(handle).size)
        for peer in peers:
            self._send(sent + 4 * count * peer, 4 * count, peer, handle)
        part, total = np.empty(count, np.float32), np.zeros(count, np.float32)
        for peer in peers:
            if self._receive(part.ctypes.data, part.nbytes, peer, handle):
                return 1
            total += part
        ctypes.memmove(received, total.ctypes.data, total.nbytes)
        return 0

    def ncclCommGetAsyncError(self, handle, status):
        assert self.of(handle).ended is None
        return 0

    def ncclCommDestroy(self, handle):
        self.of(handle).ended = "destroyed"
        return 0

    def ncclCommAbort(self, handle):
        self.of(handle).ended = "aborted"
        return 0


class LibraryWithWindows(Library):
    """version  of NCCL; from 2.28 to before 2.30.7 kernels for windows do not wait for the kernel ahead of them"""

    def __init__(self, version=22809):
        super().__init__()
        self.VERSION = version
        self.held, self.windows, self.registered = {}, [], set()

    def _is_in_window(self, address):
        return any(start <= address < start + size for _, start, size, _ in self.windows)

    def ncclAllGather(self, sent, received, count, kind, handle, stream):
        early = self._is_in_window(sent) and self._is_in_window(received) and 22800 <= self.VERSION < 23007
        return self._call(stream, lambda: self._gather(sent, received, count * SIZES[kind], handle), early)

    def ncclMemAlloc(self, address, size):
        memory = ctypes.create_string_buffer(size)
        address._obj.value = ctypes.addressof(memory)
        self.held[address._obj.value] = memory
        return 0

    def ncclCommWindowRegister(self, handle, address, size, window, flags):
        self.windows.append((self.of(handle).rank, address, size, flags))
        window._obj.value = len(self.windows)
        self.registered.add((handle, len(self.windows)))
        return 0

    def ncclCommWindowDeregister(self, handle, window):
        assert self.of(handle).ended is None
        self.registered.remove((handle, window))
        return 0

    def ncclCommDestroy(self, handle):
        assert all(of != handle for of, _ in self.registered), "NCCL crashes"
        return super().ncclCommDestroy(handle)

    def ncclMemFree(self, address):
        del self.held[address]
        return 0


def _thread_as_gpu(device):
    return str(threading.get_ident())


@contextlib.contextmanager
def devices():
    """One emulated device for all ranks, with NCCL between them; each rank's thread sees a different device."""
    with emulation.devices():
        from cumla.interop import nccl_library

        runtime = sys.modules["cupy"].cuda.runtime
        made = Library()
        with (
            mock.patch.object(runtime, "deviceGetPCIBusId", _thread_as_gpu, create=True),
            mock.patch.object(nccl_library, "library", return_value=made),
        ):
            sys.modules.pop("cumla.interop.nccl", None)
            yield
            sys.modules.pop("cumla.interop.nccl", None)


def on_ranks(comms, function):
    """The result or exception of each, in a thread per rank."""
    results = [None] * len(comms)

    def run(comm):
        try:
            sys.modules["cupy"].cuda.Device(comm.device).use()
            with comm:
                results[comm.rank] = function(comm)
        except BaseException as error:
            results[comm.rank] = error

    comms = [comm for comm in comms if not isinstance(comm, BaseException) or _raise(comm)]
    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return results


def _raise(error):
    raise error


def ended(comm):
    """The way in which NCCL's communicator ended."""
    from cumla.interop import nccl_library

    return nccl_library.library().of(comm._comm.handle).ended


def joined(nccl, sizes, time_limit=10, windows=None):
    """Communicators that join like processes, or their errors. windows: each rank's argument."""
    from cumla.parallel import MemoryStore

    store, made = MemoryStore(), [None] * len(sizes)

    def join(rank):
        options = {} if windows is None else {"windows": windows[rank]}
        try:
            made[rank] = nccl.NcclCommunicator(store, rank, sizes[rank], time_limit=time_limit, **options)
        except BaseException as error:
            made[rank] = error

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return made
