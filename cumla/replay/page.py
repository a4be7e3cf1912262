"""Writes a run as one HTML page that loads nothing else: steps over time, occupancy, hits, time by operation."""

from __future__ import annotations

import importlib.resources
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from rich.text import Text

from .report import counted, meaning
from .summary import ATTENTION_OPS

COLOURS = 8  # --c0 to --c7 of the template; the last one is for everything else
MOST_COLUMNS = 1000  # of a chart: more steps are averaged
HEIGHT = 1000  # of a chart, in its own units


class Series(NamedTuple):
    """One area of a chart: a value for each step."""

    name: str
    values: Sequence[float]


def write_page(path: Path, summary: dict[str, Any], title: str) -> None:
    """Write the page of a run to a file. Raises OSError if it cannot be written in full."""
    path.write_text(page_of(summary, title), encoding="utf-8")


def page_of(summary: dict[str, Any], title: str) -> str:
    """The page of a run, HTML."""
    template = (importlib.resources.files(__package__) / "data" / "page.html").read_text(encoding="utf-8")
    parts = (_head(summary, title), *_charts(summary), _operations(summary), _groups(summary))
    return Template(template).substitute(body="\n".join(part for part in parts if part))


def _head(summary: dict[str, Any], title: str) -> str:
    totals, prefix, failures = summary["totals"], summary["prefix"], summary["verification"]["failures"]
    figures = {
        "steps": f"{totals['steps']:,}",
        "requests": f"{totals['requests']:,}",
        "prefill tokens": f"{totals['prefill']['tokens']:,}",
        "decode tokens": f"{totals['decode']['tokens']:,}",
        "prefix hits": f"{prefix['shared_share']:.1%}",
        "cache in use, peak": f"{summary['cache']['held_peak']:.0%}",
        "a step, median": f"{summary['latency']['step_ms']['p50']:,.2f} ms",
        "beyond bounds": f"{len(failures):,} of {summary['verification']['samples']:,}",
    }
    sentence = Text.from_markup(meaning(summary)).plain.partition(" Next: ")[0]
    lines = [f"<p>{escape(title)}</p>", f'<p class="{"wrong" if failures else "faint"}">{escape(sentence)}</p>']
    lines += [f'<p class="wrong">{escape(failure)}</p>' for failure in failures[:5]]
    numbers = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items())
    return "\n".join([*lines, "<dl>", *numbers, "</dl>"])


def _charts(summary: dict[str, Any]) -> Iterable[str]:
    steps, blocks = summary["steps"], summary["cache"]["blocks"]

    def of(name: str, over: float = 1) -> list[float]:
        return [step[name] / over for step in steps]

    yield _chart("Prefill tokens of a step", [Series("prefill", of("prefill_tokens"))])
    yield _chart("Decode tokens of a step", [Series("decode", of("decode_tokens"))])
    yield _chart("Requests that wait", [Series("waiting", of("waiting"))])
    areas = [Series("held by requests", of("blocks_held", blocks / 100))]
    areas.append(Series("kept for later prefixes", of("blocks_idle", blocks / 100)))
    yield _chart("Occupancy of the cache, %", areas, 100)
    computed = [step["admitted_tokens"] - step["hit_tokens"] for step in steps]
    yield _chart(
        "Prompt tokens of the requests that began by a step",
        [Series("prefix hits", of("hit_tokens")), Series("computed", computed)],
    )
    if any(of("prefixes_on_host")):
        yield _chart("Prefixes in host memory", [Series("prefixes", of("prefixes_on_host"))])
    yield _chart("Attention of a step, ms in all layers", _by_op(steps))


