"""Rows of results: measured, written, read, and two files of them side by side."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..dispatch.values import shown
from ..replay.errors import InputError
from . import NAMES, layer_suites, step_suites, suites
from .measure import call_times, graph_times, host_times, host_us
from .suites import Problem, Sizes

LEAST_NOISE = 0.02  # of a time: what clocks and power limits make of a run
UNKNOWN_NOISE = 0.05  # of files that do not say how far their times spread

SUITES: dict[str, Callable[[Sizes], Iterator[Problem]]] = {
    name: next(getattr(file, name) for file in (suites, layer_suites, step_suites) if hasattr(file, name))
    for name in NAMES
}

Row = dict[str, Any]
TIMES = ("us", "us_graph", "us_low", "us_high")


def measured(names: Sequence[str], sizes: Sizes) -> Iterator[Row]:
    """A row for each implementation of each problem: checked, then timed.

    us_graph      median us of a call inside a CUDA graph; None on the host, and where a call from the host counts
    us            us of a call from the host
    us_low, us_high  quartiles of the time that counts: us_graph, or us where that is None
    """
    for name in names:
        for problem in SUITES[name](sizes):
            for impl, (framework, calls) in problem.impls.items():
                error = None if problem.check is None else problem.check(calls[0]())
                host = None
                if not sizes.on_device:
                    times = call_times(calls)
                elif problem.from_host:
                    times = host_times(calls[0])
                else:
                    times, host = graph_times(calls, framework), host_us(calls[0], 50)
                yield _row(problem, impl, times, host, error)


def _row(problem: Problem, impl: str, times: Sequence[float], host: float | None, error: float | None) -> Row:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return {
        "op": problem.op,
        "config": problem.config,
        "impl": impl,
        "us": median if host is None else host,
        "us_graph": None if host is None else median,
        "us_low": low,
        "us_high": high,
        "gbps": problem.bytes_moved / median / 1e3,
        "tflops": problem.flop / median / 1e6 if problem.flop else None,
        "max_abs_err": error,
        "checked": problem.check is not None,
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
    return dict(record)


def _is_time(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return False
    return value is None or 0 <= value < math.inf


class Change(NamedTuple):
    """Of a row that both files have. ratio: new time over old; beyond_noise: whether that says something."""

    row: str
    old: float
    new: float
    ratio: float
    beyond_noise: bool


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """Rows of both files, by operation, configuration and implementation."""
    before = {(row["op"], row["config"], row.get("impl")): row for row in old}
    found = []
    for row in new:
        same = before.get((row["op"], row["config"], row.get("impl")))
        old_us, new_us = None if same is None else time_of(same), time_of(row)
        if same is None or not old_us or not new_us:
            continue
        noise = max(LEAST_NOISE, _spread(same), _spread(row))
        ratio = new_us / old_us
        name = " ".join(filter(None, (row["op"], row["config"], row.get("impl") or "")))
        found.append(Change(name, old_us, new_us, ratio, abs(ratio - 1) > noise))
    return found


def _spread(row: Row) -> float:
    """Half the distance of the quartiles, as a part of the time."""
    if row.get("us_low") is None or row.get("us_high") is None:
        return UNKNOWN_NOISE
    return float(row["us_high"] - row["us_low"]) / 2 / (time_of(row) or 1.0)
