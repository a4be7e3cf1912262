"""What a measured case is, the sizes that a user may ask for, and random inputs as layers make them.

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
from ..dispatch.call import BFLOAT16
from ..errors import RunError
from ..layout import DSV4_FP8, CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache
from .measure import copy_calls, cupy, sets_for

BLOCK = 64
HOST_SLOTS, DEVICE_SLOTS = 1 << 14, 1 << 20
HOST_BASE, DEVICE_BASE = 1 << 10, 1 << 16  # random tokens that a cache repeats
CHECKED = 3  # entries of a batch that are compared with the reference
STAYS = 10  # tokens that an entry of a list stays for, so that the lists of neighbours overlap by 90%
WINDOW = 128

Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Sizes:
    """What a user may ask for; sizes in tokens.

    tokens  of insert, gather and prefill
    topk    keys of the window or V3.2's selection; extra: of the second cache
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
        """Other libraries are measured beside the backend that competes with them."""
        return self.backend == "cuda"

    @property
    def slots(self) -> int:
        return DEVICE_SLOTS if self.on_device else HOST_SLOTS

    def sets(self, moved: int, most: int = 8) -> int:
        """Sets of inputs that are used in rotation."""
        return sets_for(moved, most) if self.on_device else 2


@dataclass(frozen=True)
class Problem:
    """Calls that do the same.

    impls      by name, the framework whose graphs they are captured in, and calls
    check      of the first call's result: the largest error. Raises RunError or AssertionError beyond the bounds
    clear      wipes what the first call writes in place, before each implementation is checked
    functions  of other libraries' implementations, which function of which version that is
    unchecked  implementations that compute something else, such as a copy of as many bytes
    from_host  the host's time for a call counts, on a device too
    queued     not 0: calls allocate, so they are queued one by one in place of a graph, and do so many times
               what is measured
    fp8        the products are of FP8 values
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

    impl      its name in rows
    function  which function of which version
    call      makes a call of a set of arguments, None where the library is absent
    """

    impl: str
    function: str
    call: Callable[..., Callable[[], Any] | None]
    sets: Sequence[Sequence[Any]]


def by_backend(
    call: Callable[..., Any], sets: Sequence[Sequence[Any]], outs: Sequence[Any] | None = None, **options: Any
) -> Callable[[str], Calls]:
    """Calls of a backend over sets of arguments, each with an output of its own where `outs` are given."""

    def calls(backend: str) -> Calls:
        made = [functools.partial(call, *given, **options, backend=backend) for given in sets]
        return made if outs is None else [functools.partial(x, out=out) for x, out in zip(made, outs, strict=True)]

    return calls


