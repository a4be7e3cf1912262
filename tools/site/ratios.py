"""Pictures of a request trace's steps: the peer's time divided by cumla's, on a linear axis where 1 is the peer."""

import html
import json
import pathlib

WIDTH, LEFT, RIGHT, ROW, TOP = 420, 150, 14, 22, 44  # as wide as a telephone
SHOWN = 560  # pixels, where there is room
LEAST, MOST = 0.75, 2.25  # ends of the axis
# A layer's kind: what the legend says, and its mark around the point (0, 0).
MARKS = {
    "window": ("window", '<circle r="4.5" fill="none"/>'),
    "c4a": ("C4A", '<circle r="4.5"/>'),
    "c128a": ("C128A", '<path d="M0 -6L6 0L0 6L-6 0Z"/>'),
    "v32": ("V3.2", '<path d="M0 -5.5L5.5 4.5H-5.5Z"/>'),
}
CUMLA = "#2f8fb5"  # of marks, on light and dark pages; tools/chart.py has bars of nearly the same


def x_of(ratio: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(ratio, LEAST), MOST) - LEAST) / (MOST - LEAST)


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{html.escape(words)}</text>'


def mark(kind: str, x: float, y: float, words: str) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})"><title>{html.escape(words)}</title>{MARKS[kind][1]}</g>'


def steps_svg(path: pathlib.Path) -> str:
    """A row of marks for each kind of step and number of heads; a line spans the slowest and fastest step of a run."""
    table = [line for line in json.loads(path.read_text())["table"] if line["ratio"] is not None]
    rows = list(dict.fromkeys((line["heads"][1:], line["steps"]) for line in table))
    bottom, axis, marks, legend = TOP + ROW * len(rows), [], [], []
    for tick in (1.0, 1.5, 2.0):
        width = 1.5 if tick == 1 else 0.4
        axis.append(f'<path d="M{x_of(tick):.1f} {TOP}V{bottom}" stroke="currentColor" stroke-width="{width}"/>')
        axis.append(text(x_of(tick), bottom + 15, "vLLM = 1" if tick == 1 else f"{tick:g}", "middle"))
    axis += [text(4, TOP + ROW * i + 15, f"{heads} heads, {steps}") for i, (heads, steps) in enumerate(rows)]
    for line in table:
        y = TOP + ROW * rows.index((line["heads"][1:], line["steps"])) + ROW / 2
        least, most = min(line["ratios"]), max(line["ratios"])
        if most > least:
            marks.append(f'<path d="M{x_of(least):.1f} {y}H{x_of(most):.1f}" stroke-width="1"/>')
        name = MARKS[line["kind"]][0]
        marks.append(mark(line["kind"], x_of(line["ratio"]), y, f"{name}, {line['steps']}: {line['ratio']:.2f}"))
    x = 8.0
    for kind in dict.fromkeys(line["kind"] for line in table):
        name = MARKS[kind][0]
        legend.append(text(x + 12, 22, name))
        marks.append(mark(kind, x, 18, name))
        x += 34 + 7.2 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 22}" width="{SHOWN}" '
        'style="max-width: 100%; height: auto" role="img" font-family="sans-serif" font-size="13" '
        f'aria-label="Ratios of the table below, from {min(x["ratio"] for x in table):.2f} to '
        f'{max(x["ratio"] for x in table):.2f}">{"".join(axis + legend)}'
        f'<g fill="{CUMLA}" stroke="{CUMLA}" stroke-width="1.8">{"".join(marks)}</g></svg>'
    )
