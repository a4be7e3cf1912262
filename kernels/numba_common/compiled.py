"""Functions compiled by Numba, cached on disk: one file for each function and combination of argument types.

Numba's own cache fails at import in a read-only installation, fails forever once one of its files is truncated, and can
be damaged by two processes that compile a function for different types. Here, an unreadable file is compiled again.
"""

import functools
import hashlib
import logging
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import serialize, types
from numba.core.caching import NullCache
from numba.core.compiler import Compiler, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target

from ..check_results import Fresh, announce_compilation, note, note_unsaved
from . import code_folder

log = logging.getLogger(__name__)
RESULT_SUFFIX = ".verdict"  # self-test result, in the folder of the machine code
COMPILER = f"Numba {numba.__version__} (llvmlite {llvmlite.__version__})"
REMEDY = "Install other versions of numba and llvmlite; until then backend='reference' does without them"
DIGEST_BYTES = 32
OPTIONS = {"nopython": True, "_nrt": False, "no_cfunc_wrapper": True}  # nothing is allocated, and C calls nothing

# Numba loads its functions with the first compilation. An exception of a signal handler would leave half of them there,
# for the life of the process. The import of this module is not interrupted (arrays/whole_import.py).
if not numba.config.DISABLE_JIT:
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()

# A fork waits until no other thread compiles: the child would otherwise never get the lock.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Like `numba.njit(**options)` of a function; Python and other compiled functions may call it.

    The function takes arrays, numbers and named tuples of them, and allocates nothing.
    """
    if function is None:
        return functools.partial(compiled, **options)
    return function if numba.config.DISABLE_JIT else Compiled(function, targetoptions=OPTIONS | options)


class Compiled(CPUDispatcher):
    """Numba's dispatcher for calls from Python. Compiled functions call the function through another dispatcher, which
    does not compile wrappers for Python."""

    def __init__(
        self, py_func: Any, local_types: Any = None, targetoptions: Any = None, pipeline_class: Any = Compiler
    ) -> None:
        super().__init__(py_func, local_types or {}, targetoptions, pipeline_class)
        self._cache = Cache(py_func, targetoptions)
        self._inner = CPUDispatcher(py_func, self.locals, targetoptions | {"no_cpython_wrapper": True}, pipeline_class)

    @property
    def _numba_type_(self) -> Any:
        return types.Dispatcher(self._inner)


class Cache(NullCache):
    """The files of one function. Numba calls both methods while it holds its lock."""

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        self._name, line = function.__qualname__, function.__code__.co_firstlineno
        self._file = function.__module__.rpartition(".")[2]
        self._identity = function.__module__, self._name, line, sorted(options.items())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The overload for these types, or None. Raises MiscompiledError for an overload that failed its self-test."""
        path, overload = self._path(sig, target_context), None
        if path is not None and os.path.exists(path):
            target_context.refresh()
            try:
                overload = CompileResult._rebuild(target_context, *pickle.loads(_payload(path)))
            except Exception as error:  # of any kind, as Numba reads the file
                warnings.warn(f"{path} is compiled again: {error!r}", RuntimeWarning, stacklevel=4)
        if overload is None:
            announce_compilation(self._file)
        result_file = None if path is None else path.with_name(f"{path.name}{RESULT_SUFFIX}")
        note(Fresh(self._name, "cpu", COMPILER, REMEDY, result_file))
        return overload

    def save_overload(self, sig: Any, overload: Any) -> None:
        path, reason = self._path(sig, overload.target_context), "no folder can be used"
        if path is not None:
            payload = serialize.dumps(overload._reduce())
            try:
                code_folder.write(path, hashlib.sha256(payload).digest() + payload)
            except OSError as error:
                reason = f"{path.parent}: {error.strerror or error}"
            else:
                log.debug("%s: compiled, stored in %s", self._name, path.parent)
                return
        note_unsaved(reason)
        log.debug("%s: compiled, for this process alone: %s", self._name, reason)

    def _path(self, sig: Any, target_context: Any) -> Path | None:
        """The file, named by everything that the machine code depends on except the content of kernels/."""
        folder = code_folder.folder()
        identity = repr((self._identity, str(sig), target_context.codegen().magic_tuple()))
        name = f"{self._name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        return None if folder is None else folder / name


def _payload(path: Path) -> bytes:
    data = path.read_bytes()
    if hashlib.sha256(data[DIGEST_BYTES:]).digest() != data[:DIGEST_BYTES]:
        raise ValueError("damaged")
    return data[DIGEST_BYTES:]
