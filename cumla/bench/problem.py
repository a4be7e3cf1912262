"""What a measured case is, and the sizes that a user may ask for.

A case says what is measured: `op`, its name as text, and `problem(sizes)`, which allocates. The same cases are measured
by `cumla bench`, by benchmarks/ for the recorded results, and by tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays.memory import to_host
from ..bounds import Bound, compare
from ..dispatch import backends
from ..errors import RunError
from ..layout import DSV4_FP8, CacheLayout
from ..specs.inputs import Size
from ..specs.measured import WINDOW as WINDOW
from ..specs.measured import Measured
from .measure import Calls as Calls
from .measure import copy_calls, cupy, sets_for

BLOCK = 64
HOST_SLOTS, DEVICE_SLOTS = 1 << 14, 1 << 20
CHECKED = 3  # entries of a batch that are compared with the reference


@dataclass(frozen=True)
class Sizes:
    """What a user may ask for; sizes in tokens.

    Attributes:
        tokens: of insert, gather and prefill
        topk: keys of the window or V3.2's selection; extra: of the second cache
    """

    backend: str
    layout: CacheLayout = DSV4_FP8
    heads: int = 64
    batch: tuple[int, ...] = (1, 32)
    tokens: tuple[int, ...] = (1024,)
    topk: int = 128
    extra: int = 512
    context: int = 8192
    beside: tuple[str, ...] = ()  # backends that are measured as well

    @functools.cached_property
    def xp(self) -> Any:
        return backends.array_module(self.backend)

    @property
    def on_device(self) -> bool:
        return backends.takes_device_arrays(self.backend)

    @property
    def with_peers(self) -> bool:
        """Other libraries are measured with the backend that competes with them."""
        return self.backend == "cuda"

    @property
    def slots(self) -> int:
        return DEVICE_SLOTS if self.on_device else HOST_SLOTS

    def sets(self, moved: int, most: int = 8) -> int:
        """Sets of inputs that are used in rotation."""
        return sets_for(moved, most) if self.on_device else 2

    def inputs(self, seed: int = 0, **size: Any) -> Measured:
        """Inputs of calls; fields of their size, where a generator reads them."""
        usual = {"rows": self.tokens[0], "heads": self.heads, "context": self.context, "window": WINDOW}
        return Measured(self.backend, Size(**{**usual, "pages": self.slots // BLOCK, **size}), seed)


@dataclass(frozen=True)
class Problem:
    """Calls that do the same.

    Attributes:
        impls: by name, the framework whose graphs they are captured in, and calls
        check: of the first call's result: the largest error. Raises RunError or AssertionError beyond the bounds
        clear: wipes what the first call writes in place, before each implementation is checked
        functions: of other libraries' implementations, which function of which version that is
        unchecked: implementations that compute something else, such as a copy of the same number of bytes
        from_host: the host's time for a call counts, on a device too
        queued: not 0: calls allocate, so they are queued one by one in place of a graph, and do so many times what is
            measured
        fp8: the products are of FP8 values
    """

    op: str
    config: str
    impls: dict[str, tuple[str, Calls]]
    bytes_moved: int
    flop: float = 0
    check: Callable[[Any], float] | None = field(default=None)
    clear: Callable[[], Any] | None = None
    functions: Mapping[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ("copy",)
    from_host: bool = False
    queued: int = 0
    fp8: bool = False


class Case(Protocol):
    """Something to measure; its text is the configuration."""

    @property
    def op(self) -> str: ...

    def problem(self, sizes: Sizes) -> Problem: ...


class Peer(NamedTuple):
    """Another library's implementation.

    Attributes:
        impl: its name in rows
        function: which function of which version
        call: makes a call of a set of arguments, None where the library is absent
    """

    impl: str
    function: str
    call: Callable[..., Callable[[], Any] | None]
    sets: Sequence[Sequence[Any]]


def calls_of(
    function: Callable[..., Any], sets: Sequence[Mapping[str, Any]], outs: Sequence[Any] | None = None, **options: Any
) -> Callable[[str], Calls]:
    """Calls of a backend with sets of arguments by name, each with an output of its own where `outs` are given."""
    keywords = sets if outs is None else [{**x, "out": out} for x, out in zip(sets, outs, strict=True)]
    return lambda backend: [functools.partial(function, **x, **options, backend=backend) for x in keywords]


def problem_of(
    case: Case, sizes: Sizes, ours: Callable[[str], Calls], moved: float, check: Callable[[Any], float],
    clear: Callable[[], Any] | None = None, *, flop: float = 0, peer: Peer | None = None, copied: bool = False,
    fp8: bool = False,
) -> Problem:  # fmt: skip
    """The problem of a case: cumla's calls by backend, an installed peer's calls, and a copy of the same bytes."""
    names = {"cumla": sizes.backend}
    if sizes.beside:
        names = {f"cumla-{backend}": backend for backend in (sizes.backend, *sizes.beside)}
    impls = {name: ("cupy", ours(backend)) for name, backend in names.items()}
    sets, functions = len(next(iter(impls.values()))[1]), {}
    if peer is not None and sizes.with_peers:
        calls = [peer.call(*arguments) for arguments in peer.sets]
        there = [call for call in calls if call is not None]
        if len(there) == len(calls):
            impls[peer.impl], functions[peer.impl] = ("torch", there), peer.function
    if copied and sizes.on_device:
        impls["copy"] = "cupy", copy_calls(int(moved) // 2, sets)
    return Problem(case.op, str(case), impls, int(moved), flop, check, clear, functions, fp8=fp8)


def on_host(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with copies of its arrays on the host."""
    return {name: np.array(to_host(x)) if hasattr(x, "shape") else x for name, x in arguments.items()}


def kind_of(lengths: bool) -> str:
    """How the name of a configuration ends."""
    return "lengths" if lengths else "full lists"


def first(result: Any, count: int = CHECKED) -> np.ndarray:
    """The first entries of a call's first result, an array or a tensor of torch, on the host."""
    got = (result[0] if isinstance(result, (tuple, list)) else result)[:count]
    return to_host(got) if not hasattr(got, "cpu") else got.float().cpu().numpy()


def picked(array: Any, which: np.ndarray) -> np.ndarray:
    """Entries of an array or a tensor of torch, on the host."""
    if hasattr(array, "cpu"):
        return np.asarray(array.float().cpu().numpy()[which])
    if isinstance(array, np.ndarray):
        return array[which]
    return to_host(array[cupy().asarray(which)])  # it takes no indices of NumPy's


def error_within(got: np.ndarray, want: np.ndarray, bound: Bound) -> float:
    """The largest error. Raises RunError beyond the bound."""
    within, error = compare(got, want, bound)
    if not within:
        raise RunError(f"off by {error:.3g}, beyond the bounds: cumla check says more")
    return error
