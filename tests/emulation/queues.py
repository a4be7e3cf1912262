"""The emulated devices and their streams: work of a stream runs in order, and as late as possible.

The last kernel of a stream waits for the next work queued there: if that is a kernel that may overlap with it
(programmatic dependent launch), that kernel starts first and this one runs where it is waited for. So a kernel that
does not wait (griddepcontrol.wait), or touches memory before it waits, sees nothing that the kernel ahead writes.

Work queued after `busy()` runs when something waits for it: a reader on another stream that does not wait is early.
"""

import ctypes
import threading

RELAXED = 2  # capture mode: this thread may make calls that would invalidate a capture
MOST_OVERLAPPING = 4  # kernels, each with the next; on a device it is two


class Device:
    """The emulated devices, 0 like Hopper and 1 like Ampere, with few SMs: small problems occupy all of them."""

    current = 0
    CAPABILITIES = ("90", "80")
    SHARED_KIB = ((227, 228), (163, 164))  # limits of a thread block, of a multiprocessor
    MULTIPROCESSORS = 4

    def __init__(self, number=None):
        self.id = Device.current if number is None else number
        self._before = []

    @property
    def compute_capability(self):
        return self.CAPABILITIES[self.id]

    @property
    def attributes(self):
        block, multiprocessor = (1024 * kib for kib in self.SHARED_KIB[self.id])
        return {
            "MultiProcessorCount": self.MULTIPROCESSORS,
            "MaxSharedMemoryPerBlockOptin": block,
            "MaxSharedMemoryPerMultiprocessor": multiprocessor,
        }

    def use(self):
        Device.current = self.id

    def synchronize(self):
        finish_everything()

    def __enter__(self):
        self._before.append(Device.current)
        Device.current = self.id
        return self

    def __exit__(self, *error):
        Device.current = self._before.pop()


_numbers = iter(range(1, 1 << 40))  # of streams


class Work:
    """An item of work. long: work after it is done only when something waits for it."""

    is_kernel = overlap = False

    def __init__(self, do, long=False):
        self.do, self.long = do, long

    def enqueue(self, stream):
        """Queue the work on a stream, as a graph does."""
        stream.add(self)


class KernelWork(Work):
    """A launch. overlap: whether it may start before the kernel ahead of it has ended."""

    is_kernel = True

    def __init__(self, launch, overlap):
        super().__init__(launch.run)
        self.launch, self.overlap = launch, overlap


class Queue:
    """The queue of a stream; `done` counts all finished works.

    Attributes:
        graph: the Capture that records it instead
        number: of the stream, unlike every other one's
        running: works in progress: memory that is freed meanwhile still belongs to them
    """

    def __init__(self):
        self.works, self.running, self.done, self.graph = [], [], 0, None
        self.number = next(_numbers)

    @property
    def end(self):
        return self.done + len(self.works)

    def add(self, work):
        if self.graph is not None:
            self.graph.append(self, work)
            return
        self.works.append(work)
        if not any(x.long for x in self.works):
            self._advance(self.end, keep_kernel=True)

    def finish(self, end=None):
        """Do all queued work, or the work up to position `end` of the queue."""
        if self.graph is not None:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported: a stream that is being captured is waited for")
        self._advance(self.end if end is None else end, keep_kernel=False)

    def start_early(self):
        """Do what a kernel finds done that is launched to overlap and does not wait: all but the last kernel, and the
        kernels that it overlaps with."""
        ahead = self.works[-MOST_OVERLAPPING:]
        count = int(bool(ahead) and ahead[-1].is_kernel)
        while 0 < count < len(ahead) and ahead[-count].overlap and ahead[-count - 1].is_kernel:
            count += 1
        self.finish(self.end - count)

    def _advance(self, end, keep_kernel):
        while self.done < end:
            count = self._overlapping(end - self.done)
            at_end = count == len(self.works) and count < MOST_OVERLAPPING
            if keep_kernel and at_end and self.works[0].is_kernel:
                return
            run, self.works = self.works[:count], self.works[count:]
            self.done += count
            for kernel, ahead in zip(run[1:], run, strict=False):
                kernel.launch.ahead = ahead.launch
            before, self.running = self.running, [*self.running, *run]
            try:
                run[-1].do()
            finally:
                self.running = before

    def _overlapping(self, most):
        """Number of next works that run together: a kernel and successors that overlap with the kernel ahead."""
        count, works = 1, self.works[: min(most, MOST_OVERLAPPING)]
        while count < len(works) and works[count - 1].is_kernel and works[count].overlap:
            count += 1
        return count


_queues = {0: Queue()}  # by handle
_lock = threading.RLock()
_captures = iter(range(1 << 40))
_handles = iter(range(0x10000, 1 << 40, 16))
kept = []  # released memory that queued work may use


def queue_of(handle):
    """Handles 0 and 1 are both the default stream."""
    return _queues[0 if handle == 1 else handle]


def finish_everything():
    with _lock:
        for queue in list(_queues.values()):
            if queue.graph is None:
                queue.finish()
        kept.clear()


def forget_everything():
    """Drop all queued work."""
    _queues.clear()
    _queues[0] = Queue()
    kept.clear()


def is_anything_queued():
    return any(queue.works or queue.running or queue.graph is not None for queue in _queues.values())


class _Current(threading.local):
    """State of a thread: handles of the current streams by device; its capture mode."""

    def __init__(self):
        self.streams, self.capture_mode = {}, 0


