"""A communicator of `cumla.parallel` on NCCL without a framework, in the library that CuPy includes or finds.

    # a process a GPU, started by any launcher; the folder is empty at the start and seen by all
    comm = NcclCommunicator(FileStore(folder), rank, size)
    comm = NcclCommunicator.from_mpi(MPI.COMM_WORLD)            # under mpirun
    # several GPUs in one process: a thread for each communicator
    comms = NcclCommunicator.in_process([0, 1])

Calls are queued on the caller's current CuPy stream (or on `stream`) and return at once; they can be captured in CUDA
graphs. Before the first call of new shapes, ranks compare the calls on the host; if they differ, a RankError names the
ranks. Later calls of these shapes need no exchange on the host. `wait` synchronises a stream with a time limit: it
checks for errors and failed ranks, gives up after the limit and names the missing ranks. A thread of the communicator
does the same for calls without a `wait`, so that no rank stays in a call that another rank has left.

Ranks of one process synchronise on the host at each call, unless it is captured. Otherwise one rank's call could run on
its GPU while another thread allocates CUDA memory: the allocation waits for that GPU, and the call waits for that
thread. For graphs the caller must prevent this: synchronise the ranks before they launch graphs, if anything else
allocates.
"""

from __future__ import annotations

import collections
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import cupy

from ..arrays import dlpack, streams
from ..dispatch.values import check_flags
from ..kernels.cuda.ordinary import ordinary_launch
from ..parallel.agreement import Agreement, RankError, names
from ..parallel.communicator import Move, as_tuple, described, moves, result_of, sent_bytes
from ..parallel.store import MemoryStore, Store, TcpStore
from . import nccl_endings
from .nccl_library import TYPES, Communicator, group, unique_id, version
from .nccl_windows import Windows, starts_early

POLL_SECONDS = 0.2  # interval of the thread that watches calls


