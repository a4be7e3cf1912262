"""Calls that work, one argument changed, and the check that such a call is an error that wrote nothing.

A table has rows (argument, wrong, error, text) by the name of a call:

argument  a name, or a dotted path into an argument: `metadata.block_size`; "" for all arguments at once
wrong     a value, a function of the right value, or `From` a function of the whole call
text      what the message begins with, a regular expression; None: the argument and "got"
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

LONGEST_MESSAGE = 500
V = ValueError
T = TypeError
EITHER = (TypeError, ValueError)


@dataclasses.dataclass
class Call:
    """A call that works.

    Attributes:
        arguments: by name
        writes: further objects with arrays that it writes, or allocates
        source: what the arguments were made of, for `From`
        creates: whether it returns something new instead of writing
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    writes: tuple[Any, ...] = ()
    source: Any = None
    creates: bool = False


@dataclasses.dataclass
class From:
    """An invalid argument that is a function of the call's source."""

    make: Callable[[Any], Any]


class With:
    """Other values, or functions of the right ones, of some members of an argument."""

    def __init__(self, **changes):
        self.changes = changes

    def __call__(self, value):
        for name, wrong in self.changes.items():
            value = replaced(value, name, wrong)
        return value


class Without(With):
    """Some arguments left out, and others changed."""

    def __init__(self, *names, **changes):
        super().__init__(**changes)
        self.names = names

    def __call__(self, arguments):
        return {name: value for name, value in super().__call__(arguments).items() if name not in self.names}


def read_only(array):
    """A copy that may not be written."""
    array = array.copy()
    array.flags.writeable = False
    return array


def wrong_arguments(call, argument, wrong):
    """The arguments of a call, of which one is changed."""
    if isinstance(wrong, From):
        wrong = wrong.make(call.source)
        return replaced(call.arguments, argument, lambda _: wrong)
    return replaced(call.arguments, argument, wrong)


def replaced(value, path, wrong):
    """A copy of an object or dict, with the member at a path changed."""
    if not path:
        return wrong(value) if callable(wrong) else wrong
    name, _, rest = path.partition(".")
    if isinstance(value, dict):
        return {**value, name: replaced(value.get(name), rest, wrong)}
    member = replaced(getattr(value, name), rest, wrong)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{name: member})
    other = copy.copy(value)
    setattr(other, name, member)
    return other


def check(call, argument, wrong, error, text, put=lambda value: value, get=np.asarray):
    """put, get: to the place of the call, and back."""
    arguments = {name: put(value) for name, value in wrong_arguments(call, argument, wrong).items()}
    text = re.escape(argument) + ": got" if text is None else text
    with refused(error, f"^(?:{text})", [arguments, call.arguments], call.writes, get):
        call.function(**arguments)


@contextlib.contextmanager
def refused(error, text, given, writes=(), get=np.asarray):
    """An error with a short message, before anything is written: not even an array that is wrong.

    Args:
        given: objects with arrays, which may cache views of them
        writes: objects that do not change at all
    """
    before, written = contents(given, get), contents(writes, get)
    with pytest.raises(error, match=text) as caught:
        yield caught
    assert len(str(caught.value)) < LONGEST_MESSAGE
    after = contents(given, get)
    assert [path for path in before if after[path] != before[path]] == []
    assert contents(writes, get) == written


def contents(value, get=np.asarray):
    """All numbers, and the bytes of all arrays, that an object is or contains, by the first path to each."""
    found = {}
    add(found, value, "", get, set())
    return found


def add(found, value, path, get, seen):
    if isinstance(value, int):
        found[path] = value
        return
    if value is None or isinstance(value, str | float) or id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, "dtype") and hasattr(value, "strides"):
        if value.shape and value.dtype.kind not in "OU":
            found[path] = np.asarray(get(value)).tobytes()
        return
    for name, member in members(value):
        add(found, member, f"{path}.{name}", get, seen)


def members(value):
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, dict | Mapping):
        return list(value.items())
    has_members = type(value).__module__.partition(".")[0] in ("cumla", "types") and not isinstance(value, type)
    return list(getattr(value, "__dict__", {}).items()) if has_members else []
