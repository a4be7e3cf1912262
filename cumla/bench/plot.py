"""Rows of results as points: one group a row, one line an implementation. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row, time_of

HEIGHT = 0.6  # of the distance from group to group
# An implementation has its colour in every picture.
COLORS = {
    "cumla": "C0", "cumla-cuda": "C0", "flash_mla": "C1", "vllm": "C2", "deep_gemm": "C3", "peers": "C4",
    "cumla-numba_cuda": "C9", "copy": "C7",
}  # fmt: skip
OTHERS = ("C5", "C6", "C8")


def draw(rows: Sequence[Row], title: str, figure: Any = None) -> Any:
    """A matplotlib figure. Times are on a logarithmic scale, on which a decode is seen beside a prefill."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if time_of(row)]
    groups = list(dict.fromkeys((row["op"], row["config"]) for row in rows))
    impls = list(dict.fromkeys(row.get("impl") or "cumla" for row in rows))
    if figure is None:
        figure = Figure(figsize=(9, 1.2 + (0.16 + 0.14 * len(impls)) * max(len(groups), 1)), layout="constrained")
    axes = figure.subplots()
    others = [impl for impl in impls if impl not in COLORS]
    for number, impl in enumerate(impls):
        points = [
            (groups.index((row["op"], row["config"])), time_of(row) or 0.0)
            for row in rows if (row.get("impl") or "cumla") == impl
        ]  # fmt: skip
        color = COLORS[impl] if impl in COLORS else OTHERS[others.index(impl) % len(OTHERS)]
        for place, us in points:
            y = place + HEIGHT * (number + 0.5) / len(impls) - HEIGHT / 2
            label = f"{us:,.0f}" if us >= 100 else f"{us:.3g}"
            axes.annotate(label, (us, y), (5, 0), textcoords="offset points", fontsize=7, va="center")
            axes.plot([us], [y], "o", color=color, markersize=4)
        axes.plot([], [], "o", color=color, label=impl)
    axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(len(groups)), [f"{op}  {config}" for op, config in groups], fontsize=7)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlabel("us a call (logarithmic)")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="best")
    return figure


def write(path: Path, rows: Sequence[Row], title: str) -> None:
    """Raises OSError if it cannot be written."""
    draw(rows, title).savefig(path, dpi=110)
