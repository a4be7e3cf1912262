"""NVTX ranges around operations, which profilers such as Nsight Systems show: with CUMLA_NVTX=1."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

VARIABLE = "CUMLA_NVTX"
log = logging.getLogger("cumla")


def _not_recorded(*_: str) -> None:
    pass


@functools.cache
def library() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """CuPy's functions that open and close a range of this thread.

    CuPy is imported at the first call, as `import cumla` does not import it. Without CuPy, ranges are not recorded.
    """
    try:
        from cupy.cuda.nvtx import RangePop, RangePush
    except ImportError:
        log.warning("%s: expected CuPy, which is not installed: operations have no NVTX ranges", VARIABLE)
        return _not_recorded, _not_recorded
    return RangePush, RangePop


def ranged(function: F) -> F:
    """The function within an NVTX range of its name. Without CUMLA_NVTX=1 at import, the function itself."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return function
    message = f"cumla.{function.__name__}"

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        push, pop = library()
        push(message)
        try:
            return function(*arguments, **keywords)
        finally:
            pop()

    return cast(F, call)
