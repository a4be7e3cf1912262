"""Self-test: each compiled kernel is compared once with the reference, on a small case, before its results are used."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..arrays import streams
from ..kernels.check_results import (
    FAILED,
    NOT_REACHED,
    RIGHT,
    RUNNING,
    UNDER_TEST,
    WRONG,
    Fresh,
    MiscompiledError,
    RunningCall,
    conclude,
)
from ..layout import LAYOUTS, CacheLayout, layouts_of
from . import debug

log = logging.getLogger(__name__)


class SelfTest(Protocol):
    """The interface of cumla.specs.self_test, which uses the operations and is therefore injected by `test_with`."""

    CASES: tuple[Any, ...]  # of all operations; a case has `op` and `variant`

    def check_case(self, case: Any, backend: str, seed: int, heads: int) -> Any:
        """The outcome of a case."""


_self_tests: list[Callable[[], SelfTest]] = []


def test_with(self_test: Callable[[], SelfTest]) -> None:
    """Use the cases of the module that `self_test` returns; it is called when the first kernel is to be tested."""
    _self_tests[:] = [self_test]


class Test(NamedTuple):
    """The self-test of what was compiled for a call.

    Attributes:
        fresh: the kernels
        cases: of the operation, for the call's cache formats and keywords
        heads: query heads of the cases
    """

    op: str
    fresh: list[Fresh]
    cases: Sequence[Any]
    heads: int


# Tests to run, by operation. The call that compiled the kernels runs them; the next call of the operation does, if that
# call or the test raised an error, or if the kernels were compiled within a capture or another test.
PENDING: dict[str, collections.deque[Test]] = {}


def tested(function: Callable[..., Any], op: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """The result of a public function, once the kernels that were compiled for the call are tested.

    They are not tested while a CUDA graph is captured, as the test waits for the device. Raises MiscompiledError for a
    wrong result. Any other error within a test, such as a lack of memory or an exception of a signal handler, says
    nothing about the kernels: it is raised as it is, and the next call tests again.
    """
    running = RUNNING.get()
    in_test = running is not None and running.is_test
    fresh: list[Fresh] = []
    token = RUNNING.set(RunningCall(op, fresh, in_test))
    try:
        result = function(*arguments, **keywords)
    finally:
        RUNNING.reset(token)
        if fresh:
            cases = _cases(op, _layouts([*arguments, *keywords.values()], fresh), _keyword_names(keywords))
            test = Test(op, fresh, cases, _heads(arguments, keywords))
            PENDING.setdefault(op, collections.deque()).append(test)
    pending = PENDING.get(op)
    if pending and not in_test:
        _run(pending)
    return result


def run_pending() -> None:
    """Run the tests of all operations, outside of captures: for warm-up, after which no call follows. Raises as
    `tested`."""
    while any(PENDING.values()):
        for pending in list(PENDING.values()):
            _run(pending)


def _run(pending: collections.deque[Test]) -> None:
    for _ in range(len(pending)):
        try:
            test = pending.popleft()
        except IndexError:  # also where another thread took it
            return
        try:
            if any(x.backend == "cuda" for x in test.fresh) and streams.is_any_capturing():
                pending.appendleft(test)
                return
            _run_test(test)
        except MiscompiledError:
            raise
        except BaseException as error:
            pending.appendleft(test)
            if isinstance(error, Exception):
                names = ", ".join(dict.fromkeys(x.what for x in test.fresh))
                error.add_note(f"raised by the self-test of {test.op} ({names}), which its next call repeats")
            raise


def _run_test(test: Test) -> None:
    token, under_test = RUNNING.set(RunningCall(test.op, [], is_test=True)), UNDER_TEST.set(test.fresh)
    try:
        with debug.unchecked():
            for backend in dict.fromkeys(x.backend for x in test.fresh):
                _run_cases(test, backend)
    finally:
        UNDER_TEST.reset(under_test)
        RUNNING.reset(token)


def _run_cases(test: Test, backend: str) -> None:
    """Run the cases on a backend, and write the result of each of its kernels."""
    op, launched = test.op, set[int]()
    for case in test.cases:
        with _launches(backend) as launches:
            outcome = _self_tests[0]().check_case(case, backend, 0, test.heads)
        launched |= {id(launch.kernel) for launch in launches}
        if outcome.passed:
            continue
        fresh = [x for x in test.fresh if x.backend == backend]
        suspects = [x for x in fresh if x.kernel is None or id(x.kernel) in launched] or fresh
        where = f"{op} ({case.variant})" if case.variant else op
        message = (
            f"{where}: a small case is off by {outcome.error:.3g} on backend {backend!r}; compiled by "
            f"{suspects[0].compiler}: {', '.join(dict.fromkeys(x.what for x in suspects))}. {suspects[0].remedy}"
        )
        for x in suspects:
            conclude(x, f"{WRONG}: {message}")
        FAILED[op, backend] = message
        raise MiscompiledError(message)
    for x in test.fresh:
        if x.backend == backend:
            reached = bool(test.cases) and (x.kernel is None or id(x.kernel) in launched)
            conclude(x, RIGHT if reached else NOT_REACHED)
            log.debug("%s: %s", x.what, RIGHT if reached else NOT_REACHED)


def _cases(op: str, layouts: set[str], keywords: set[str]) -> list[Any]:
    """The cases of an operation for these cache formats or named like a given keyword; if none, the first case."""
    cases = [case for case in _self_tests[0]().CASES if case.op == op]
    fitting = [case for case in cases if case.variant in keywords or layouts & set(case.variant.split(", "))]
    return fitting or cases[:1]


def _keyword_names(keywords: Mapping[str, Any]) -> set[str]:
    """Names of the keywords that a call gives a value."""
    return {name for name, value in keywords.items() if value is not None and value is not False}


def _layouts(values: Sequence[Any], fresh: Sequence[Fresh]) -> set[str]:
    """Names of the cache formats of a call."""
    found = {x.layout for x in fresh if x.layout}
    for value in values:
        shape = getattr(value, "shape", ())
        if isinstance(value, CacheLayout):
            found.add(value.name)
        elif isinstance(value, str):
            found |= {value} & LAYOUTS.keys()
        elif isinstance(shape, tuple) and len(shape) in (3, 4) and str(getattr(value, "dtype", "")).endswith("uint8"):
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
