"""Files that a command is going to write, checked before it works for minutes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError

STDOUT = Path("-")


def check_outputs(outputs: Mapping[str, Path | None], read: Path | None = None) -> None:
    """Raises InputError for files by option that could not be written, as far as can be checked, or are one.

    Args:
        read: what the command reads, which it must not write over
    """
    seen: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None or path == STDOUT:
            continue
        check_writable(option, path)
        if path.exists() and not path.is_file():
            continue  # a device or a pipe, which several may write
        place = path.resolve()
        if place in seen:
            raise InputError(f"{option}: got {path}, which {seen[place]} writes, expected another file")
        if read is not None and read != STDOUT and place == read.resolve():
            raise InputError(f"{option}: got {path}, which is read, expected another file")
        seen[place] = option


def check_writable(option: str, path: Path) -> None:
    """Raises InputError for a file that could not be written, as far as can be checked before."""
    try:
        target = path if path.exists() else path.parent
    except OSError as error:  # a name that is too long
        raise InputError(f"{option}: cannot write {str(path)!r:.80}: {error.strerror or error}") from None
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder, expected a file")
    if not target.exists():
        raise InputError(f"{option}: there is no folder {path.parent}")
    if not os.access(target, os.W_OK):
        raise InputError(f"{option}: no permission to write {path}")
