"""Rows of results as bars: one group a row, one bar an implementation. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row, time_of

BAR = 0.8  # of the distance from group to group


def draw(rows: Sequence[Row], title: str, figure: Any = None) -> Any:
    """A matplotlib figure. Times are on a logarithmic scale, on which a decode is seen beside a prefill."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if time_of(row)]
    groups = list(dict.fromkeys((row["op"], row["config"]) for row in rows))
    impls = list(dict.fromkeys(row.get("impl") or "cumla" for row in rows))
    if figure is None:
        figure = Figure(figsize=(9, 1.2 + (0.16 + 0.14 * len(impls)) * max(len(groups), 1)), layout="constrained")
    axes = figure.subplots()
    for number, impl in enumerate(impls):
        points = [
            (groups.index((row["op"], row["config"])), time_of(row))
            for row in rows if (row.get("impl") or "cumla") == impl
        ]  # fmt: skip
        y = [place + BAR * (number + 0.5) / len(impls) - BAR / 2 for place, _ in points]
        bars = axes.barh(y, [us for _, us in points], BAR / len(impls), label=impl, color=f"C{number}")
        axes.bar_label(bars, fmt=lambda us: f"{us:,.0f}" if us >= 100 else f"{us:.3g}", padding=2, fontsize=7)
    axes.set_yticks(range(len(groups)), [f"{op}  {config}" for op, config in groups], fontsize=7)
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("us a call (logarithmic)")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="best")
    return figure


def write(path: Path, rows: Sequence[Row], title: str) -> None:
    """Raises OSError if it cannot be written."""
    draw(rows, title).savefig(path, dpi=110)
