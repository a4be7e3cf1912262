"""Constants of the CUDA sources that launchers use: threads, tile sizes, shared memory, costs.

A constant is declared in the source only, as in `constexpr int KEYS = 64, ROW = 2 * LAYOUT::head_dim;`; this module
evaluates it with the macros that the program is compiled with.
"""

from __future__ import annotations

import functools
import operator
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...layout import LAYOUTS, CacheLayout

CSRC = pathlib.Path(__file__).parent / "csrc"
INCLUDE = re.compile(r'^#include "([\w./]+)"$', re.MULTILINE)
_DEFINED = re.compile(r"^#define (\w+) ([^\n\\]+)$", re.MULTILINE)
_DECLARATION = re.compile(r"^(?:\[\[maybe_unused\]\] )?constexpr (?:u?int(?:32)?|bool) (\w+ =\s[^;]+);", re.MULTILINE)
_FUNCTION = re.compile(r"^(?:__device__ )?constexpr int (\w+)\(int (\w+)\) \{\s*return ([^;]+);\s*\}", re.MULTILINE)
_NEXT = re.compile(r",\s+(?=\w+ =\s)")  # of several constants in a declaration
_TOKEN = re.compile(r"\s*((?:0x[0-9a-f]+|\d+)(?=[uU]?\b)|\w+(?:::\w+)?|<<|>>|[<>=!]=|&&|\|\||[-+*/%<>?:()])[uU]?")

Macro = int | str | CacheLayout
Operator = Callable[[int, int], int]
# Operators by precedence.
_OPERATORS: dict[str, tuple[int, Operator]] = {
    "||": (1, lambda a, b: bool(a or b)), "&&": (2, lambda a, b: bool(a and b)),
    "==": (3, operator.eq), "!=": (3, operator.ne),
    "<": (4, operator.lt), ">": (4, operator.gt), "<=": (4, operator.le), ">=": (4, operator.ge),
    "<<": (5, operator.lshift), ">>": (5, operator.rshift),
    "+": (6, operator.add), "-": (6, operator.sub),
    "*": (7, operator.mul), "/": (7, operator.floordiv), "%": (7, operator.mod),
}  # fmt: skip


def numbers_of(layout: CacheLayout) -> dict[str, int]:
    """The constants of a format in the sources, LAYOUT::name."""
    return {
        "head_dim": layout.head_dim,
        "quantized_dim": layout.quantized_dim,
        "quantized_bytes": layout.quantized_bytes,
        "rope_offset": layout.rope_offset if layout.quantized_dim else 0,
        "row_bytes": layout.row_bytes,
        "token_bytes": layout.token_bytes,
        "scale_tile": layout.scale_tile or 1,
        "num_scales": layout.num_scales,
        "scale_bytes": layout.scale_bytes,
        "scale_stride": layout.scale_stride,
        "scale_start": layout.scale_start(0),
        "scale_start_per_token": layout.scale_start(1) - layout.scale_start(0),
        "min_exponent": layout.min_exponent,
    }


def constant(file: str, name: str, **macros: Macro) -> int:
    """The value of a constant that csrc/<file> or an included file declares, compiled with these macros.

    Args:
        macros: numbers, formats, or names of types or other macros

    Raises KeyError if the constant, or a name in its expression, is not declared.
    """
    return _constant(file, name, tuple(macros.items()))


@functools.lru_cache(maxsize=4096)
def _constant(file: str, name: str, macros: tuple[tuple[str, Macro], ...]) -> int:
    return _Source(file).value_of(name, dict(macros))


class _Declarations(NamedTuple):
    """What one file declares, without the files that it includes."""

    included: list[str]
    expressions: dict[str, str]
    functions: dict[str, tuple[str, str]]
    defaults: dict[str, str]


@functools.cache
def _declarations(file: str) -> _Declarations:
    text = re.sub(r" *//.*", "", (CSRC / file).read_text())
    return _Declarations(
        included=INCLUDE.findall(text),
        expressions=dict(
            one.split(" =", 1) for declared in _DECLARATION.findall(text) for one in _NEXT.split(declared)
        ),
        functions={name: (parameters, body) for name, parameters, body in _FUNCTION.findall(text)},
        defaults=dict(_DEFINED.findall(text)),
    )


@functools.cache
class _Source:
    """Declarations of a source and its included files: expressions, functions of one number, macros' defaults."""

    def __init__(self, file: str) -> None:
        self.expressions: dict[str, str] = {}
        self.functions: dict[str, tuple[str, str]] = {}
        self.defaults: dict[str, str] = {}
        read: set[str] = set()

        def add(name: str) -> None:
            if name in read or not (CSRC / name).exists():
                return
            read.add(name)
            of_file = _declarations(name)
            for included in of_file.included:
                add(included)
            self.expressions |= of_file.expressions
            self.functions |= of_file.functions
            self.defaults |= of_file.defaults  # a file's definitions precede those in the files it includes

        add(file)

    def value_of(self, name: str, known: Mapping[str, Macro]) -> int:
        name, _, field = name.partition("::")
        value: Macro | None = name
        while isinstance(value, str) and (value in known or value in self.defaults):  # EXTRA_LAYOUT is LAYOUT
            value = known.get(value, self.defaults.get(value))
        if field:
            return numbers_of(value if isinstance(value, CacheLayout) else LAYOUTS[str(value)])[field]
        if isinstance(value, int):
            return value
        return _Expression(self, self.expressions[name] if value == name else str(value), known).value()


class _Expression:
    """A C++ expression of non-negative numbers."""

    def __init__(self, source: _Source, text: str, known: Mapping[str, Macro]) -> None:
        self.source, self.known, self.at = source, known, 0
        self.tokens = _TOKEN.findall(text)

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def next_is(self, *tokens: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] in tokens

    def value(self, closer_than: int = 0) -> int:
        """The value of the next tokens, up to an operator that does not bind more closely than `closer_than`."""
        left = self.operand()
        while self.next_is(*_OPERATORS) and _OPERATORS[self.tokens[self.at]][0] > closer_than:
            closeness, apply = _OPERATORS[self.take()]
            left = int(apply(left, self.value(closeness)))
        if closer_than == 0 and self.next_is("?"):
            self.take()
            yes = self.value()
            self.take()
            no = self.value()
            return yes if left else no
        return left

    def operand(self) -> int:
        token = self.take()
        if token == "(":
            inner = self.value()
            self.take()
            return inner
        if token[0].isdigit():
            return int(token, 0)
        if token in ("true", "false"):
            return int(token == "true")
        if token in self.source.functions:
            parameter, body = self.source.functions[token]
            return _Expression(self.source, body, {**self.known, parameter: self.operand()}).value()
        return self.source.value_of(token, self.known)