class NcclCommunicator:
    """One rank of NCCL on one GPU. As a context manager, it reports an exception that ends the context to the others.

    Args:
        store: a FileStore or TcpStore for processes, used by this run only
        rank, size: this rank, and the number of ranks
        device: CUDA device; None: CuPy's current one
        time_limit: seconds that a rank waits for others, at the start, before calls of new shapes (ranks of one
            process: before all calls that are not captured) and in `wait`
        windows: whether `memory` returns symmetric windows, which NCCL (2.27 or newer) registers on all GPUs: gathering
            megabytes takes two thirds of the time. But NCCL cannot abort a call on windows. If a rank fails during such
            a call, the others get their RankError in time, but their GPU waits forever: the process cannot use the GPU
            any more, and is ended by force when it exits. And with NCCL 2.28 to 2.30.4 each exchange is preceded by an
            ordinary launch, because these versions do not wait for the kernel that writes the window. All ranks pass
            the same value

    Raises RankError, which names the rank, if a rank is missing, fails, has another number of ranks, or has the same
    GPU as another; if `windows` differs, the error names each rank's value.

    Attributes:
        traffic: bytes that this rank has sent, by function; calls in a graph count when they are captured
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: int | None = None,
        time_limit: float = 60.0,
        windows: bool = False,
        _made: Any = None,
    ) -> None:
        check_flags(windows=windows)
        self.rank, self.size, self.time_limit = rank, size, time_limit
        self.device = cupy.cuda.Device().id if device is None else device
        self.traffic: collections.Counter[str] = collections.Counter()
        self._agreement = Agreement(store, rank, size, time_limit)
        self._known: set[Any] = set()
        self._last_words, self._calls, self._memories = "nothing", 0, 0
        self._in_step, self._published = _made is not None and size > 1, 0
        self._error: RankError | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        with cupy.cuda.Device(self.device):
            self._unended: tuple[Any, float] | None = None
            self._event = cupy.cuda.Event(disable_timing=True)
            try:
                self._comm = self._join(windows) if _made is None else self._meet(windows, _made)
                self._windows = Windows(self._comm, windows)
                self._starts_early = starts_early(version(), windows)
                if self._starts_early:
                    ordinary_launch()  # loads the kernel, which a capture could not
            except BaseException as error:
                self._agreement.end(error)
                raise
        threading.Thread(target=self._watch, daemon=True, name=f"NCCL rank {rank}").start()

    @classmethod
    def in_process(
        cls, devices: Sequence[int], time_limit: float = 60.0, *, windows: bool = False
    ) -> list[NcclCommunicator]:
        """A communicator for each of these GPUs; each must be used by its own thread."""
        store, communicators = MemoryStore(), Communicator.of_devices(devices)
        found: list[Any] = [None] * len(devices)
        errors: list[BaseException] = []

        def make(rank: int) -> None:
            try:
                found[rank] = cls(
                    store, rank, len(devices), device=devices[rank], time_limit=time_limit, windows=windows,
                    _made=communicators[rank],
                )  # fmt: skip
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(len(devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    @classmethod
    def from_mpi(
        cls, mpi: Any, *, device: int | None = None, time_limit: float = 60.0, windows: bool = False
    ) -> NcclCommunicator:
        """For processes of mpirun. `mpi` is mpi4py's communicator, used once to broadcast the address of rank 0."""
        host = socket.gethostname() if mpi.Get_size() > 1 else "127.0.0.1"
        place: Any = None
        if mpi.Get_rank() == 0:
            key = nccl_key()
            try:
                place = (TcpStore.serve(key, host=socket.gethostbyname(host)), key)
            except OSError as error:  # broadcast the error: the others wait for the broadcast
                place = RankError([0], f"rank 0 cannot be reached at its host name, {host}: {error}")
        place = mpi.bcast(place, root=0)
        if isinstance(place, RankError):
            raise place
        address, key = place
        return cls(TcpStore(address, key, time_limit), mpi.Get_rank(), mpi.Get_size(), device=device,
                   time_limit=time_limit, windows=windows)  # fmt: skip

    def memory(self, nbytes: int, like: Any) -> Any:
        """uint8 [nbytes], in a window if NCCL has windows; allocated until the communicator is closed."""
        with cupy.cuda.Device(self.device):
            self._publish(("memory", self._memories, nbytes), f"memory of {nbytes} bytes")
            self._memories += 1
            found = self._windows.memory(nbytes)
            return cupy.empty(nbytes, "uint8") if found is None else found

    # ---- the three collectives

    def all_gather(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        def enqueue(move: Move, handle: int) -> None:
            self._comm.all_gather(move.sent.data.ptr, move.received.data.ptr, move.sent.nbytes, handle)

        return self._run("all_gather", x, out, stream, enqueue)

    def reduce_scatter(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        def enqueue(move: Move, handle: int) -> None:
            kind = TYPES.get(move.sent.dtype.name)
            if kind is None:
                raise TypeError(f"x: got dtype {move.sent.dtype}, expected one of {', '.join(TYPES)} to be summed")
            received = move.received
            self._comm.reduce_scatter(move.sent.data.ptr, received.data.ptr, received.size, kind, handle)

        return self._run("reduce_scatter", x, out, stream, enqueue)

    def all_to_all(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        def enqueue(move: Move, handle: int) -> None:
            part = move.sent.nbytes // self.size
            for peer in range(self.size):
                self._comm.send(move.sent.data.ptr + peer * part, part, peer, handle)
                self._comm.receive(move.received.data.ptr + peer * part, part, peer, handle)

        return self._run("all_to_all", x, out, stream, enqueue)

    def _run(self, op: str, x: Any, out: Any, stream: Any, enqueue: Callable[[Move, int], None]) -> Any:
        first = next(iter(as_tuple(x)), None)
        framework, native = dlpack.framework_of(first), dlpack.borrow(first, "x")
        if not isinstance(native, cupy.ndarray) or native.device.id != self.device:
            raise ValueError(f"x: got an array elsewhere, expected it on CUDA device {self.device}, this rank's")
        with streams.callers(native, framework, stream):
            arrays = moves(op, self.rank, self.size, x, out)
            if op == "all_to_all" and any(self._windows.has(array.data.ptr) for move in arrays for array in move):
                raise ValueError("x, out: got memory of memory(), expected other memory (NCCL sends parts of it)")
            key = op, tuple((move.sent.shape, move.sent.dtype) for move in arrays)
            current = cupy.cuda.get_current_stream()
            in_step = self._in_step and not streams.is_capturing(current.ptr)
            if in_step or key not in self._known:
                self._publish(key, described(op, arrays))
            with self._lock:
                self._raise_error()
                if self._starts_early:
                    ordinary_launch()
                with group():
                    for move in arrays:
                        if move.sent.nbytes:
                            enqueue(move, current.ptr)
                self._calls, self._last_words = self._calls + 1, op
                if not streams.is_capturing(current.ptr):
                    self._event.record(current)
                    self._unended = self._event, time.monotonic()
            if in_step:
                self._agree(f"the end of call {self._published}", op)
            self.traffic[op] += sent_bytes(op, self.size, arrays)
            return result_of(x, arrays, framework)

    def _publish(self, key: Any, words: str) -> None:
        """Check once that all ranks are about to make this call."""
        self._raise_error()
        self._published += 1
        self._agree(f"published call {self._published}", words)
        self._known.add(key)

    def _agree(self, what: str, words: str) -> None:
        try:
            self._agreement.agree(what, words)
        except RankError as error:
            self._give_up(error)
            raise

    # ---- the start and the end

    def _join(self, windows: bool) -> Any:
        """NCCL's communicator, created in a thread that may hang."""
        address = unique_id() if self.rank == 0 else None
        address = self._meet(windows, None, address)
        started: list[Any] = []

        def make() -> None:
            try:
                with cupy.cuda.Device(self.device):
                    started.append(Communicator.of_rank(self.size, address, self.rank))
            except Exception as error:
                started.append(error)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        end = time.monotonic() + self.time_limit
        while thread.is_alive():
            thread.join(0.05)
            self._agreement.check_others(what="start NCCL", failed_only=True)  # a rank may have finished already
            if time.monotonic() > end:
                raise RankError([self.rank], f"rank {self.rank} did not start NCCL within {self.time_limit:g} s")
        if isinstance(started[0], Exception):
            raise started[0]
        return started[0]

    def _meet(self, windows: bool, made: Any, address: Any = None) -> Any:
        """Find all ranks and check that their sizes and `windows` agree and their GPUs differ.

        Returns `made`, or rank 0's address.
        """
        gpu = cupy.cuda.runtime.deviceGetPCIBusId(self.device)
        mine = self.size, bool(windows), (socket.gethostname(), gpu), address
        everyones = self._agreement.exchange("the start", mine)
        self._agreement.same("the start", [f"{size} ranks" for size, *_ in everyones])
        with_, without = ([rank for rank, word in enumerate(everyones) if word[1] == value] for value in (True, False))
        if with_ and without:
            raise RankError(
                min(without, with_, key=len),
                f"windows: got True on {names(with_)} and False on {names(without)}, expected the same on all ranks",
            )
        places = [place for _, _, place, _ in everyones]
        for rank, place in enumerate(places):
            if place in places[:rank]:
                raise RankError(
                    [rank], f"rank {rank} got GPU {place[1]} of {place[0]}, which rank {places.index(place)} has"
                )
        return everyones[0][-1] if made is None else made

    def wait(self, stream: Any = None, time_limit: float | None = None) -> None:
        """Wait until all work on a stream is done, including graphs with calls; None: CuPy's current stream.

        Raises RankError if a rank fails or ends, or if the wait exceeds the time limit: all waiting ranks then report
        their call, and the error names ranks that report nothing or another call.
        """
        limit = self.time_limit if time_limit is None else time_limit
        with cupy.cuda.Device(self.device):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(None if stream is None else streams.of_handle(streams.handle_of(stream), self.device))
            start, pause = time.monotonic(), 0.0
            while not event.done:
                self._raise_error()
                passed = time.monotonic() - start
                if passed > limit:
                    self._late(limit)
                if passed > 0.001:
                    pause = min(0.005, pause + 0.0001)
                time.sleep(pause)
        self._raise_error()

    def _late(self, limit: float) -> None:
        """Find the ranks that the others wait for, and give up."""
        error = RankError([self.rank], f"rank {self.rank}: {self._last_words} did not end within {limit:g} s")
        try:
            words = f"call {self._calls}, {self._last_words}"
            self._agreement.same(
                "the call that ranks wait for", self._agreement.exchange("give up", words, nccl_endings.GRACE_SECONDS)
            )
        except RankError as found:
            error = RankError(found.ranks, f"{error}: {found}")
        self._give_up(error)
        raise error

    def _watch(self) -> None:
        """Abort calls that will never end, until the communicator is closed."""
        while not self._over.wait(POLL_SECONDS):
            try:
                self._agreement.check_others(what=f"end {self._last_words}", failed_only=True)
                with self._lock, streams.relaxed_capture():  # another thread may be capturing
                    if self._unended is not None and self._unended[0].done:
                        self._unended = None
                    since = None if self._unended is None else self._unended[1]
                    if self._error is None and not self._over.is_set():
                        self._comm.check()
                if since is not None and time.monotonic() - since > self.time_limit + nccl_endings.GRACE_SECONDS:
                    raise RankError([self.rank], f"rank {self.rank}: {self._last_words} did not end in time")
            except RankError as error:
                self._give_up(error)
                return
            except Exception as error:
                self._give_up(RankError([self.rank], f"rank {self.rank}: {type(error).__name__}: {error}"))
                return

    def _give_up(self, error: RankError) -> None:
        """Abort the calls that the GPU waits for, and report the error to the others."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._over.set()
            self._agreement.end(error)
            nccl_endings.in_time(self._abort)
            if self._windows:
                nccl_endings.end_process_if_stuck(self.device, f"rank {self.rank}: {error}")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RankError(self._error.ranks, str(self._error))

    def close(self) -> None:
        """Report that this rank makes no more calls, and release NCCL. NCCL waits until all ranks have made the same
        calls and all graphs with captured calls are freed; if it waits too long, a RuntimeWarning says so.
        """
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            self._agreement.end()
            failed = nccl_endings.in_time(self._let_go)
            if failed:
                warnings.warn(f"rank {self.rank}: {failed}", RuntimeWarning, stacklevel=2)

    def _let_go(self) -> None:
        """Release NCCL. Waits for other ranks, and for all other work on the GPU.

        Windows are deregistered first: NCCL 2.28 crashes if it ends while memory that was sent from is registered.
        """
        with cupy.cuda.Device(self.device), streams.relaxed_capture():  # another thread may be capturing
            cupy.cuda.Device().synchronize()
            self._windows.deregister()
            self._comm.destroy()
            self._windows.free()

    def _abort(self) -> None:
        with cupy.cuda.Device(self.device), streams.relaxed_capture():
            self._comm.abort()

    def __enter__(self) -> NcclCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._agreement.end(error)
            self._give_up(RankError([self.rank], f"{names([self.rank])} failed: {type(error).__name__}: {error}"))


def nccl_key() -> bytes:
    """A secret for a run."""
    import secrets

    return secrets.token_bytes(32)
