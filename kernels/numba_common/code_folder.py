"""The folder of machine code on disk, named by everything that the code depends on.

Numba's own cache checks whether a function's file has changed, but not the functions it calls: a changed helper would
stay compiled as it was. So a folder is named by the content of kernels/ and the compiler's versions. If the folder is
not writable (read-only file systems, another user's home), every process recompiles.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import uuid
import warnings
from pathlib import Path

import llvmlite
import ml_dtypes
import numba
import numpy as np

KERNELS = Path(__file__).parent.parent
PREFIX = "compiled-"
MOST_FOLDERS = 8  # content versions per location: a developer switches between them
CACHE_DIR = "NUMBA_CACHE_DIR"
# Environment variables of Numba that do not affect compilation.
IRRELEVANT = (CACHE_DIR, "NUMBA_NUM_THREADS", "NUMBA_ENABLE_CUDASIM")


def write(path: Path, data: bytes) -> None:
    """Write a whole file or none, even if other processes write it at the same time."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(path.parent)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_old(folder: Path) -> None:
    """Remove the machine code of the content version that was used longest ago."""
    others = [other for other in folder.parent.glob(f"{PREFIX}*") if other != folder]
    with contextlib.suppress(OSError):
        others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for other in others[MOST_FOLDERS - 1 :]:
            shutil.rmtree(other, ignore_errors=True)


@functools.cache
def folder() -> Path | None:
    """The folder for machine code of this content, if any; it need not exist or be writable.

    In NUMBA_CACHE_DIR if that is set, else in the user's cache. `pip uninstall` would not remove it from the package.
    """
    digest, place = content(), _place()
    if digest is None or place is None:
        return None
    found = place / (PREFIX + digest)
    if os.path.exists(found):
        if not os.path.isdir(found) or not os.access(found, os.R_OK | os.X_OK):
            warnings.warn(f"{found} cannot be read: what was kept in it is compiled again", RuntimeWarning, 2)
            return None
        with contextlib.suppress(OSError):
            os.utime(found)  # marks it as in use
    return found


def _place() -> Path | None:
    """The folder of all content versions; None for a user without a home.

    Never one that is relative to the current directory, from which code of another user would be loaded.
    """
    asked = os.environ.get(CACHE_DIR)
    if asked:
        if os.path.isabs(asked):
            return Path(asked)
        warnings.warn(f"{CACHE_DIR}: got {asked!r}, expected an absolute path: it is ignored", RuntimeWarning, 3)
    for cache in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(cache):  # the XDG specification ignores others, and "~" stays where no home is known
            return Path(cache) / "cumla"
    return None


@functools.cache
def content() -> str | None:
    """Hash of everything that machine code depends on; None if the sources are not readable files."""
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__, ml_dtypes.__version__)
    settings = sorted(x for x in os.environ.items() if x[0].startswith("NUMBA_") and x[0] not in IRRELEVANT)
    digest = hashlib.sha256(repr((versions, settings)).encode())
    sources = sorted(KERNELS.rglob("*.py"))
    try:
        for path in sources:
            source = path.read_bytes()
            digest.update(f"{path.relative_to(KERNELS).as_posix()} {len(source)}\n".encode() + source)
    except OSError:
        return None
    return digest.hexdigest()[:24] if sources else None
