"""One call of a public function: borrows and checks its arrays, and exports its results.

Every public function starts a `Call`, takes its arguments through it in order, and only then writes:

    call = Call(backend, stream)
    topk = call.array("topk_indices", topk_indices, INT32, ("T", "K"))
    lens = call.output("topk_lens", None, INT32, ("T",))
    with call.kernels("indices") as kernels:
        kernels.some_function(topk, lens)
    return call.results()

A dimension given as a name must have the same size wherever the name is used; -1 is any size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import dlpack, streams
from ..arrays.dlpack import Argument
from ..arrays.memory import coincide, extent, share_elements
from ..kernels.check_results import FAILED, check_not_failed
from ..kernels.cuda.ordinary import ordinary_launch
from ..kernels.types.stream_workspace import MOST_BYTES, workspace_of_stream
from . import debug, dry_run
from .backends import choose, kernels
from .launch_cache import record_output, record_written
from .values import check_flags

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INT32 = (np.dtype(np.int32),)
SLOTS = (np.dtype(np.int64), np.dtype(np.int32))
BOOL = (np.dtype(np.bool_),)
FLOAT32 = (np.dtype(np.float32),)
BF16 = (BFLOAT16,)
FLOATS = (BFLOAT16, np.dtype(np.float16), np.dtype(np.float32))
BYTES = (np.dtype(np.uint8), np.dtype(np.int8))

Shape = tuple[int | str, ...]


class Call:
    """The arrays of one call. The first array decides the framework, the device and so the backend.

    Args:
        early_release: whether the next kernel of the stream may start before this call's results are stored
    """

    def __init__(self, backend: str | None = None, stream: Any = None, early_release: bool = True) -> None:
        check_flags(early_release=early_release)
        self.early_release, self.open_launchings = bool(early_release), 0
        self._backend = backend
        self.first: Argument | None = None
        self._stream = None if stream is None else streams.handle_of(stream)
        self._sizes: dict[int | str, int] = {}
        self._results: list[tuple[Any, Any]] = []
        self._arrays: dict[str, Any] = {}  # the caller's arrays by name
        self.written: dict[str, Any] = {}  # the caller's arrays that are written
        self._in_place: set[tuple[str, str]] = set()  # outputs and the inputs that may be the same arrays
        self.may_share: Callable[[Any, Any], bool] | None = None  # whether written arrays may share elements
        self._dry_run = dry_run.current()

    def array(
        self, name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], shape: Shape, writable: bool = False
    ) -> Any:
        """`value` as a NumPy or CuPy array of one of `dtypes` and of `shape`, contiguous in its last axis.

        Raises TypeError (no array, wrong dtype) or ValueError (wrong shape, strides, alignment or device, read-only).
        """
        return self.checked(self.borrow(name, value, writable), dtypes, shape)

    def optional(
        self, name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], shape: Shape, writable: bool = False
    ) -> Any:
        """Like `array`, but None stays None."""
        return None if value is None else self.array(name, value, dtypes, shape, writable)

    def borrow(self, name: str, value: Any, writable: bool = False, any_float8: bool = False) -> Argument:
        """An argument, borrowed once and on this call's device: aligned, its dtype and shape unchecked.

        Raises TypeError for 8-bit floats other than e4m3, whose bytes would be read as e4m3, unless `any_float8` says
        that their kind does not matter.
        """
        argument = dlpack.argument(value, name, writable, self.stream, any_float8)
        return self.take(argument, writable)

    def take(self, argument: Argument, writable: bool = False) -> Argument:
        """An argument that is borrowed already, checked as `borrow` does."""
        name, native = argument.name, argument.native
        if isinstance(native, np.ndarray):
            device, aligned = -1, native.flags.aligned
        else:
            memory = native.data
            device, bits = memory.device_id, memory.ptr
            for stride in native.strides:
                bits |= stride
            aligned = not bits % native.itemsize or not native.size
        if not aligned:
            raise ValueError(
                f"{name}: got elements that are not {native.itemsize} bytes aligned (strides {native.strides} bytes), "
                f"expected address and strides to be multiples of {native.itemsize}"
            )
        if self.first is None:
            self.first = argument
        elif device != self.current.device:
            self.check_place(name, native)
        self.uses(name, native, writable)
        return argument

    def checked(self, argument: Argument, dtypes: tuple[np.dtype[Any], ...], shape: Shape) -> Any:
        """The array of a borrowed argument, or a view of it, as `array` checks it."""
        name, native = argument.name, argument.native
        if native.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"{name}: got dtype {native.dtype}, expected {wanted}")
        self.check_shape(name, native.shape, shape)
        strides = native.strides
        if native.ndim and strides[-1] != native.itemsize and native.shape[-1] > 1 and native.size:
            raise ValueError(f"{name}: got strides {strides} bytes, expected the last axis contiguous")
        return native

    def uses(self, name: str, native: Any, writable: bool = False) -> None:
        """Register an array of the caller that kernels read or, if `writable`, write."""
        self._arrays[name] = native
        if writable:
            self.written[name] = native

    def check_place(self, name: str, native: Any) -> None:
        """Raise ValueError for an array that is not on the first array's device."""
        got, expected = _device_of(native), self.current.device
        if got != expected:
            raise ValueError(f"{name}: got an array {_place(got)}, expected it {_place(expected)} as the others")

    def check_shape(self, name: str, got: tuple[int, ...], wanted: Shape) -> None:
        """Match `got` against `wanted`, binding dimension names seen for the first time."""
        sizes = self._sizes
        if len(got) == len(wanted):
            for size, want in zip(got, wanted, strict=True):
                if want != size and want != -1 and (want.__class__ is not str or sizes.setdefault(want, size) != size):
                    break
            else:
                return
        names = ", ".join("any" if want == -1 else str(want) for want in wanted)
        known = [f"{want} = {sizes[want]}" for want in wanted if want in sizes]
        suffix = f" with {', '.join(known)}" if known and len(got) == len(wanted) else ""
        raise ValueError(f"{name}: got shape {tuple(got)}, expected [{names}]{suffix}")

    def check_float32(self, name: str, dtype: str) -> None:
        """Raise ValueError for float32 rows and queries on a device: only the host takes them, to show rounding."""
        on_device = self.current.device >= 0 or (self._dry_run is not None and self._dry_run.on_device)
        if dtype == "float32" and (on_device or self._backend == "numba_cuda"):
            raise ValueError(f"{name}: got float32 for a device's kernels, expected 16 bits (the host's take both)")

    @functools.cached_property
    def current(self) -> streams.Current:
        """The device and the stream that the call runs on: the current stream of its framework, unless one is given."""
        assert self.first is not None
        return streams.callers(self.first.native, self.first.framework, self._stream)

    @property
    def stream(self) -> int | None:
        """Handle of the stream that the call runs on; None: CuPy's current one."""
        return self._stream if self.first is None else self.current.handle

    def size(self, name: str) -> int:
        """The size that a dimension name was bound to."""
        return self._sizes[name]

    def output(
        self,
        name: str,
        out: Any,
        dtypes: tuple[np.dtype[Any], ...],
        shape: tuple[int, ...],
        may_be: str | None = None,
    ) -> Any:
        """An array to write, which is a result of the call: the caller's `out`, checked, or a new one of `dtypes[0]`.

        Args:
            may_be: the input that may also be this output, if the operation reads each element before it writes it
        """
        if out is None:
            out, native = self._new_output(name, shape, dtypes[0])
            self._results.append((out, native))
        else:
            native = self.array(name, out, dtypes, shape, writable=True)
            self._results.append((out, native))
            if may_be is not None and coincide(native, self._arrays[may_be]):
                self._in_place.add((name, may_be))
        return native

    def may_share_pages(self, *caches: str) -> None:
        """Caches of these names may be views of the same pages, as from allocators for layers of several kinds: slots
        and block tables decide which pages each of them has."""
        self._in_place |= set(itertools.permutations(caches, 2))

    def check_apart(self) -> None:
        """Raise ValueError if a written array shares elements with another one: kernels read and write in any order."""
        may_share: Callable[[Any, Any], bool] = np.may_share_memory
        if self.current.device >= 0 and self.written:
            extents = {id(array): extent(array) for array in (*self._arrays.values(), *self.written.values())}

            def may_share(a: Any, b: Any) -> bool:
                return extents[id(a)].intersects(extents[id(b)])

        for name, array in self.written.items():
            for other, other_array in self._arrays.items():
                if other != name and may_share(array, other_array) and self._is_shared(name, other):
                    raise ValueError(f"{name}: got elements that {other} has too, expected memory of its own to write")

    def _is_shared(self, name: str, other: str) -> bool:
        """Whether two arrays share elements that neither the operation nor a compiler allows them to share."""
        a, b = self.written[name], self._arrays[other]
        if not share_elements(a, b) or {(name, other), (other, name)} & self._in_place:
            return False
        return not (self.may_share is not None and self.may_share(a, b)) and not debug.thread.unchecked

    def checks_values(self) -> bool:
        """Whether to check values (`cumla.debug`). Raises ValueError if a CUDA graph is being captured."""
        if not debug.is_on() or self._dry_run is not None:
            return False
        if self.current.is_capturing():
            raise ValueError(
                "cumla.debug: got a call while a CUDA graph is being captured, expected captures outside of it: "
                "checks wait for the device"
            )
        return True

    def scratch(self, name: str, size: int) -> Any:
        """Temporary memory uint8 [size] for kernels; a caller can pass it as `name` instead. On a device it is the
        stream's own (kernels/types/stream_workspace.py), but for large ones."""
        if self._dry_run is not None:
            return dry_run.fake_array((size,), BYTES[0])
        assert self.first is not None
        like = self.first.native
        with self.current:
            self._check_not_captured(name, (size,), BYTES[0])
            if isinstance(like, np.ndarray) or size > MOST_BYTES:
                return dlpack.empty((size,), BYTES[0], like)
            return workspace_of_stream(like).array(name, size, BYTES[0], like)[:size]

    def _new_output(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """A new array of torch's allocator, None for other frameworks; and the same as NumPy's or CuPy's array."""
        if self._dry_run is not None:
            return None, dry_run.fake_array(shape, dtype)
        assert self.first is not None
        with self.current:
            self._check_not_captured(name, shape, dtype)
            if self.first.framework == "torch" and self.current.device >= 0 and self._stream is None:
                allocated = dlpack.empty_torch(shape, dtype, self.current.device)
                native = dlpack.argument(allocated, name, True).native
            else:
                allocated, native = None, dlpack.empty(shape, dtype, self.first.native)
        record_output(native)
        return allocated, native

    def _check_not_captured(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if self.current.is_capturing():
            raise ValueError(
                f"{name}: got None while a CUDA graph is being captured, expected {dtype} {list(shape)} to write: "
                "allocate a graph's memory before its capture"
            )

    def kernels(self, file: str) -> Launching:
        """A context manager for the chosen backend's `file` of kernels, on the caller's stream; on the host without
        warnings of floating-point errors.

        Raises MiscompiledError where a self-test of the operation gave a wrong result on that backend. Entering the
        context raises ValueError if a written array shares elements with another one.
        """
        if self._dry_run is not None:
            return Launching(self, self._dry_run.kernels(self._backend, file), streams.NOTHING)
        on_device = self.current.device >= 0
        backend = choose(self._backend, on_device)
        if FAILED:
            check_not_failed(backend)
        # NumPy would warn of infinities and NaN, which are results like others.
        return Launching(self, kernels(backend, file), self.current if on_device else np.errstate(all="ignore"))

    def results(self) -> Any:
        """The outputs in order, a single array or a tuple, in the framework of the first array."""
        assert self.first is not None
        framework = self.first.framework
        with self.current:  # the stream for which readers of the results wait
            back = tuple(dlpack.give(native, framework) if out is None else out for out, native in self._results)
        return back[0] if len(back) == 1 else back


class Launching:
    """A context manager that launches `within` another. (contextlib's would take a microsecond longer.)"""

    __slots__ = ("call", "module", "within")

    def __init__(self, call: Call, module: Any, within: contextlib.AbstractContextManager[Any]) -> None:
        self.call, self.module, self.within = call, module, within

    def __enter__(self) -> Any:
        self.call.check_apart()
        record_written(self.call.written)
        checks = debug.active and self.call.checks_values()
        self.within.__enter__()
        self.call.open_launchings += 1
        return debug.Checked(self.module) if checks else self.module

    def __exit__(self, *error: Any) -> None:
        self.call.open_launchings -= 1
        try:
            if not (self.call.early_release or self.call.open_launchings or any(error)) and self.call.first is not None:
                end_release(self.call.first.native)
        finally:
            self.within.__exit__(*error)


def end_release(native: Any) -> None:
    """Let no later kernel start before the work queued so far on CuPy's current stream has ended.

    Args:
        native: an array of the call; for host arrays there is nothing to do
    """
    if not isinstance(native, np.ndarray) and dry_run.current() is None:
        ordinary_launch()


def without_middle_axis(argument: Argument) -> Argument:
    """[n, 1, d], as FlashMLA has it for its one KV head, as [n, d]; an array of another shape unchanged."""
    native = argument.native
    return argument._replace(native=native[:, 0]) if native.ndim == 3 and native.shape[1] == 1 else argument


def _device_of(native: Any) -> int:
    """The CUDA device that an array is on, or -1."""
    return -1 if isinstance(native, np.ndarray) else int(native.data.device_id)


def _place(device: int) -> str:
    return "in host memory" if device < 0 else f"on CUDA device {device}"