def problem_of(
    case: Case, sizes: Sizes, ours: Callable[[str], Calls], moved: float, check: Callable[[Any], float],
    clear: Callable[[], Any] | None = None, *, flop: float = 0, peer: Peer | None = None, copied: bool = False,
    fp8: bool = False,
) -> Problem:  # fmt: skip
    """The problem of a case: cumla's calls by backend, those of a peer that is there, and a copy of as many bytes."""
    names = {"cumla": sizes.backend}
    if sizes.beside:
        names = {f"cumla-{backend}": backend for backend in (sizes.backend, *sizes.beside)}
    impls = {name: ("cupy", ours(backend)) for name, backend in names.items()}
    sets, functions = len(next(iter(impls.values()))[1]), {}
    if peer is not None and sizes.with_peers:
        calls = [peer.call(*given) for given in peer.sets]
        there = [call for call in calls if call is not None]
        if len(there) == len(calls):
            impls[peer.impl], functions[peer.impl] = ("torch", there), peer.function
    if copied and sizes.on_device:
        impls["copy"] = "cupy", copy_calls(int(moved) // 2, sets)
    return Problem(case.op, str(case), impls, int(moved), flop, check, clear, functions, fp8=fp8)


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


# ---- inputs


class Arrays:
    """Random arrays where the backend wants them."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.xp, self.rng = sizes, sizes.xp, np.random.default_rng(seed)

    def rows(self, *shape: int) -> Any:
        """bfloat16; large arrays repeat a million values."""
        count = int(np.prod(shape))
        values = self.rng.standard_normal(min(count, 1 << 20), np.float32).astype(BFLOAT16)
        return self.xp.resize(self.xp.asarray(values.view(np.uint16)), shape).view(BFLOAT16)

    def floats(self, *shape: int) -> Any:
        return self.xp.asarray(self.rng.standard_normal(shape, np.float32))

    def integers(self, end: int, *shape: int) -> Any:
        return self.xp.asarray(self.rng.integers(0, end, shape, np.int32))

    def cache(self, layout: CacheLayout) -> Any:
        """A cache whose pages repeat a few."""
        return repeating_cache(self.sizes.backend, layout, BLOCK, self.sizes.slots).array


class RepeatingCache(NamedTuple):
    """A large cache, the pages that it repeats on the host, and the largest magnitude of their rows."""

    array: Any
    base: np.ndarray
    largest: float

    @property
    def slots(self) -> int:
        return int(self.array.shape[0] * self.array.shape[1])

    def in_base(self, slots: np.ndarray) -> np.ndarray:
        """The slots of the base that hold what `slots` hold; -1 stays."""
        return np.where(slots < 0, slots, slots % (self.base.shape[0] * self.base.shape[1]))


@functools.lru_cache(maxsize=2)  # as many as a call attends to
def repeating_cache(backend: str, layout: CacheLayout, block_size: int, slots: int) -> RepeatingCache:
    sizes = Sizes(backend)
    xp, tokens = sizes.xp, min(slots, DEVICE_BASE if sizes.on_device else HOST_BASE)
    pages = tokens // block_size
    array = layout.allocate(slots // block_size // pages * pages, block_size, xp)
    base = layout.allocate(pages, block_size, xp)
    k = Arrays(sizes).rows(pages * block_size, layout.head_dim)
    if layout.quantized_dim:
        quantize_and_insert_k_cache(k, base, xp.arange(len(k)), block_size, layout=layout, backend=backend)
    else:
        base[...] = k.view(np.uint16).view(np.uint8).reshape(base.shape)
    for start in range(0, len(array), pages):
        array[start : start + pages] = base
    on_host = layout.allocate(pages, block_size)
    on_host[...] = to_host(base)
    return RepeatingCache(array, on_host, float(abs(k[: 1 << 12].astype(np.float32)).max()))


def contexts(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """Lengths of requests, int32 [count], as traces have them: most are short, a few long, one below the window."""
    lens = np.exp(rng.uniform(np.log(min(256, longest)), np.log(longest), count)).astype(np.int32)
    if count > 1:
        lens[-1] = max(1, min(WINDOW, longest) // 3)
    return lens


def window_lists(rng: np.random.Generator, lens: np.ndarray, width: int, slots: int, block_size: int) -> np.ndarray:
    """int32 [len(lens), width]: slots of the last rows of a request of each length, in pages anywhere; then -1."""
    used = np.minimum(lens, width)[:, None]
    columns = np.arange(width)
    positions = np.maximum(lens[:, None] - used + columns, 0)
    pages = rng.integers(0, slots // block_size, (len(lens), width // block_size + 2))
    page = positions // block_size - (lens[:, None] - used) // block_size
    found = np.take_along_axis(pages, np.minimum(page, pages.shape[1] - 1), axis=1) * block_size
    return np.where(columns < used, found + positions % block_size, -1).astype(np.int32)


def selected_rows(rng: np.random.Generator, visible: np.ndarray, topk: int, neighbours: bool = False) -> np.ndarray:
    """int32 [len(visible), topk]: distinct rows of so many, ascending, as an indexer selects them; then -1.

    neighbours  consecutive tokens share 90% of their lists; else any have nothing in common
    """
    columns, tokens = np.arange(topk), np.arange(len(visible))[:, None]
    times = (tokens + columns % STAYS) // STAYS if neighbours else np.broadcast_to(tokens, (len(visible), topk))
    place = rng.random((int(times.max(initial=0)) + 1, topk))[times, columns]
    rows = visible[visible > topk].min(initial=2**31 - 1) if neighbours else visible[:, None]
    chosen = np.where(visible[:, None] > topk, ((columns + place) * (rows // topk)).astype(np.int64), columns)
    return np.where(columns < visible[:, None], chosen, -1).astype(np.int32)
