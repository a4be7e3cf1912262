"""OperationSpec: what an operation is, said once.

The self-test, the adapters for compilers, warm-up, benchmarks, soak and fuzz are derived from the specs, one file of
specs for each file of cumla/ops/.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..bounds import EQUAL, Bound
from ..dispatch.call import BF16, BYTES, FLOAT32
from ..kernels.types.plan import DecodePlan, DenseDecodePlan
from .inputs import TINY_HEADS, Inputs

CACHE = (*BYTES, *BF16, *FLOAT32)  # dtypes of a paged cache: bytes, or the values of a format without scales

Arguments: TypeAlias = Callable[[Inputs], dict[str, Any]]
# What integers name. Operations take any value there; a value that names nothing counts as absent.
Holds: TypeAlias = Literal["", "slots", "pages", "lengths", "starts", "entries", "requests", "positions", "tokens"]


class Result(NamedTuple):
    """An array that an operation returns: its shape and the name of its dtype."""

    shape: tuple[Any, ...]
    dtype: str


class Array(NamedTuple):
    """An array argument; also each array of a list or a pair.

    Attributes:
        dtypes: that it may have
        way: "in": read, "out": written, "in out": read and written
        holds: what its integers name; "" for other values
        bound: of what is written, against the reference
        packed: nothing may be between its rows
    """

    dtypes: tuple[np.dtype[Any], ...]
    way: Literal["in", "out", "in out"] = "in"
    holds: Holds = ""
    bound: Bound = EQUAL
    packed: bool = False


@dataclass(frozen=True)
class Variant:
    """Calls of one kind, such as for one cache format.

    Attributes:
        name: the cache formats, separated by ", ", or the keyword that a call has; else what they are
        arguments: inputs of any size -> the keyword arguments of a call
        bounds: of the results; None: the spec's
        heads: query heads at the tiny size
    """

    name: str
    arguments: Arguments
    bounds: Sequence[Bound | None] | None = None
    heads: int = TINY_HEADS


def no_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class OperationSpec:
    """A public function, or one that layers call.

    Attributes:
        function: the function
        kernels: the file of kernels that it needs
        arrays: its array arguments by name, in order, without the outputs. Those with a default may be absent
        variants: kinds of calls
        check: the check of cumla.debug, or those of all its kernels; None: it reads nothing that could be wrong
        optional_writes: groups of written arguments that may be None: a call has all of a group or none, and a group
            only with the groups before it
        results: arguments by name -> its results; shapes may be symbolic
        bounds: of the results, against the reference; None: not compared
        outputs: the keywords that take its results: one each, or a single one for a tuple of results
        eager: keywords that compilers do not know, for further arrays that are written
        scratch: arguments by name -> bytes of temporary device memory that it needs, or 0; None: none
        plan: the plan that passes this memory to its kernels; None: its argument `workspace` does
        public: whether cumla exports it
        compiled: whether compilers of frameworks take it; not functions of lists of arrays
    """

    function: Callable[..., Any]
    kernels: str
    arrays: Mapping[str, Array]
    variants: tuple[Variant, ...]
    check: Callable[[Any], Any] | tuple[Callable[[Any], Any], ...] | None = None
    optional_writes: tuple[tuple[str, ...], ...] = ()
    results: Callable[[Mapping[str, Any]], tuple[Result, ...]] = no_results
    bounds: Sequence[Bound | None] = ()
    outputs: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    scratch: Callable[[Mapping[str, Any]], int] | None = None
    plan: type[DecodePlan | DenseDecodePlan] | None = DecodePlan
    public: bool = True
    compiled: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @functools.cached_property
    def writes(self) -> tuple[str, ...]:
        """The array arguments that it writes."""
        return tuple(name for name, array in self.arrays.items() if array.way != "in")

    def optional(self, name: str) -> bool:
        """Whether an array argument may be None."""
        return "None" in str(self.parameters[name].annotation) or self.parameters[name].default is None

    def results_in(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The keywords of a call that writes its results into these arrays."""
        as_one = len(self.outputs) == 1 and len(arrays) > 1
        return dict(zip(self.outputs, (tuple(arrays),) if as_one else arrays, strict=True))

    def new_results(self, x: Inputs, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call that writes its results into new arrays."""
        found = self.results(arguments)
        return self.results_in([x.unwritten(*array.shape, dtype=np.dtype(array.dtype)) for array in found])

    def run(self, arguments: Mapping[str, Any], backend: str) -> list[Any]:
        """Make a call. Returns its results and the arrays that it wrote, as `bounds_of` has their bounds."""
        results = self.function(**arguments, backend=backend)
        return [*flat([results]), *flat(arguments.get(name) for name in self.writes)]

    def bounds_of(self, variant: Variant, arguments: Mapping[str, Any]) -> list[Bound | None]:
        """The bounds of the results of a call and of the arrays that it writes."""
        written = (self.arrays[name].bound for name in self.writes for _ in flat([arguments.get(name)]))
        return [*(self.bounds if variant.bounds is None else variant.bounds), *written]


def flat(values: Iterable[Any]) -> list[Any]:
    """Arrays, and the arrays of lists and tuples; None is left out."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += flat(value)
        elif value is not None:
            found.append(value)
    return found


def shape(arguments: Mapping[str, Any], name: str, *axes: str) -> tuple[Any, ...]:
    """The shape of an array argument. Raises ValueError unless it has one size for each of `axes`."""
    got = tuple(arguments[name].shape)
    if len(got) != len(axes):
        raise ValueError(f"{name}: got shape {got}, expected [{', '.join(axes)}]")
    return got


def dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")
