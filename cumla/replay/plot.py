"""Draws the steps of a run: batch make-up, cache occupancy and time by op. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from ..errors import InputError
from .summary import ATTENTION_OPS

FORMATS = (".png", ".pdf", ".svg")
INSTALL = "pip install matplotlib"


def check_can_plot(path: Path) -> None:
    """Raises InputError if a plot could not be drawn to `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"--plot needs matplotlib: {INSTALL}")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot: got {path.name}, expected a name that ends in {', '.join(FORMATS)}")


def write_plot(path: Path, summary: dict[str, Any], title: str) -> None:
    """Draw the steps to `path`. Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    steps = summary["steps"]
    x = [step["step"] for step in steps]
    figure = Figure(figsize=(11, 9), layout="constrained")
    tokens, cache, times = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)

    tokens.fill_between(x, [step["prefill_tokens"] for step in steps], step="mid", alpha=0.4, label="prefill tokens")
    tokens.set_ylabel("prefill tokens")
    tokens.set_ylim(bottom=0)
    decodes = tokens.twinx()
    decodes.plot(x, [step["decode_tokens"] for step in steps], color="C1", label="decode tokens")
    decodes.plot(x, [step["waiting"] for step in steps], color="C3", linestyle=":", label="requests waiting")
    decodes.set_ylabel("decode tokens, waiting")
    decodes.set_ylim(bottom=0)
    tokens.set_title("batch", loc="left")

    blocks = summary["cache"]["blocks"]
    in_use = [step["blocks_held"] / blocks for step in steps]
    idle = [step["blocks_idle"] / blocks for step in steps]
    cache.stackplot(x, in_use, idle, labels=["held by requests", "kept for later prefixes"], colors=["C0", "C9"])
    cache.set_ylim(0, 1)
    cache.yaxis.set_major_formatter(PercentFormatter(1))
    cache.set_ylabel("cache blocks")
    cache.set_title("cache occupancy", loc="left")

    series = {op: [_milliseconds(step, op) for step in steps] for op in (*ATTENTION_OPS, "metadata")}
    series = {op: values for op, values in series.items() if any(values)}
    for op, values in series.items():  # steps without an op leave a gap
        times.plot(x, [value or math.nan for value in values], marker=".", markersize=3, linewidth=1, label=op)
    times.set_yscale("log")
    times.set_ylabel("ms, all layers (logarithmic)")
    times.set_title("time by op", loc="left")
    times.set_xlabel("step")

    for axes in (tokens, cache, times):
        axes.margins(x=0)
        lines, labels = axes.get_legend_handles_labels()
        if axes is tokens:
            right_lines, right_labels = decodes.get_legend_handles_labels()
            lines, labels = lines + right_lines, labels + right_labels
        axes.legend(lines, labels, loc="upper left", bbox_to_anchor=(1.07, 1), frameon=False)
    figure.savefig(path, dpi=110)


def _milliseconds(step: dict[str, Any], op: str) -> float:
    return 1e3 * sum(seconds for name, seconds in step["seconds"].items() if name.rpartition("/")[2] == op)