_thread = _Current()


class Stream:
    """cupy.cuda.Stream. No stream waits for the default stream implicitly."""

    def __init__(self, null=False, non_blocking=False, handle=None):
        self.ptr = 0 if null else next(_handles) if handle is None else handle
        _queues.setdefault(self.ptr, Queue())

    @classmethod
    def from_external(cls, stream):
        return cls(handle=stream.__cuda_stream__()[1])

    def __cuda_stream__(self):
        return 0, self.ptr

    def add(self, work):
        """Queue Work, or a function."""
        with _lock:
            queue_of(self.ptr).add(work if isinstance(work, Work) else Work(work))

    def destroy(self):
        """The next stream may get its handle."""
        del _queues[self.ptr]

    def busy(self):
        """Later work on the stream is done only when something waits for it."""
        self.add(Work(lambda: None, long=True))

    def synchronize(self):
        with _lock:
            queue_of(self.ptr).finish()

    def start_early(self):
        with _lock:
            queue_of(self.ptr).start_early()

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        queue = queue_of(self.ptr)
        if event.capture is not None:
            event.capture.joined(event, queue)
        elif queue.graph is not None:
            raise RuntimeError("cudaErrorStreamCaptureIsolation: a stream that is being captured waits for another")
        else:
            self.add(event.synchronize)

    def is_capturing(self):
        return queue_of(self.ptr).graph is not None

    def begin_capture(self, mode=0):
        Capture(queue_of(self.ptr))

    def end_capture(self):
        return Graph(queue_of(self.ptr).graph.end(queue_of(self.ptr)))

    def __enter__(self):
        _thread.streams.setdefault(Device.current, []).append(self)
        return self

    def __exit__(self, *error):
        _thread.streams[Device.current].pop()


DEFAULT = Stream(null=True)


def current_stream(device=None):
    streams = _thread.streams.get(Device.current if device is None else device)
    return streams[-1] if streams else DEFAULT


class Capture:
    """A graph being captured: the work of a stream, and of others that joined by an event, in the order of the calls.

    Attributes:
        ends: by queue that takes part, how much of it the queue that began the capture waits for, and how much there is
    """

    def __init__(self, origin):
        origin.finish()
        self.works, self.origin, self.number, self.ends = [], origin, next(_captures), {origin: [0, 0]}
        origin.graph = self

    def append(self, queue, work):
        self.works.append(work)
        self.ends[queue][1] += 1

    def joined(self, event, queue):
        """`queue` waits for an event of this capture, and joins it."""
        if queue.graph is None:
            queue.finish()
            queue.graph, self.ends[queue] = self, [0, 0]
        if queue.graph is not self:
            raise RuntimeError("cudaErrorStreamCaptureIsolation: an event of another capture")
        if queue is self.origin:
            self.ends[event.queue][0] = max(self.ends[event.queue][0], event.end)
        elif queue is not event.queue:
            self.append(queue, Work(lambda: None))  # the stream must be joined, too

    def end(self, queue):
        if queue is not self.origin:
            raise RuntimeError("cudaErrorStreamCaptureUnmatched: a capture ends on another stream than it began on")
        for other, (waited_for, there) in self.ends.items():
            other.graph = None
            if other is not queue and waited_for < there:
                raise RuntimeError("cudaErrorStreamCaptureUnjoined: a graph ends before a stream that takes part")
        return self.works


class Graph:
    def __init__(self, works):
        self.works = works

    @property
    def graph(self):
        return id(self)

    def launch(self, stream=None):
        for work in self.works:
            work.enqueue(stream or current_stream())


class Event:
    """capture: the capture in which the event was recorded, if any."""

    def __init__(self, *flags, **more):
        self.queue, self.end, self.capture = queue_of(0), 0, None

    def record(self, stream=None):
        self.queue = queue_of((stream or current_stream()).ptr)
        self.capture = self.queue.graph
        self.end = self.queue.end if self.capture is None else self.capture.ends[self.queue][1]

    @property
    def done(self):
        refuse_in_capture("an event is asked for")
        return self.queue.done >= self.end

    def synchronize(self):
        with _lock:
            self.queue.finish(self.end)


def refuse_in_capture(what):
    """Raises for calls that would invalidate a capture, unless this thread captures in relaxed mode."""
    if _thread.capture_mode != RELAXED and any(queue.graph is not None for queue in _queues.values()):
        raise RuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} while a graph is being captured")


def exchange_capture_mode(mode):
    """cuThreadExchangeStreamCaptureMode, for a reference to a C int."""
    _thread.capture_mode, mode._obj.value = mode._obj.value, _thread.capture_mode
    return 0


def graph_nodes(graph, nodes, count):
    """cuGraphGetNodes, for a reference to the number of nodes."""
    count._obj.value = len(ctypes.cast(graph, ctypes.py_object).value.works)
    return 0


def capture_info(handle, status, number, *more):
    """cuStreamGetCaptureInfo_v2, for references to its results."""
    capture = queue_of(handle.value or 0).graph
    status._obj.value, number._obj.value = capture is not None, 0 if capture is None else capture.number
    return 0


def capture_mode():
    return _thread.capture_mode


def stream_number(handle, number):
    """cuStreamGetId."""
    number._obj.value = queue_of(handle.value or 0).number
    return 0
