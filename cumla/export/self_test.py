"""Cases of a file's self-test: a small call of every kernel, with inputs, results of the reference and their bounds.

`cumla_self_test` of the C runtime makes the calls. Random inputs repeat after PERIOD elements, so that a file stores
little of a large array. Scores of selections are sums of powers of two, which every kernel computes without rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..bounds import EQUAL, Bound
from ..dispatch.call import BFLOAT16
from ..layout import CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache
from ..specs.inputs import UNWRITTEN, Inputs, Size, Step
from .fields import ARRAY, PLANNED
from .record import ExportedCall, Function, Record

PERIOD = 8191  # elements; prime, so that rows of an array differ
POOLS = 4  # arrays of random numbers: arguments of a call differ
SIZES = {"requests": 3, "context": 512, "rows": 200, "tokens": 200, "keys": 200}  # that do not decide the kernels
ALIGNMENT = 256  # of arrays in the caller's memory
MOST_BYTES = 1 << 14  # of stored results of an array
ROUNDED_CODES = (
    64  # bytes that a call changes, of which one may differ: a value between two codes is rounded either way
)
DTYPES = ("uint8", "int8", "bool", "int32", "int64", "bfloat16", "float32", "uint32", "uint16")  # that C compares


class Fill(NamedTuple):
    """An array's contents.

    Attributes:
        field: of the call, the array's address
        block: what is repeated
        bytes: of the array
    """

    field: int
    block: bytes
    bytes: int


class Check(NamedTuple):
    """Results of a call in an array.

    Attributes:
        fill: index of the array's contents
        want: elements, of the array's type
        first, stride: places of the elements in the array
        bound: error of each, and cosine distance of all
        most: elements that may be beyond the bound
    """

    fill: int
    want: np.ndarray
    first: int
    stride: int
    bound: Bound
    most: int


@dataclass(frozen=True)
class Case:
    """A call with its inputs and results.

    Attributes:
        words: of the call's fields; addresses are places in the memory of the self-test
        bytes: of that memory
    """

    call: ExportedCall
    name: str
    words: list[int]
    bytes: int
    fills: list[Fill]
    checks: list[Check]


def cases_of(records: Iterable[Record]) -> Iterator[Case]:
    """A case for every kernel of these records. Calls with a plan of an earlier call have no kernels of their own."""
    seen: set[Function] = set()
    for record in records:
        if PLANNED in record.call.name.split():
            continue
        start = record.call.ranges[record.call.by][0]
        for last, index in record.segments:
            functions = {launch.function for launch in record.sequences[index]}
            if not functions <= seen:
                seen |= functions
                yield case_of(record.call, start)
            start = last + 1


def arguments_of(call: ExportedCall, by: int) -> dict[str, Any]:
    """The arguments of the call whose deciding value is `by`, on the host."""
    chosen = {call.by: by}
    for name, (first, last) in call.ranges.items():
        if name not in chosen:
            chosen[name] = min(max(SIZES.get(name, first), first), last)
    if call.by == "tokens" and "requests" in chosen:
        chosen["requests"] = min(chosen["requests"], by)
    arguments = call.arguments(replace(call.size, **chosen), Repeated)  # type: ignore[arg-type, call-arg]
    for name in call.fields.results:
        arguments[name].view(np.uint8)[...] = UNWRITTEN
    if "workspace" in arguments:
        shape = arguments["workspace"].shape
        arguments["workspace"] = np.ndarray(shape, np.uint8, bytearray(max(shape[0], 1)), 0, (1,))
    return arguments


def case_of(call: ExportedCall, by: int) -> Case:
    """The call whose deciding value is `by`, with the reference's results."""
    arguments = arguments_of(call, by)
    words, place, fills, before = call.fields.values(arguments), 0, [], {}
    for parameter in call.fields.parameters:
        array = arguments.get(parameter.name)
        if not parameter.is_array or array is None:
            continue
        words[parameter.first + ARRAY.index("data")] = place
        before[parameter.name] = contents = contents_of(array)
        fills.append(Fill(parameter.first, block_of(contents, array), len(contents)))
        place += -(-len(contents) // ALIGNMENT) * ALIGNMENT
    arguments.pop("workspace", None)
    call.fields.call({**arguments, "backend": "reference"})
    bounds, names = bounds_of(call), list(before)
    checks = [check_of(names.index(x), arguments[x], before[x], bounds[x]) for x in names if x in bounds]
    return Case(call, f"{call.name}, {call.by} {by}", words, place, fills, checks)


def bounds_of(call: ExportedCall) -> dict[str, Bound]:
    """The bounds of what a call writes, by name, as `cumla check` has them."""
    spec = call.fields.spec
    found = dict(zip(call.fields.results, spec.bounds, strict=True))
    found |= {name: spec.arrays[name].bound for name in spec.writes if name in spec.arrays}
    return {name: bound for name, bound in found.items() if bound is not None}


def check_of(fill: int, want: np.ndarray, before: bytes, bound: Bound) -> Check:
    """What the call changed, or elements between its ends if that is much."""
    if str(want.dtype) not in DTYPES:
        raise ValueError(f"a result of type {want.dtype} is not compared")
    flat, old = (np.frombuffer(x, want.dtype) for x in (contents_of(want), before))
    is_changed = flat.view(f"u{flat.itemsize}") != old.view(f"u{flat.itemsize}")
    places = np.flatnonzero(is_changed)
    first, last = (int(places[0]), int(places[-1])) if len(places) else (0, len(flat) - 1)
    stride = 1 + (last - first) * flat.itemsize // MOST_BYTES
    chosen = slice(first, last + 1, stride)
    is_code = want.dtype == np.uint8 and bound != EQUAL  # the next value's code is no multiple of an error
    most = int(is_changed[chosen].sum()) // ROUNDED_CODES if is_code else 0
    return Check(fill, flat[chosen].copy(), first, stride, Bound() if is_code else bound, most)


def contents_of(array: np.ndarray) -> bytes:
    """An array's bytes, and those between its rows."""
    if array.flags.c_contiguous:
        return array.tobytes()
    size = array.shape[0] * array.strides[0]
    return bytes((ctypes.c_ubyte * size).from_address(array.ctypes.data))


def block_of(contents: bytes, array: np.ndarray) -> bytes:
    """The shortest known block that the contents repeat."""
    for period in (1, array.strides[0], PERIOD * array.itemsize):
        if 0 < period < len(contents) and contents[period:] == contents[:-period]:
            return contents[:period]
    return contents or b"\0"


@functools.cache
def pool(number: int, kind: str, *limits: int) -> np.ndarray:
    """PERIOD random numbers."""
    rng: Any = np.random.default_rng(number)
    if kind == "normal":
        return rng.standard_normal(PERIOD)
    found: np.ndarray = rng.random(PERIOD) if kind == "uniform" else rng.integers(*limits, PERIOD)
    return found


class Pools:
    """A random number generator whose numbers repeat."""

    def __init__(self) -> None:
        self.drawn = 0

    def _repeated(self, shape: Any, kind: str, *limits: int) -> np.ndarray:
        self.drawn += 1
        return np.resize(pool(self.drawn % POOLS, kind, *limits), shape)

    def standard_normal(self, shape: Any) -> np.ndarray:
        return self._repeated(shape, "normal")

    def random(self, shape: Any) -> np.ndarray:
        return self._repeated(shape, "uniform")

    def integers(self, low: int, high: int, shape: Any) -> np.ndarray:
        return self._repeated(shape, "integer", int(low), int(high))


class Repeated(Inputs):
    """Inputs on the host, of the shapes that calls are recorded with."""

    def __init__(self, size: Size, shared: dict[Any, Any]) -> None:
        super().__init__("reference", size)
        self.rng: Any = Pools()
        self.shared = shared

    @functools.cached_property
    def step(self) -> Step:
        """Requests whose first one completes a compressed row."""
        new = self.size.query_lens
        before = np.minimum(np.resize((127, 63, 30), len(new)), np.maximum(self.size.context - new, 0))
        return Step(new, (before + new).astype(np.int32), None)

    def resized(self, **sizes: int) -> Repeated:
        return Repeated(replace(self.size, **sizes), self.shared)  # type: ignore[arg-type]

    def in_rings(self) -> Repeated:
        return self

    def widened(self, table: np.ndarray, columns: int) -> np.ndarray:
        """A table with these columns."""
        found = np.full((len(table), columns), -1, table.dtype)
        found[:, : table.shape[1]] = table[:, :columns]
        return found

    def longest(self, lens: np.ndarray) -> int:
        return self.size.context

    def numbers(self, *shape: int) -> np.ndarray:
        """Up to 1, as the bounds of attention are for."""
        return np.clip(self.rng.standard_normal(shape) / 4, -1, 1)

    def rotation(self, positions: int) -> Any:
        """Powers of two: a rotation of such values is exact."""
        return self.put(np.ldexp(1.0, -self.rng.integers(0, 4, (positions, 64))), np.float32)

    def index_values(self, *shape: int) -> Any:
        """e4m3 of 0, 1/4, 1/2 and 1; pairs of e2m1, too."""
        return self.put(np.array([0, 0x28, 0x30, 0x38])[self.rng.integers(0, 4, shape)], np.uint8)

    def index_weights(self, rows: int, heads: int) -> Any:
        return self.put(np.ldexp(1.0, -self.rng.integers(0, 3, (rows, heads))), np.float32)

    def context_lens(self, requests: int, next_n: int) -> Any:
        lens = np.resize((700, 64, 13, 300), requests)
        lens[0] = self.size.context
        return self.put(np.minimum(lens, self.size.context), np.int32)

    def used(self, most: int, *shape: int) -> Any:
        """Of several lists, the last one is empty."""
        lens = np.array(self.rng.integers(0, most + 1, shape))
        lens.flat[-1:] = 0
        lens.flat[:1] = most - most // 4
        return self.put(lens, np.int32)

    def table(self, requests: int, positions: int) -> Any:
        columns = -(-positions // self.size.block_size)
        return self.put(self.rng.integers(0, self.size.pages, (requests, columns)), np.int32)

    def slots(self, count: int, dtype: Any = np.int64) -> Any:
        """Of a row each; every fourth is absent, and so are those that no page has."""
        slots = np.arange(count)
        slots[(slots % 4 == 3) | (slots >= self.size.pages * self.size.block_size)] = -1
        return self.put(slots, dtype)

    def new_slots(self, count: int) -> np.ndarray:
        found: np.ndarray = np.resize(np.arange(self.size.pages * self.size.block_size), count)
        found[self.size.pages * self.size.block_size :] = -1
        return found

    def new_cache(self, layout: CacheLayout) -> Any:
        made = layout.allocate(self.size.pages, self.size.block_size, np)
        made[...] = UNWRITTEN
        return made

    def cache(self, layout: CacheLayout, block_size: int | None = None) -> Any:
        pages, block_size = self.size.pages, block_size or self.size.block_size
        key = "contents", layout, pages, block_size
        if key not in self.shared:
            count, rng = pages * block_size, np.random.default_rng(0)
            rows = np.clip(rng.standard_normal((count, layout.head_dim)) / 4, -1, 1)
            if layout.name.startswith("INDEXER"):
                rows = rng.choice([-1, -0.5, -0.25, 0, 0.25, 0.5, 1], rows.shape)
            made = layout.allocate(pages, block_size, np)
            quantize_and_insert_k_cache(
                rows.astype(BFLOAT16), made, np.arange(count), block_size, layout=layout, backend="reference"
            )
            self.shared[key] = made
        return self.shared[key]
