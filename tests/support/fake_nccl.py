"""NCCL between threads, for emulated devices: calls wait for the stream, and then for the other ranks."""

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

SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
SECONDS = 20  # until a call gives up


class Rank:
    """The object of a communicator's handle."""

    MAIL: ClassVar[dict] = collections.defaultdict(
        lambda: collections.defaultdict(queue.Queue)
    )  # messages of a run, by (from, to)

    def __init__(self, size, address, rank):
        self.size, self.rank, self.mail, self.ended = size, rank, self.MAIL[address], None


class Library:
    """NCCL's functions, by their names and parameters in nccl.h; those of windows are in LibraryWithWindows."""

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

    def ncclSend(self, address, count, kind, peer, handle, stream):
        _finish(stream)
        rank = self.of(handle)
        rank.mail[rank.rank, peer].put(ctypes.string_at(address, count * SIZES[kind]))
        return 0

    def ncclRecv(self, address, count, kind, peer, handle, stream):
        rank = self.of(handle)
        try:
            words = rank.mail[peer, rank.rank].get(timeout=SECONDS)
        except queue.Empty:
            return 1
        assert len(words) == count * SIZES[kind]
        ctypes.memmove(address, words, len(words))
        return 0

    def ncclAllGather(self, sent, received, count, kind, handle, stream):
        peers = range(self.of(handle).size)
        for peer in peers:
            self.ncclSend(sent, count, kind, peer, handle, stream)
        return max(self.ncclRecv(received + p * count * SIZES[kind], count, kind, p, handle, stream) for p in peers)

    def ncclReduceScatter(self, sent, received, count, kind, op, handle, stream):
        assert (kind, op) == (7, 0)
        peers = range(self.of(handle).size)
        for peer in peers:
            self.ncclSend(sent + 4 * count * peer, count, kind, peer, handle, stream)
        part, total = np.empty(count, np.float32), np.zeros(count, np.float32)
        for peer in peers:
            if self.ncclRecv(part.ctypes.data, count, kind, peer, handle, stream):
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
    def __init__(self):
        super().__init__()
        self.held, self.windows, self.registered = {}, [], set()

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


def _finish(stream):
    sys.modules["cupy"].cuda.Stream(handle=stream).synchronize()


def _thread_as_gpu(device):
    return str(threading.get_ident())


@contextlib.contextmanager
def devices():
    """An emulated device that all ranks have, with NCCL between them: to a rank's thread it is another one."""
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
