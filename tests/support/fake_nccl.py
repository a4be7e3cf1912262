"""cupy.cuda.nccl between threads, for emulated devices: calls wait for the stream, and then for the other ranks."""

import collections
import contextlib
import ctypes
import queue
import sys
import threading
import types
from typing import ClassVar
from unittest import mock

import numpy as np

import emulation

SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
SECONDS = 20  # until a call gives up


class NcclError(RuntimeError):
    pass


class NcclCommunicator:
    MAIL: ClassVar[dict] = collections.defaultdict(
        lambda: collections.defaultdict(queue.Queue)
    )  # of a run, by (from, to)

    def __init__(self, size, address, rank):
        self._size, self._rank, self._mail, self.ended = size, rank, self.MAIL[address], None

    @classmethod
    def initAll(cls, devices):  # noqa: N802 (CuPy's name)
        address = get_unique_id()
        return [cls(len(devices), address, rank) for rank in range(len(devices))]

    def send(self, address, count, kind, peer, stream):
        _finish(stream)
        self._mail[self._rank, peer].put(ctypes.string_at(address, count * SIZES[kind]))

    def recv(self, address, count, kind, peer, stream):
        try:
            words = self._mail[peer, self._rank].get(timeout=SECONDS)
        except queue.Empty:
            raise NcclError(f"nothing from {peer}") from None
        assert len(words) == count * SIZES[kind]
        ctypes.memmove(address, words, len(words))

    def allGather(self, sent, received, count, kind, stream):  # noqa: N802
        for peer in range(self._size):
            self.send(sent, count, kind, peer, stream)
        for peer in range(self._size):
            self.recv(received + peer * count * SIZES[kind], count, kind, peer, stream)

    def reduceScatter(self, sent, received, count, kind, op, stream):  # noqa: N802
        assert (kind, op) == (7, 0)
        for peer in range(self._size):
            self.send(sent + 4 * count * peer, count, kind, peer, stream)
        part, total = np.empty(count, np.float32), np.zeros(count, np.float32)
        for peer in range(self._size):
            self.recv(part.ctypes.data, count, kind, peer, stream)
            total += part
        ctypes.memmove(received, total.ctypes.data, total.nbytes)

    def check_async_error(self):
        assert self.ended is None

    def destroy(self):
        self.ended = "destroyed"

    def abort(self):
        self.ended = "aborted"


_addresses = iter(range(1 << 30))


def get_unique_id():
    return next(_addresses)


def _finish(stream):
    sys.modules["cupy"].cuda.Stream(handle=stream).synchronize()


def _thread_as_gpu(device):
    return str(threading.get_ident())


@contextlib.contextmanager
def devices():
    """An emulated device that all ranks have, with NCCL between them: to a rank's thread it is another one."""
    with emulation.devices():
        cupy = sys.modules["cupy"]
        fake = types.ModuleType("cupy.cuda.nccl")
        for name in ("NcclCommunicator", "get_unique_id", "NcclError"):
            setattr(fake, name, globals()[name])
        fake.groupStart = fake.groupEnd = lambda: None
        cupy.cuda.nccl = fake
        gpus = mock.patch.object(cupy.cuda.runtime, "deviceGetPCIBusId", _thread_as_gpu, create=True)
        with gpus, mock.patch.dict(sys.modules, {"cupy.cuda.nccl": fake}):
            sys.modules.pop("cumla.interop.nccl", None)
            yield
            sys.modules.pop("cumla.interop.nccl", None)
