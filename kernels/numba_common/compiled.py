"""Functions compiled by Numba and called through their machine code, which is kept on disk.

A process that finds the machine code there does not import Numba (native.py). A damaged file is recompiled, with a
warning.
"""

import contextlib
import functools
import hashlib
import importlib
import logging
import os
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from ..self_tests import Fresh, announce_compilation, note
from . import kept
from .native import MachineCode, NativeFunction, object_of, packing, processor, taken_apart, undefined_symbols

log = logging.getLogger(__name__)
RESULT_SUFFIX = ".verdict"  # self-test result, beside the machine code
REMEDY = "Install other versions of numba and llvmlite; until then backend='reference' does without them"
# Nothing is allocated, so machine code needs nothing of Numba's runtime.
ALONE = {"_nrt": False}
WITHOUT_WRAPPERS = {**ALONE, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_lock = threading.RLock()  # held while something is compiled or loaded
# A fork waits until no other thread holds the lock: the child would otherwise never get it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Like `numba.njit(**options)` of a function, which Python and other such functions call.

    It takes arrays, numbers, and named tuples of them, and allocates nothing.
    """
    if function is None:
        return functools.partial(compiled, **options)
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return function
    return Compiled(function, options)


def compiler() -> str:
    return f"Numba {kept.numba_version()} (llvmlite {llvmlite.__version__})"


class Compiled:
    """A function, compiled for each combination of types that it is called with."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.name, self.function, self.options = function.__qualname__, function, options
        self._natives: dict[tuple[Any, ...], NativeFunction] = {}
        self._dispatchers: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        key, words = taken_apart(arguments)
        native = self._natives.get(key)
        if native is None:
            with _lock:
                native = self._natives.get(key) or self._find(key, arguments, words)
                self._natives[key] = native
        return native(words)

    @property
    def _numba_type_(self) -> Any:
        """Numba's type, for compiled functions that call this one."""
        return self.dispatcher()._numba_type_

    def dispatcher(self, **more: Any) -> Any:
        """Numba's dispatcher, with more options, which also apply to the functions it calls."""
        key = tuple(sorted(more.items()))
        if key not in self._dispatchers:
            numba = _numba()
            known = {
                name: value.dispatcher(**more) if isinstance(value, Compiled) else value
                for name, value in self.function.__globals__.items()
                if not isinstance(value, Compiled) or name in self.function.__code__.co_names
            }
            copy = types.FunctionType(self.function.__code__, known, self.function.__name__)
            self._dispatchers[key] = numba.njit(**self.options, **more)(functools.update_wrapper(copy, self.function))
        return self._dispatchers[key]

    def _find(self, key: tuple[Any, ...], arguments: tuple[Any, ...], words: list[Any]) -> NativeFunction:
        """The kept machine code for these types, or new code."""
        code = self.function.__code__
        identity = repr((
            self.__module__, self.name, code.co_firstlineno, sorted(self.options.items()), _described(key),
            processor(),
        ))  # fmt: skip
        name = f"{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        for path in (folder / name for folder in kept.folders()):
            if not os.path.exists(path):  # also if the path may not be read
                continue
            try:
                native = _load(MachineCode.from_bytes(path.read_bytes()))
            except (ValueError, OSError, KeyError, LookupError, RuntimeError) as error:
                warnings.warn(f"{path} is compiled again: {error!r}", RuntimeWarning, stacklevel=4)
                continue
            self._note(path)
            return native
        machine_code = self._compile(arguments, words)
        self._note(self._keep(name, machine_code))
        return _load(machine_code)

    def _compile(self, arguments: tuple[Any, ...], words: list[Any]) -> MachineCode:
        from .entry import ENTRY, entry_to  # imports that a process with kept code avoids

        announce_compilation()
        numba = _numba()
        signature = tuple(numba.typeof(value) for value in arguments)
        inner = self.dispatcher(**WITHOUT_WRAPPERS)  # the options also apply to its callees
        dispatcher = numba.njit(**self.options, **WITHOUT_WRAPPERS)(inner.py_func)
        dispatcher.compile(signature)
        made = dispatcher.overloads[signature]
        symbol, code = made.fndesc.llvm_func_name, made.library._get_compiled_object()
        objects = code, object_of(entry_to(symbol, arguments))
        needs = set().union(*map(undefined_symbols, objects)) - {symbol}
        result = str(made.signature.return_type)
        return MachineCode(ENTRY, result, packing(words), tuple(sorted(needs)), objects)

    def _keep(self, name: str, code: MachineCode) -> Path | None:
        """Write to the first folder that allows it."""
        for folder in kept.folders():
            with contextlib.suppress(OSError):
                kept.write(folder, name, code.as_bytes())
                log.debug("%s: compiled, kept in %s", self.name, folder)
                return folder / name
        log.debug("%s: compiled, for this process alone", self.name)
        return None

    def _note(self, path: Path | None) -> None:
        result_file = None if path is None else path.with_name(f"{path.name}{RESULT_SUFFIX}")
        note(Fresh(self.name, "cpu", compiler(), REMEDY, result_file))


def _load(code: MachineCode) -> NativeFunction:
    try:
        return NativeFunction(code)
    except LookupError:  # Numba provides some symbols, such as Intel's vector functions where they are installed
        _numba()
        return NativeFunction(code)


@functools.cache
def _numba() -> Any:
    numba = importlib.import_module("numba")
    lock = importlib.import_module("numba.core.compiler_lock").global_compiler_lock
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return numba


def _described(part_of_key: Any) -> Any:
    """Everything that machine code depends on, as text that is equal in every process."""
    if isinstance(part_of_key, np.dtype):
        return part_of_key.str
    if isinstance(part_of_key, tuple):
        return tuple(_described(part) for part in part_of_key)
    return f"{part_of_key.__module__}.{part_of_key.__qualname__}" if isinstance(part_of_key, type) else part_of_key
