"""Functions that Numba compiles, and where their machine code is kept.

Numba's own cache asks whether the file of a function has changed, and not whether what the function calls has: a
changed helper would go on as it was. So the place of this one depends on all that machine code can follow from: the
content of kernels/ and the versions of what compiles it. A file that is damaged or cannot be read is compiled again,
with a warning. Where nothing can be kept (read-only folders, a home that is not ours) every process compiles anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import ml_dtypes
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

from ..types.verdicts import Fresh, note

log = logging.getLogger(__name__)
KERNELS = Path(__file__).parent.parent
PREFIX = "compiled-"
MOST_FOLDERS = 8  # of different content in one place: a developer goes back and forth
DIGEST_BYTES = 32
VERDICT = ".verdict"  # beside the machine code that it is of
COMPILER = f"Numba {numba.__version__} (llvmlite {llvmlite.__version__})"
REMEDY = "Install other versions of numba and llvmlite; until then backend='reference' does without them"

# A fork waits until no other thread compiles: its lock would be held in the child for ever.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`numba.njit(**options)` of a function, its machine code kept on disk where there is a place for it."""
    if function is None:
        return functools.partial(compiled, **options)
    dispatcher = numba.njit(**options)(function)
    if hasattr(dispatcher, "_cache"):  # a plain function where Numba is told not to compile
        dispatcher._cache = _MachineCode(function, options)
    return dispatcher


class _MachineCode(NullCache):
    """The machine code of one function, a file for each signature and processor."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._name = function.__qualname__
        code = function.__code__
        self._identity = (function.__module__, self._name, code.co_firstlineno, sorted(options.items()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is kept for a signature, or None."""
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        for folder in folders():
            path = folder / name
            if not os.path.exists(path):  # nor where we must not even look
                continue
            try:
                result = CompileResult._rebuild(target_context, *_unpacked(path.read_bytes()))
            except Exception as error:  # whatever unpickling makes of damaged bytes
                warnings.warn(f"{path} is compiled again: {error!r}", RuntimeWarning, stacklevel=2)
                continue
            self._note(path)
            return result
        return None

    def _note(self, path: Path | None) -> None:
        verdict = None if path is None else path.with_name(f"{path.name}{VERDICT}")
        note(Fresh(self._name, "cpu", COMPILER, REMEDY, verdict))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature in the first place that takes it."""
        if data.lifted or data.library.has_dynamic_globals:  # has addresses of this process
            return
        payload = dumps(data._reduce())
        for folder in folders():
            with contextlib.suppress(OSError):
                name = self._file_name(sig, data.codegen)
                _write(folder, name, hashlib.sha256(payload).digest() + payload)
                log.debug("%s: compiled, kept in %s", self._name, folder)
                self._note(folder / name)
                return
        self._note(None)
        log.debug("%s: compiled, for this process alone", self._name)

    def _file_name(self, sig: Any, codegen: Any) -> str:
        identity = repr((*self._identity, str(sig), codegen.magic_tuple()))
        return f"{self._name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def _unpacked(data: bytes) -> Any:
    payload = data[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != data[:DIGEST_BYTES]:
        raise ValueError("damaged")
    return pickle.loads(payload)


def _write(folder: Path, name: str, data: bytes) -> None:
    """A whole file or none, whoever else writes it at the same time."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder)
    path, temporary = folder / name, folder / f"{name}.{uuid.uuid4().hex}"
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_old(folder: Path) -> None:
    """Remove the machine code of other content that was used longest ago."""
    others = [other for other in folder.parent.glob(f"{PREFIX}*") if other != folder]
    with contextlib.suppress(OSError):
        others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for other in others[MOST_FOLDERS - 1 :]:
            shutil.rmtree(other, ignore_errors=True)


@functools.cache
def folders() -> list[Path]:
    """Where machine code of this content may be kept, the first place first; it need not exist, nor be writable.

    NUMBA_CACHE_DIR if that is set, as whoever sets it expects; else beside the kernels, else in the user's cache.
    """
    digest = content()
    if digest is None:
        return []
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [KERNELS / "__pycache__", Path(cache_home) / "cumla"]
    if numba.config.CACHE_DIR:
        places = [Path(numba.config.CACHE_DIR)]
    found = []
    for folder in (place / (PREFIX + digest) for place in places):
        if os.path.exists(folder):
            if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
                warnings.warn(f"{folder} cannot be read: what was kept in it is compiled again", RuntimeWarning, 2)
                continue
            with contextlib.suppress(OSError):
                os.utime(folder)  # in use
        found.append(folder)
    return found


@functools.cache
def content() -> str | None:
    """What machine code follows from, as one word; None where the sources are not files that can be read."""
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__, ml_dtypes.__version__)
    digest = hashlib.sha256(repr(versions).encode())
    sources = sorted(KERNELS.rglob("*.py"))
    try:
        for path in sources:
            source = path.read_bytes()
            digest.update(f"{path.relative_to(KERNELS).as_posix()} {len(source)}\n".encode() + source)
    except OSError:
        return None
    return digest.hexdigest()[:24] if sources else None
