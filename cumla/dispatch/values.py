"""Checks of arguments that are not arrays, and how error messages show their values."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from .ranges import ranged

F = TypeVar("F", bound=Callable[..., Any])

FLOAT32_MAX, FLOAT32_LEAST = 2.0**128 - 2.0**104, 2.0**-126  # the largest, and the smallest of full precision
MOST_SHOWN = 100  # characters of a value
MOST_BITS = 256  # of an integer that is shown in digits


def plain_integers(function: F) -> F:
    """Convert NumPy integers among the arguments to Python's, so that they compare, wrap and hash like others."""
    return ranged(with_plain_integers(function))


def with_plain_integers(function: F) -> F:
    """The same without a range of its own, for a function that another one wraps."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*map(plain, arguments), **{name: plain(value) for name, value in keywords.items()})

    return cast(F, call)


def plain(value: Any) -> Any:
    """A NumPy integer as Python's; any other value unchanged."""
    return int(value) if isinstance(value, np.integer) else value


def check_integers(minimum: int, maximum: int = 2**31 - 1, **values: Any) -> None:
    """Raise TypeError for a value that is not an integer (a bool is not), ValueError for one out of range."""
    for name, value in values.items():
        if value.__class__ is not int and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
            raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, expected an integer")
        if value < minimum:
            raise ValueError(f"{name}: got {shown(value)}, expected at least {minimum}")
        if value > maximum:
            raise ValueError(f"{name}: got {shown(value)}, expected at most {maximum}")


def check_optional_size(**values: Any) -> None:
    """The same for sizes, at least 1; None means not given."""
    for name, value in values.items():
        if value is not None:
            check_integers(1, **{name: value})


def check_flags(**values: Any) -> None:
    """Raise TypeError for a value that is neither True nor False."""
    for name, value in values.items():
        if value.__class__ is not bool and not isinstance(value, np.bool_):
            raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, expected True or False")


def check_choice(choices: tuple[Any, ...], **values: Any) -> None:
    """Raise ValueError for a value that is none of the choices: strings, integers or None."""
    for name, value in values.items():
        if not isinstance(value, (str, int, np.integer, type(None))) or isinstance(value, bool) or value not in choices:
            expected = " or ".join(filter(None, (", ".join(map(repr, choices[:-1])), repr(choices[-1]))))
            raise ValueError(f"{name}: got {shown(value)}, expected {expected}")


def check_kind(kind: type, **values: Any) -> None:
    """Raise TypeError for a value that is not of a class."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, expected a {kind.__name__}")


def check_given(why: str, **arrays: Any) -> None:
    """Raise TypeError for None in place of an array that another argument requires; `why` names it."""
    for name, array in arrays.items():
        if array is None:
            raise TypeError(f"{name}: got None, expected an array {why}")


def finite(name: str, value: Any) -> float:
    """A number as a float. Raises TypeError unless it is a number (a bool is not), ValueError unless it is finite."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.integer, np.floating)):
        raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {shown(value)}, expected a finite number")
    return number


def in_float32(name: str, value: Any, positive: bool = False) -> float:
    """The same for a number that kernels take as float32; if `positive`, it must be above 0 in float32."""
    number = finite(name, value)
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"{name}: got {shown(value)}, expected a number that float32 has")
    if positive and number < FLOAT32_LEAST:
        raise ValueError(f"{name}: got {shown(value)}, expected a positive number")
    return number


def shown(value: Any) -> str:
    """A value as an error shows it, however long it is."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        bits = int(value).bit_length()
        return str(int(value)) if bits <= MOST_BITS else f"an integer of {bits} bits"
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"
