"""The checks of `cumla.debug`: the same files and functions as kernels/, without those that read nothing to check.

A check takes a kernel's arguments by name (kernels/reference), the fields of NamedTuples among them, and `first`: the
index of the call's first row in the arrays of the public call. It waits for the device and raises ValueError. If large
calls are made in pieces, it returns the number of rows that it checked.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def check_of(file: str, kernel: str) -> Callable[[Any], int | None] | None:
    """The check of a kernel; None if it has none."""
    if importlib.util.find_spec(f"{__name__}.{file}") is None:
        return None
    check: Callable[[Any], int | None] | None = getattr(importlib.import_module(f"{__name__}.{file}"), kernel, None)
    return check
