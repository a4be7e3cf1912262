"""Fields of an operation's C struct: what a call is given, as words of 64 bits in the order of its parameters."""

from __future__ import annotations

import functools
import inspect
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..layout import BUILT_IN
from ..specs.spec import OperationSpec

AXES = 4  # most axes of an array
ARRAY = ("data", "dtype", "ndim", *(f"shape[{i}]" for i in range(AXES)), *(f"strides[{i}]" for i in range(AXES)))
# Codes of dtypes and formats in C. A code keeps its meaning: append only.
DTYPES = (
    "uint8", "int8", "bool", "int32", "int64", "float16", "bfloat16", "float32", "float8_e4m3fn", "uint32", "uint16",
)  # fmt: skip
LAYOUTS = tuple(layout.name for layout in BUILT_IN)
PLANNED = "planned"  # 1: the workspace has the plan that a call of this shape computed in this step
PAIRS = {"slots": ("slots", "slot_lens")}  # arguments of two arrays
NOT_FIELDS = {"workspace", "backend", "stream", "out", "lse", "plan", "early_release", "max_workspace_bytes"}
ANY_NUMBER = ("softmax_scale", "eps")
# Codes of arguments that are names.
CHOICES = {"q_format": ("fp8", "mxfp4", "mxfp4_rows"), "precision": ("fp8",), "kv_cache_dtype": ("auto", "fp8")}


class Parameter(NamedTuple):
    """A member of the struct: an array of len(ARRAY) words, or a scalar of one word.

    Attributes:
        name: of the function's parameter, or of a result
        is_array: whether it is an array
        first: index of its first word
        kind: of a scalar: "integer", "number" (a float64), "layout" or a key of CHOICES (a code)
    """

    name: str
    is_array: bool
    first: int
    kind: str = "integer"

    @property
    def is_any(self) -> bool:
        """Whether a file serves any value of a number."""
        return self.name in ANY_NUMBER


class OperationFields:
    """The struct of an operation.

    Args:
        spec: the operation
        results: names of the arrays that it returns, which are written where the caller says
    """

    def __init__(self, spec: OperationSpec, results: tuple[str, ...], workspace: bool) -> None:
        self.spec, self.results = spec, results
        self.has_plan = workspace and spec.plan is not None
        given = [of_pair for name in spec.arrays for of_pair in PAIRS.get(name, (name,))]
        arrays = [*given, *results, *(["workspace"] if workspace else [])]
        self.parameters: list[Parameter] = []
        at = 0
        scalars = [name for name in spec.parameters if name not in spec.arrays and name not in NOT_FIELDS]
        for name in arrays:
            self.parameters.append(Parameter(name, True, at))
            at += len(ARRAY)
        for name in scalars:
            self.parameters.append(Parameter(name, False, at, _kind(spec.parameters[name])))
            at += 1
        if self.has_plan:
            self.parameters.append(Parameter(PLANNED, False, at))
            at += 1
        self.words = at

    @functools.cached_property
    def names(self) -> list[str]:
        """The name of each word, as C has it."""
        found = []
        for parameter in self.parameters:
            names = [f"{parameter.name}.{part}" for part in ARRAY] if parameter.is_array else [parameter.name]
            found += names
        return found

    def values(self, arguments: Mapping[str, Any]) -> list[int]:
        """The words of a call with these arguments; outputs by the names of results."""
        found: list[int] = []
        for parameter in self.parameters:
            value = arguments.get(parameter.name, self.default(parameter))
            found += array_words(value) if parameter.is_array else [scalar_word(value, parameter.kind)]
        return found

    def default(self, parameter: Parameter) -> Any:
        """Of an argument that is not given."""
        if parameter.is_array or parameter.name == PLANNED:
            return None if parameter.is_array else 0
        default = self.spec.parameters[parameter.name].default
        return None if default is inspect.Parameter.empty else default

    def call(self, arguments: Mapping[str, Any], plan: Any = None) -> None:
        """Call the function with these arguments. Arrays named as results are its outputs."""
        given = {name: value for name, value in arguments.items() if name not in (*self.results, "workspace", PLANNED)}
        for name, names in PAIRS.items():
            if names[0] in given and name in self.spec.arrays:
                given[name] = tuple(given.pop(x) for x in names)
        results = [arguments[name] for name in self.results]
        given |= self.spec.results_in(results) if results else {}
        if plan is not None:
            given["plan"] = plan
        elif "workspace" in arguments:
            given["workspace"] = arguments["workspace"]
        self.spec.function(**given)

    def plan_in(self, arguments: Mapping[str, Any]) -> Any:
        """A new plan in the workspace of these arguments; None for an operation without plans."""
        if not self.has_plan or self.spec.plan is None:
            return None
        return self.spec.plan(arguments["workspace"], batch_invariant=bool(arguments.get("batch_invariant")))


def _kind(parameter: Any) -> str:
    annotation = str(parameter.annotation)
    if parameter.name in CHOICES:
        return str(parameter.name)
    if "float" in annotation:
        return "number"
    return "layout" if "CacheLayout" in annotation or parameter.name.endswith("layout") else "integer"


def array_words(array: Any) -> list[int]:
    """An array, or None, as words of ARRAY."""
    if array is None:
        return [0] * len(ARRAY)
    pad = [0] * (AXES - array.ndim)
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return [address, 1 + DTYPES.index(str(array.dtype)), array.ndim, *array.shape, *pad, *array.strides, *pad]


def scalar_word(value: Any, kind: str) -> int:
    """A scalar, or None, as a word."""
    if value is None:
        return -(1 << 63)
    if kind == "layout":
        return LAYOUTS.index(value.name)
    if kind in CHOICES:
        return CHOICES[kind].index(value)
    if kind == "number":
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)
