"""The table of a trace's rows: us of a layer by part, for cumla and the peers, and ratios."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from trace_rows import PARTS, PLANNED_LAYERS, Row

PLAN = "plan"
WIDTH = 10  # width of a column of times


class Group(NamedTuple):
    """Steps that share a line of the table."""

    kind: str
    heads: str
    steps: str


class Line(NamedTuple):
    """A group's mean us by part and side, and the sums of both sides over parts that both have.

    Attributes:
        unplanned: the ratio without the decodes' plan, which more layers share in a model; None if unknown
    """

    group: Group
    us: dict[tuple[str, str], float]
    cumla: float
    peers: float
    number: int
    ratios: list[float]
    lacking: bool
    unplanned: float | None

    @property
    def ratio(self) -> float | None:
        return self.peers / self.cumla if self.cumla else None


def lines(rows: Iterable[Row]) -> list[Line]:
    """A line for each kind, number of heads and kind of steps, in the order of the rows."""
    steps: dict[Group, dict[str, dict[tuple[str, str], float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        part = row["op"].removeprefix("trace ")
        time = row["us"] if row.get("us_graph") is None else row["us_graph"]
        kind, heads, name, *_ = row["config"].removesuffix(", lengths").split()
        step = steps[Group(kind, heads, name)][row["config"]]
        if part in (*PARTS, PLAN) and time is not None:
            step[part, row["impl"]] = time
    return [_line(group, list(found.values())) for group, found in steps.items()]


def _line(group: Group, steps: Sequence[dict[tuple[str, str], float]]) -> Line:
    keys = {key for step in steps for key in step}
    us = {key: statistics.mean(step[key] for step in steps if key in step) for key in keys}
    totals = []
    lacking = False
    for step in steps:
        both = [part for part in PARTS if (part, "cumla") in step and (part, "peers") in step]
        lacking = lacking or len(both) < len([part for part in PARTS if (part, "cumla") in step]) or not step
        if both:
            totals.append(tuple(sum(step[part, side] for part in both) for side in ("cumla", "peers")))
    cumla, peers = (sum(total[i] for total in totals) for i in range(2))
    plans = [us[PLAN, side] for side in ("cumla", "peers") if (PLAN, side) in us]
    unplanned = None
    if len(totals) == 1 and len(plans) == 2 and not lacking:
        ours, theirs = (x - plan / PLANNED_LAYERS for x, plan in zip(totals[0], plans, strict=True))
        unplanned = theirs / ours
    return Line(group, us, cumla, peers, len(steps), [peers / ours for ours, peers in totals], lacking, unplanned)


def table(rows: Iterable[Row]) -> list[str]:
    """Lines of text. A ratio above 1 is cumla's gain; * marks ratios without the parts that have no peer."""
    found = lines(rows)
    heads = "".join(f"{part:>{WIDTH}}{'(peers)':>{WIDTH}}" for part in PARTS)
    text = [f"{'us of a layer':34}{heads}{'ratio':>8}  by step"]
    for line in found:
        cells = "".join(_cell(line.us.get((part, side))) for part in PARTS for side in ("cumla", "peers"))
        spread = f"{min(line.ratios):.2f}-{max(line.ratios):.2f}" if len(line.ratios) > 1 else ""
        if line.unplanned is not None:
            spread = f"without plans {line.unplanned:.3f}"
        name = f"{line.group.kind} {line.group.heads} {line.group.steps} ({line.number})"
        ratio = "-" if line.ratio is None else f"{line.ratio:.3f}" + ("*" if line.lacking else "")
        text.append(f"{name:34}{cells}{ratio:>8}  {spread}".rstrip())
    for kind, heads in dict.fromkeys((line.group.kind, line.group.heads) for line in found):
        some = [line for line in found if line.group[:2] == (kind, heads)]
        text.append(_total(f"{kind} {heads}, all steps", some))
    return [*text, _total("all", found)]


def _cell(us: float | None) -> str:
    return f"{'-' if us is None else f'{us:.2f}':>{WIDTH}}"


def _total(name: str, some: Sequence[Line]) -> str:
    """Ratio of the sums over lines, with equal weight for each line."""
    cumla, peers = (sum(getattr(line, side) / line.number for line in some) for side in ("cumla", "peers"))
    return f"{name:34}{'':{2 * len(PARTS) * WIDTH}}{f'{peers / cumla:.3f}' if cumla else '-':>8}"


def record(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The table's entry in a file of results."""
    return [
        {**line.group._asdict(), "steps_measured": line.number, "ratio": line.ratio, "ratios": line.ratios,
         "ratio_without_plans": line.unplanned,
         "us": {f"{part}, {side}": us for (part, side), us in sorted(line.us.items())}}
        for line in lines(rows)
    ]  # fmt: skip
