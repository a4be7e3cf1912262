"""An entry point for Numba's machine code: it converts Python's arguments to Numba's calling convention.

Numba's convention: a function takes the addresses of its result and of an exception, then its arguments, and returns 0
if nothing was raised. An array is

    meminfo*, parent*, size, itemsize, data*, shape ..., strides ...

(meminfo is null: the caller keeps it alive), a tuple its members in order. The entry takes result, exception, and an
array of 64-bit words: a number is one word (a float as a double), an array the address of NumPy's object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir

ENTRY = "cumla_entry"
# Offsets in PyArrayObject, whose first fields NumPy's ABI fixes: data*, int nd, dimensions*, strides*.
DATA = object.__basicsize__
SHAPE, STRIDES = DATA + 16, DATA + 24

WORD = ir.IntType(64)
POINTER = ir.IntType(8).as_pointer()
STATUS = ir.IntType(32)


def entry_to(symbol: str, arguments: tuple[Any, ...]) -> str:
    """The entry as LLVM assembly, for arguments of these types."""
    module = ir.Module()
    kind = ir.FunctionType(STATUS, [POINTER, POINTER, WORD.as_pointer()])
    function = ir.Function(module, kind, ENTRY)
    result, exception, words = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    values: list[Any] = []
    for number, argument in enumerate(_leaves(arguments)):
        word = builder.load(builder.gep(words, [WORD(number)]))
        parts = _array if isinstance(argument, np.ndarray) else _number
        values += parts(builder, word, argument)
    target = ir.FunctionType(STATUS, [POINTER, POINTER, *(value.type for value in values)])
    status = builder.call(ir.Function(module, target, symbol), [result, exception, *values])
    builder.ret(status)
    return str(module)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _number(builder: Any, word: Any, value: Any) -> list[Any]:
    if isinstance(value, (bool, np.bool_)):
        return [builder.trunc(word, ir.IntType(8))]
    if isinstance(value, (float, np.floating)):
        double = builder.bitcast(word, ir.DoubleType())
        return [builder.fptrunc(double, ir.FloatType()) if isinstance(value, np.float32) else double]
    bits = 64 if isinstance(value, int) else 8 * value.itemsize
    return [word if bits == 64 else builder.trunc(word, ir.IntType(bits))]


def _array(builder: Any, word: Any, array: np.ndarray) -> list[Any]:
    """The fields of an array of this dtype and number of dimensions."""
    place = builder.inttoptr(word, POINTER)

    def field(offset: int, kind: Any) -> Any:
        at = builder.gep(place, [WORD(offset)])
        return builder.load(builder.bitcast(at, kind.as_pointer()))

    sizes = []
    for offset in (SHAPE, STRIDES):
        numbers = field(offset, WORD.as_pointer())
        sizes.append([builder.load(builder.gep(numbers, [WORD(axis)])) for axis in range(array.ndim)])
    shape, strides = sizes
    count = WORD(1)
    for size in shape:
        count = builder.mul(count, size)
    return [POINTER(None), POINTER(None), count, WORD(array.itemsize), field(DATA, POINTER), *shape, *strides]
