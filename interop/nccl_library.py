"""NCCL's functions (nccl.h), called in the library that CuPy has loaded.

CuPy's own binding holds the GIL while NCCL starts, ends or aborts a communicator. Each of these may wait for other
ranks, and meanwhile no thread of the process could exchange messages about failed ranks. This binding releases the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

UINT8 = 1
SUM = 0
TYPES = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7,
         "float64": 8, "bfloat16": 9}  # fmt: skip
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC

ADDRESS, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    """The identifier by which ranks find each other."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


SIGNATURES = {
    "ncclGetVersion": (ADDRESS,),
    "ncclGetUniqueId": (ADDRESS,),
    "ncclCommInitRank": (ADDRESS, INT, UniqueId, INT),
    "ncclCommInitAll": (ADDRESS, INT, ADDRESS),
    "ncclCommDestroy": (ADDRESS,),
    "ncclCommAbort": (ADDRESS,),
    "ncclCommGetAsyncError": (ADDRESS, ADDRESS),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllGather": (ADDRESS, ADDRESS, SIZE, INT, ADDRESS, ADDRESS),
    "ncclReduceScatter": (ADDRESS, ADDRESS, SIZE, INT, INT, ADDRESS, ADDRESS),
    "ncclSend": (ADDRESS, SIZE, INT, INT, ADDRESS, ADDRESS),
    "ncclRecv": (ADDRESS, SIZE, INT, INT, ADDRESS, ADDRESS),
}
OF_WINDOWS = {  # NCCL 2.27 and newer
    "ncclMemAlloc": (ADDRESS, SIZE),
    "ncclMemFree": (ADDRESS,),
    "ncclCommWindowRegister": (ADDRESS, ADDRESS, SIZE, ADDRESS, INT),
    "ncclCommWindowDeregister": (ADDRESS, ADDRESS),
}


class NcclError(RuntimeError):
    """An error of one of NCCL's functions."""


@functools.cache
def library() -> Any:
    """The loaded NCCL library. Raises NcclError if CuPy has found none."""
    importlib.import_module("cupy.cuda.nccl")  # loads NCCL from where it is installed
    try:
        found = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        raise NcclError("CuPy has found no NCCL, expected libnccl.so.2, as in the package nvidia-nccl-cu13") from None
    found.ncclGetErrorString.restype = ctypes.c_char_p
    for name, arguments in (SIGNATURES | OF_WINDOWS).items():
        if hasattr(found, name):
            getattr(found, name).argtypes = arguments
    return found


def call(function: str, *arguments: Any) -> None:
    """Call an NCCL function. Raises NcclError, with NCCL's message, if it fails."""
    status = getattr(library(), function)(*arguments)
    if status:
        raise NcclError(f"{function}: {library().ncclGetErrorString(status).decode()}")


def has_windows() -> bool:
    """Whether this NCCL supports windows: memory registered on all ranks."""
    return all(hasattr(library(), name) for name in OF_WINDOWS)


def version() -> int:
    """NCCL's version: 22809 is 2.28.9."""
    found = INT()
    call("ncclGetVersion", ctypes.byref(found))
    return found.value


def unique_id() -> bytes:
    """Rank 0's identifier, which the other ranks need."""
    found = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(found))
    return bytes(found.bytes)


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A context whose NCCL calls on this thread are one group."""
    call("ncclGroupStart")
    try:
        yield
    finally:
        call("ncclGroupEnd")


class Communicator:
    """One rank's communicator. Addresses are on its device, streams are handles; calls return before they are done."""

    def __init__(self, handle: int | None) -> None:
        self.handle = handle

    @classmethod
    def of_rank(cls, size: int, address: bytes, rank: int) -> Communicator:
        """The communicator of this rank on the current device; waits for all other ranks."""
        handle = ADDRESS()
        identity = UniqueId.from_buffer_copy(address)
        call("ncclCommInitRank", ctypes.byref(handle), size, identity, rank)
        return cls(handle.value)

    @classmethod
    def of_devices(cls, devices: Sequence[int]) -> list[Communicator]:
        """The communicators of all ranks, one for each of these devices."""
        handles = (ADDRESS * len(devices))()
        call("ncclCommInitAll", handles, len(devices), (INT * len(devices))(*devices))
        return [cls(handle) for handle in handles]

    def all_gather(self, sent: int, received: int, nbytes: int, stream: int) -> None:
        call("ncclAllGather", sent, received, nbytes, UINT8, self.handle, stream)

    def reduce_scatter(self, sent: int, received: int, count: int, kind: int, stream: int) -> None:
        """`count` sums of the type `kind`, one of TYPES."""
        call("ncclReduceScatter", sent, received, count, kind, SUM, self.handle, stream)

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        call("ncclSend", address, nbytes, UINT8, peer, self.handle, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        call("ncclRecv", address, nbytes, UINT8, peer, self.handle, stream)

    def check(self) -> None:
        """Raises NcclError for an error that occurred after its call returned."""
        status = INT()
        call("ncclCommGetAsyncError", self.handle, ctypes.byref(status))
        if status.value:
            raise NcclError(library().ncclGetErrorString(status.value).decode())

    def destroy(self) -> None:
        """Destroy the communicator; waits for calls, for graphs with captured calls, and for other ranks."""
        call("ncclCommDestroy", self.handle)

    def abort(self) -> None:
        """Abort all running calls."""
        call("ncclCommAbort", self.handle)
