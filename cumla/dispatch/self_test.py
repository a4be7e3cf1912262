"""Self-test: each compiled kernel is compared once with the reference, on a small case, before its results are used."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..arrays import streams
from ..kernels.self_tests import FAILED, NOT_REACHED, RIGHT, UNTESTED, WRONG, Fresh, MiscompiledError, conclude
from ..layout import LAYOUTS, CacheLayout, layouts_of
from . import debug

log = logging.getLogger(__name__)


class SelfTest(Protocol):
    """The interface of cumla.self_test, which uses the operations and is therefore injected by `test_with`."""

    CASES: tuple[Any, ...]  # of all operations; a case has `op` and `variant`

    def check_case(self, case: Any, backend: str, seed: int, heads: int) -> Any:
        """The outcome of a case."""


_self_tests: list[Callable[[], SelfTest]] = []


def test_with(self_test: Callable[[], SelfTest]) -> None:
    """Use the cases of the module that `self_test` returns; it is called when the first kernel is to be tested."""
    _self_tests[:] = [self_test]


class _Thread(threading.local):
    busy = False


_thread = _Thread()


def run_self_test(op: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Test the kernels compiled for the call of an operation that was just made.

    They are not tested while a CUDA graph is captured, as the test waits for the device: another process tests them.
    Raises MiscompiledError for a wrong result.
    """
    if _thread.busy:
        return
    if op in FAILED:
        raise MiscompiledError(FAILED[op])
    fresh = UNTESTED.copy()
    del UNTESTED[: len(fresh)]
    if any(x.backend == "cuda" for x in fresh) and _is_capturing():
        return
    _thread.busy = True
    try:
        for backend in dict.fromkeys(x.backend for x in fresh):
            some = [x for x in fresh if x.backend == backend]
            cases = _cases(op, _layouts([*arguments, *keywords.values()], some), _given(keywords))
            with debug.unchecked():
                _run_self_test(op, some, cases, _heads(arguments, keywords))
    finally:
        _thread.busy = False


def _run_self_test(op: str, fresh: Sequence[Fresh], cases: Sequence[Any], heads: int) -> None:
    backend = fresh[0].backend
    launched: set[int] = set()
    for case in cases:
        with _launches(backend) as launches:
            outcome = _self_tests[0]().check_case(case, backend, 0, heads)
        launched |= {id(launch.kernel) for launch in launches}
        if outcome.passed:
            continue
        suspects = [x for x in fresh if x.kernel is None or id(x.kernel) in launched] or list(fresh)
        where = f"{op} ({case.variant})" if case.variant else op
        what = f"is off by {outcome.error:.3g}" if outcome.error is not None else f"fails with {outcome.note}"
        message = (
            f"{where}: a small case {what} on backend {backend!r}; compiled by {suspects[0].compiler}: "
            f"{', '.join(dict.fromkeys(x.what for x in suspects))}. {suspects[0].remedy}"
        )
        for x in suspects if outcome.error is not None else ():
            conclude(x, f"{WRONG}: {message}")
        FAILED[op] = message
        raise MiscompiledError(message)
    for x in fresh:
        reached = bool(cases) and (x.kernel is None or id(x.kernel) in launched)
        conclude(x, RIGHT if reached else NOT_REACHED)
        log.debug("%s: %s", x.what, RIGHT if reached else NOT_REACHED)


def _cases(op: str, layouts: set[str], given: set[str]) -> list[Any]:
    """The cases of an operation for these cache formats or named like a given keyword; if none, the first case."""
    cases = [case for case in _self_tests[0]().CASES if case.op == op]
    some = [case for case in cases if case.variant in given or layouts & set(case.variant.split(", "))]
    return some or cases[:1]


def _given(keywords: Mapping[str, Any]) -> set[str]:
    """Names of the keywords that a call gives a value."""
    return {name for name, value in keywords.items() if value is not None and value is not False}


def _layouts(values: Sequence[Any], fresh: Sequence[Fresh]) -> set[str]:
    """Names of the cache formats of a call."""
    found = {x.layout for x in fresh if x.layout}
    for value in values:
        shape: tuple[int, ...] = getattr(value, "shape", ())
        if isinstance(value, CacheLayout):
            found.add(value.name)
        elif isinstance(value, str):
            found |= {value} & LAYOUTS.keys()
        elif len(shape) in (3, 4) and str(getattr(value, "dtype", "")).endswith("uint8"):
            known = layouts_of(int(shape[-1]))
            found |= {layout.name for layout in known if len(known) == 1}  # else the call names it
    return found


def _heads(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Query heads of a call, for which kernels are compiled; 3 if it has none."""
    q = keywords.get("q", arguments[0] if arguments else None)
    shape: tuple[int, ...] = getattr(q, "shape", ())
    return int(shape[-2]) if len(shape) in (3, 4) and 1 <= shape[-2] <= 128 and shape[-1] in (512, 576) else 3


def _launches(backend: str) -> contextlib.AbstractContextManager[list[Any]]:
    if backend != "cuda":
        return contextlib.nullcontext([])
    from ..kernels.cuda.launch import recorded_launches

    return recorded_launches()


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return streams.is_capturing()
