"""A pytest plugin: compiled functions run as interpreted code, on arrays that check indices.

    NUMBA_DISABLE_JIT=1 pytest -p support.checked -k cpu ...

NumPy counts negative indices from the end; these arrays do not. The run fails if a compiled function of kernels/cpu was
never called.
"""

import functools
import importlib
import pkgutil

import numpy as np

from cumla.kernels.numba_common import compiled as compiler

from . import properties

properties.MOST_EXAMPLES = 3
PACKAGE = "cumla.kernels.cpu"
_known, _called = set(), set()


class Checked(np.ndarray):
    """An array in which a negative index is an error, like an index past the end. Its views are such arrays."""

    def __getitem__(self, key):
        check(key)
        return super().__getitem__(key)

    def __setitem__(self, key, value):
        check(key)
        super().__setitem__(key, value)


def check(key):
    for part in key if key.__class__ is tuple else (key,):
        if part.__class__ is slice:
            negative = (part.start or 0) < 0 or (part.stop or 0) < 0
        else:
            negative = (part < 0).any() if part.__class__ is np.ndarray else part is not ... and part < 0
        if negative:
            raise IndexError(f"index {part}, which is before the start of an array")


def checked(value):
    """An argument with its arrays checked, those in named tuples included."""
    if type(value) is np.ndarray:
        return value.view(Checked)
    return type(value)(*map(checked, value)) if isinstance(value, tuple) else value


def compiled(function=None, **options):
    """Replaces `compiled`: only wraps the arrays of a function."""
    if function is None:
        return functools.partial(compiled, **options)
    name = f"{function.__module__}.{function.__qualname__}"
    if function.__module__.startswith(PACKAGE):
        _known.add(name)

    @functools.wraps(function)
    def call(*arguments):
        _called.add(name)
        return function(*map(checked, arguments))

    return call


compiler.compiled = compiled  # before the files of kernels/cpu import it


def pytest_sessionfinish(session):
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{PACKAGE}.{module.name}")
    missing = sorted(_known - _called)
    if missing or not _known:
        print("\nnever called:", *(missing or ["any"]), sep="\n  ")
        session.exitstatus = 1