def _by_op(steps: Sequence[dict[str, Any]]) -> list[Series]:
    """Milliseconds by operation: the largest, and the others together."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for key, seconds in step["seconds"].items():
            op = key.rpartition("/")[2]
            if op in (*ATTENTION_OPS, "metadata"):
                found[op][number] += 1e3 * seconds
    largest = sorted(found, key=lambda op: -sum(found[op]))
    series = [Series(op, found[op]) for op in largest[: COLOURS - 1]]
    if rest := [found[op] for op in largest[COLOURS - 1 :]]:
        series.append(Series("other operations", [sum(values) for values in zip(*rest, strict=True)]))
    return series


def _chart(title: str, series: Sequence[Series], top: float | None = None) -> str:
    """Areas on top of each other, over the steps, with linear axes from 0."""
    count = len(series[0].values)
    width = -(-count // MOST_COLUMNS)
    columns = [[_mean(one.values[i : i + width]) for i in range(0, count, width)] for one in series]
    totals = [sum(values) for values in zip(*columns, strict=True)]
    marks = ticks(max(totals) if top is None else top)
    below, paths = [0.0] * len(totals), []
    for number, values in enumerate(columns):
        above = [low + value for low, value in zip(below, values, strict=True)]
        paths.append(f'<path fill="var(--c{number})" d="{_area(below, above, marks[-1])}"/>')
        below = above
    lines = (f'<line x2="{len(totals)}" y1="{y}" y2="{y}"/>' for y in (_height(mark, marks[-1]) for mark in marks))
    up = (f'<span style="bottom:{100 * mark / marks[-1]:g}%">{mark:,g}</span>' for mark in marks)
    names = {i: f"{i:,}" for i in _steps_shown(count)} | {count - 1: f"step {count - 1:,}"}
    along = (f'<span style="left:{100 * i / max(count - 1, 1):.4g}%">{name}</span>' for i, name in names.items())
    key = (f'<li><i style="--colour:var(--c{i})"></i>{escape(one.name)}</li>' for i, one in enumerate(series))
    caption = f"<figcaption>Each point is the mean of {width} steps.</figcaption>" if width > 1 else ""
    return "\n".join([
        f"<h2>{title}</h2>", "<figure>", '<div class="plot">', f'<div class="axis up">{"".join(up)}</div>',
        f'<svg role="img" aria-label="{title}" viewBox="0 0 {len(totals)} {HEIGHT}" preserveAspectRatio="none">',
        *lines, *paths, "</svg>", f'<div class="axis along">{"".join(along)}</div>', "</div>",
        *([f'<ul class="key">{"".join(key)}</ul>'] if len(series) > 1 else []),
        caption, "</figure>",
    ])  # fmt: skip


def _area(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """A path between two rows of steps: along the upper one and back along the lower one."""
    there = [f"M0 {_height(above[0], top)}"]
    for i, value in enumerate(above):
        there.append(f"V{_height(value, top)}H{i + 1}")
    back = [f"V{_height(below[i], top)}H{i}" for i in range(len(below) - 1, -1, -1)]
    return "".join([*there, *back, "Z"])


def _height(value: float, top: float) -> int:
    return round(HEIGHT * (1 - value / top))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _steps_shown(count: int) -> list[int]:
    return sorted({0, (count - 1) // 2, count - 1})


def ticks(largest: float) -> list[float]:
    """From 0 in equal distances of 1, 2 or 5 times a power of ten, three to six of them, to `largest` or beyond."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest))
    distance = next(step for step in (0.2 * power, 0.5 * power, power, 2 * power) if largest / step <= 5)
    return [round(i * distance, 12) for i in range(math.ceil(largest / distance - 1e-9) + 1)]


def _operations(summary: dict[str, Any]) -> str:
    """A table of the time of each operation in all layers, with bars. Operations that attention lacks are grey."""
    seconds: dict[str, float] = defaultdict(float)
    for row in summary["ops"]:
        seconds[row["op"]] += row["seconds"]
    largest, rows = max(seconds.values()), []
    for op in sorted(seconds, key=lambda op: -seconds[op]):
        colour = 0 if op in (*ATTENTION_OPS, "metadata") else COLOURS - 1
        bar = f'<i style="--colour:var(--c{colour});width:{100 * seconds[op] / largest:.4g}%"></i>'
        rows.append(f'<tr><td>{escape(op)}</td><td>{1e3 * seconds[op]:,.1f}</td><td class="bar">{bar}</td></tr>')
    layers = counted(len(summary["config"]["layers"]), "layer")
    return "\n".join([
        "<h2>Time by operation</h2>", '<div class="scroll"><table>',
        f"<tr><th>operation</th><th>ms in {layers}</th><th></th></tr>", *rows, "</table></div>",
        '<p class="faint">Grey: not part of attention.</p>',
    ])  # fmt: skip


def _groups(summary: dict[str, Any]) -> str:
    """A table of what prefix hits needed of each page group."""
    groups = summary["prefix"].get("groups")
    if not groups or not summary["prefix"]["shared_tokens"]:
        return ""
    rows = (
        f"<tr><td>{escape(row['layers'])} {escape(row['group'])}</td><td>{row['positions']:,}</td>"
        f"<td>{row['pages']:,}</td><td>{row['bytes'] / 2**20:,.2f}</td></tr>"
        for row in groups
    )
    return "\n".join([
        "<h2>Prefix hits by page group</h2>", '<div class="scroll"><table>',
        "<tr><th>group</th><th>tokens needed</th><th>pages</th><th>MiB</th></tr>", *rows, "</table></div>",
    ])  # fmt: skip
