"""An argument that does not fit is an error that names it, and nothing has been written by then."""

import functools

import numpy as np
import pytest

from support import calls
from support.refused import check, contents

from . import attention, metadata, models, models_v41, operations, parallel

pytestmark = pytest.mark.filterwarnings("error")
TABLES = [attention, metadata, models, models_v41, parallel]
CALLS = {name: make for table in TABLES for name, make in table.CALLS.items()}
# No wrong call changes them.
call = functools.cache(lambda name: CALLS[name]())
operation = functools.cache(calls.call)


def rows(*tables):
    rows = [(name, *row) for table in tables for name, rows in table.WRONG.items() for row in rows]
    ids = [f"{name}-{argument or 'several'}-{i}" for i, (name, argument, *_) in enumerate(rows)]
    return pytest.mark.parametrize(("name", "argument", "wrong", "error", "text"), rows, ids=ids)


@pytest.mark.parametrize("name", CALLS)
def test_the_unchanged_call_works(name):
    """test_nonsense.py calls the operations."""
    right = CALLS[name]()
    given = right.arguments, right.writes
    before = contents(given)
    right.function(**right.arguments)
    assert (contents(given) == before) == right.creates


@rows(*TABLES)
def test_wrong_argument(name, argument, wrong, error, text):
    check(call(name), argument, wrong, error, text)


@rows(operations)
@pytest.mark.nowhere(when=lambda x: x.device and operations.makes_read_only(x.get("wrong")))  # CuPy's are not
def test_wrong_argument_of_an_operation(host_or_device, name, argument, wrong, error, text):
    right = operation(name)
    if callable(wrong):
        wrong = wrong(right.arguments[argument])
    text = text.format(wrong=wrong, **right.arguments)
    for integer in (int, np.int64, np.int16):
        put = functools.partial(calls.put, host_or_device, integer=integer)
        check(calls.with_backend(right, host_or_device.backend), argument, wrong, error, text, put, host_or_device.get)
