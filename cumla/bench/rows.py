"""Rows of results: measured, written, read, and two files of them side by side."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..dispatch.values import shown
from ..errors import InputError, RunError
from . import NAMES, caches, dense, indexer_cases, sparse
from .measure import call_times, graph_times_in_turn, host_times_in_turn, host_us, limit_us, queued_times_in_turn
from .problem import Case, Problem, Sizes

LEAST_NOISE = 0.02  # of a time: what clocks and power limits make of a run
UNKNOWN_NOISE = 0.05  # of files that do not say how far their times spread
CONTROL = 2.0  # a change counts if it exceeds CONTROL times the difference between two runs of the same calls

Suite = Callable[[Sizes], Iterator[Problem | Case]]
FUNCTIONS: tuple[Suite, ...] = (
    caches.insert, caches.gather, sparse.decode, sparse.prefill, indexer_cases.indexer, dense.dense,
)  # fmt: skip
SUITES: dict[str, Suite] = dict(zip(NAMES, FUNCTIONS, strict=True))

Row = dict[str, Any]
TIMES = ("us", "us_graph", "us_low", "us_high", "us_again")
RATES = ("limit_us", "gbps", "tflops")


def measured(
    names: Sequence[str], sizes: Sizes, begin: Callable[[str], None] = lambda what: None,
    suites: Mapping[str, Suite] = SUITES,
) -> Iterator[Row]:  # fmt: skip
    """A row for each implementation of each problem: checked, then timed, and timed again after the next problem.

    The second time is the control of the first: what a run makes of the same calls.

    Args:
        begin: is called with the name of each suite and problem
        suites: the cases of each name
    """
    last: tuple[Problem, list[Row]] | None = None
    for name in names:
        begin(name)
        for case in suites[name](sizes):
            problem = case if isinstance(case, Problem) else case.problem(sizes)
            begin(f"{problem.op} {problem.config}")
            rows = list(rows_of(problem, sizes.on_device))
            if last is not None:
                yield from _again(*last, sizes.on_device)
            last = problem, rows
    if last is not None:
        yield from _again(*last, sizes.on_device)


def rows_of(problem: Problem, on_device: bool = True) -> Iterator[Row]:
    """Rows of a problem's implementations, checked before any is timed.

    us_graph      median us of a call inside a CUDA graph; None on the host, and where a call from the host counts
    us            us of a call from the host
    us_low, us_high  quartiles of the time that counts: us_graph, or us where that is None
    limit_us      the least that an H200's memory and products allow
    peer          the function and version of another library's implementation
    error         what is wrong with another library's result, which is timed all the same

    Raises RunError or AssertionError for a result of cumla's beyond its bounds.
    """
    errors: dict[str, float | None] = {}
    wrong: dict[str, Row] = {}
    for impl, (_, calls) in problem.impls.items():
        if problem.clear is not None:
            problem.clear()
        result = calls[0]()
        checks = problem.check is not None and impl not in problem.unchecked
        try:
            errors[impl] = problem.check(result) if checks and problem.check is not None else None
        except (AssertionError, RunError) as error:
            if impl not in problem.functions:
                raise
            errors[impl], wrong[impl] = None, {"error": reason(error)}
    times = _times(problem, on_device)
    for impl, (_, calls) in problem.impls.items():
        in_graph = on_device and not problem.from_host
        host = host_us(calls[0], 100) / (problem.queued or 1) if in_graph else None
        yield _row(problem, impl, times[impl], host, errors[impl]) | wrong.get(impl, {})


def reason(error: Exception) -> str:
    """What an error says, in a line: its type and the first line that is not empty."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _times(problem: Problem, on_device: bool) -> dict[str, list[float]]:
    if problem.queued:
        calls_of = {impl: calls[0] for impl, (_, calls) in problem.impls.items()}
        times = queued_times_in_turn(calls_of) if on_device else {x: call_times([calls_of[x]]) for x in calls_of}
        return {impl: [us / problem.queued for us in found] for impl, found in times.items()}
    if not on_device:
        return {impl: call_times(calls) for impl, (_, calls) in problem.impls.items()}
    if problem.from_host:
        return host_times_in_turn({impl: calls[0] for impl, (_, calls) in problem.impls.items()})
    return graph_times_in_turn(problem.impls)


