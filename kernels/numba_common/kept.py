"""Where machine code is kept on disk: in folders named by all that it can follow from.

Numba's own cache asks whether the file of a function has changed, and not whether what the function calls has: a
changed helper would go on as it was. So a folder is named by the content of kernels/ and the versions of what compiles
it. Where nothing can be kept (read-only folders, a home that is not ours) every process compiles anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import uuid
import warnings
from pathlib import Path

import llvmlite
import ml_dtypes
import numpy as np

KERNELS = Path(__file__).parent.parent
PREFIX = "compiled-"
MOST_FOLDERS = 8  # of different content in one place: a developer goes back and forth
CACHE_DIR = "NUMBA_CACHE_DIR"
# Of the variables that Numba reads, those that change nothing in what it compiles.
IRRELEVANT = (CACHE_DIR, "NUMBA_NUM_THREADS", "NUMBA_ENABLE_CUDASIM")


def write(folder: Path, name: str, data: bytes) -> None:
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
    """Where machine code of this content may be kept, if anywhere; the folder need not exist, nor be writable.

    In NUMBA_CACHE_DIR if that is set, else in the user's cache. In the package `pip uninstall` would leave it behind.
    """
    digest = content()
    if digest is None:
        return []
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = Path(os.environ.get(CACHE_DIR) or Path(cache_home) / "cumla")
    folder = place / (PREFIX + digest)
    if os.path.exists(folder):
        if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
            warnings.warn(f"{folder} cannot be read: what was kept in it is compiled again", RuntimeWarning, 2)
            return []
        with contextlib.suppress(OSError):
            os.utime(folder)  # in use
    return [folder]


@functools.cache
def content() -> str | None:
    """What machine code follows from, as one word; None where the sources are not files that can be read."""
    versions = (sys.version, numba_version(), llvmlite.__version__, np.__version__, ml_dtypes.__version__)
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


@functools.cache
def numba_version() -> str:
    """Without importing Numba, nor what reads the metadata of packages where that can be helped: both take long."""
    spec = importlib.util.find_spec("numba")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            said = re.search(r'"version": "([^"]+)"', Path(spec.origin).with_name("_version.py").read_text())
            if said:
                return said[1]
    from importlib import metadata

    return metadata.version("numba")