def _again(problem: Problem, rows: list[Row], on_device: bool) -> Iterator[Row]:
    times = _times(problem, on_device)
    for row in rows:
        yield {**row, "us_again": statistics.median(times[row["impl"]])}


def _row(problem: Problem, impl: str, times: Sequence[float], host: float | None, error: float | None) -> Row:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    row = {
        "op": problem.op,
        "config": problem.config,
        "impl": impl,
        "us": median if host is None else host,
        "us_graph": None if host is None else median,
        "us_low": low,
        "us_high": high,
        **numbers_of(median, problem.bytes_moved, problem.flop, problem.fp8),
        "max_abs_err": error,
        "checked": error is not None,
    }
    return row | ({"peer": problem.functions[impl]} if impl in problem.functions else {})


def numbers_of(us: float, bytes_moved: float, flop: float, fp8: bool = False) -> Row:
    """What follows from a time: the limit and the rates."""
    return {
        "limit_us": limit_us(bytes_moved, flop, fp8) or None,
        "gbps": bytes_moved / us / 1e3 if bytes_moved else None,
        "tflops": flop / us / 1e6 if flop else None,
    }


def time_of(row: Row) -> float | None:
    """The us that count."""
    value = row.get("us_graph") or row.get("us")
    return None if value is None else float(value)


def read(path: str) -> dict[str, Any]:
    """A file of results, `-` for stdin: {"environment": ..., "rows": [...]}. Raises InputError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
        record = json.loads(text)
        if not all(isinstance(row["op"], str) and isinstance(row["config"], str) for row in record["rows"]):
            raise TypeError("names that are no names")
        if not isinstance(record.get("environment", {}), dict):
            raise TypeError("an environment that is none")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is no file of results, as --json writes them") from None
    for number, row in enumerate(record["rows"]):
        for name in TIMES:
            if not _is_time(row.get(name)):
                raise InputError(f"{path}: row {number}: {name}: got {shown(row[name])}, expected microseconds")
        for name in RATES:
            if not _is_time(row.get(name)):
                raise InputError(f"{path}: row {number}: {name}: got {shown(row[name])}, expected a number from 0")
    return dict(record)


def text(record: dict[str, Any]) -> str:
    """A record as JSON: an entry a line, and of lists (rows, a table) an item a line."""
    entries = []
    for name, value in record.items():
        if isinstance(value, list):
            items = ",\n".join("  " + json.dumps(item) for item in value)
            entries.append(f" {json.dumps(name)}: [\n{items}\n ]" if value else f" {json.dumps(name)}: []")
        else:
            entries.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _is_time(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return False
    return value is None or 0 <= value <= sys.float_info.max


class Change(NamedTuple):
    """A row that both files have. ratio: new time over old; beyond_noise: whether that says something."""

    row: str
    old: float
    new: float
    ratio: float
    beyond_noise: bool


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """Rows of both files, by operation, configuration and implementation."""
    before = {(row["op"], row["config"], row.get("impl")): row for row in old}
    controls = CONTROL * max(_control(old), _control(new))
    found = []
    for row in new:
        same = before.get((row["op"], row["config"], row.get("impl")))
        old_us, new_us = None if same is None else time_of(same), time_of(row)
        if same is None or not old_us or not new_us:
            continue
        noise = max(LEAST_NOISE, controls, _spread(same), _spread(row))
        ratio = new_us / old_us
        name = " ".join(filter(None, (row["op"], row["config"], row.get("impl") or "")))
        found.append(Change(name, old_us, new_us, ratio, abs(math.log(ratio)) > math.log1p(noise)))
    return found


def _control(rows: Sequence[Row]) -> float:
    """What a run makes of the same calls: the part by which nine in ten of its rows change at most, or all of a few."""
    found = sorted(abs(math.log(row["us_again"] / us)) for row in rows if row.get("us_again") and (us := time_of(row)))
    return found[min(len(found) - 1, int(0.9 * len(found)))] if found else 0.0


def _spread(row: Row) -> float:
    """Half the distance of the quartiles, as a part of the time."""
    if row.get("us_low") is None or row.get("us_high") is None:
        return UNKNOWN_NOISE
    return float(row["us_high"] - row["us_low"]) / 2 / (time_of(row) or 1.0)
