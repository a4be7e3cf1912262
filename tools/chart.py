#!/usr/bin/env python3
"""Draw docs/speed.svg, the chart of README and the site, from the records in benchmarks/results/.

    tools/chart.py            write the file
    tools/chart.py --check    exit status 1 if the file differs from the records' chart
    tools/chart.py --records FOLDER    draw FOLDER/speed.svg from the records of that folder, and print the ratios

A bar is the peer's time divided by cumla's, the factor by which cumla is faster. The line at 1 is the peer.
"""

import html
import json
import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS, FILE = ROOT / "benchmarks" / "results" / "h200", ROOT / "docs" / "speed.svg"
WIDTH, LEFT, RIGHT, ROW, MOST = 430, 216, 32, 22, 2.25  # MOST: the axis ends there; WIDTH: as wide as a telephone
SHOWN = 560  # pixels, where there is room


class Panel(NamedTuple):
    """A title, the peer (1.0), and (label, ratio) of each bar."""

    title: str
    peer: str
    bars: list[tuple[str, float]]


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def calls(folder, name, op, configs):
    """Ratios of single calls: FlashMLA's time divided by cumla's, in a CUDA graph."""
    times = {(row["config"], row["impl"]): row["us_graph"] for row in read(folder, name)["rows"] if row["op"] == op}
    return [(label, times[config, "flash_mla"] / times[config, "cumla"]) for label, config in configs]


def steps(folder, rows):
    """Ratios of attention layers in decode steps: time of vLLM's kernels divided by cumla's."""
    table = {
        (line["kind"], line["heads"], line["steps"]): line["ratio"] for line in read(folder, "trace_decode")["table"]
    }
    return [(label, table[key]) for label, key in rows]


def panels(folder):
    v4, v32 = "DSV4_FP8 h{} b{} s1 128+{}, lengths", "V32_FP8 h128 b{} s1 2048, lengths"
    decode = [(f"V4, 64 heads, {b} request" + "s" * (b > 1), v4.format(64, b, 512)) for b in (1, 8, 32, 128)]
    decode += [(f"V4, 128 heads, {b} requests", v4.format(128, b, 1024)) for b in (8, 128)]
    decode += [("V4, 16 heads, 32 requests", v4.format(16, 32, 1024))]
    decode += [(f"V3.2, 128 heads, {b} requests", v32.format(b)) for b in (8, 128)]
    prefill = [
        ("V4, 64 heads, 512 tokens", "d512 h64 topk 640 of 32K T512, lengths"),
        ("V4, 64 heads, 4,096 tokens", "d512 h64 topk 640 of 32K, lengths"),
        ("V4, 16 heads, 4,096 tokens", "d512 h16 topk 1152 of 32K, lengths"),
        ("V3.2, 128 heads, 4,096 tokens", "d576 h128 topk 2048 of 32K, lengths"),
    ]
    kinds = {"window": "V4 window layer", "c4a": "V4 C4A layer", "c128a": "V4 C128A layer", "v32": "V3.2 layer"}
    layers = [(f"{kinds[k]}, {n} requests", (k, "h64", f"decode{n}")) for k in kinds for n in (8, 64)]
    return [
        Panel("Sparse decode", "FlashMLA", calls(folder, "decode", "sparse_mla_decode", decode)),
        Panel("Decode step of a layer: insert, selection, attention", "vLLM's kernels", steps(folder, layers)),
        Panel("Sparse prefill", "FlashMLA", calls(folder, "prefill", "sparse_mla_prefill", prefill)),
    ]


STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .note { font-size: 12px; fill: #59636e }
.bar { fill: #2f6f8f } .peer { stroke: #1f2328; stroke-width: 1.5 } .grid { stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .note { fill: #9198a1 } .bar { fill: #5aa9cc }
  .peer { stroke: #f0f6fc } .grid { stroke: #3d444d }
}"""


def x_of(ratio):
    return LEFT + (WIDTH - LEFT - RIGHT) * min(ratio, MOST) / MOST


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def svg(drawn):
    """The chart of some panels."""
    shapes, y = [], 26.0
    for panel in drawn:
        shapes.append(text(6, y, panel.title, "title"))
        shapes.append(text(x_of(1), y + 20, f"{panel.peer} = 1", "note", "middle"))
        top, y = y + 26, y + 26
        bottom = top + ROW * len(panel.bars)
        for tick in (0.5, 1.5, 2.0):
            shapes.append(f'<path class="grid" d="M{x_of(tick):g} {top:g}V{bottom:g}"/>')
            shapes.append(text(x_of(tick), bottom + 14, f"{tick:g}", "note", "middle"))
        for label, ratio in panel.bars:
            shapes.append(text(LEFT - 6, y + 15, label, "", "end"))
            shapes.append(
                f'<rect class="bar" x="{LEFT}" y="{y + 4:g}" width="{x_of(ratio) - LEFT:.1f}" height="{ROW - 8}"/>'
            )
            shapes.append(text(x_of(ratio) + 4, y + 15, f"{ratio:.2f}"))
            y += ROW
        shapes.append(f'<path class="peer" d="M{x_of(1):g} {top:g}V{bottom:g}"/>')
        y += 44
    label = "Peer's time divided by cumla's: " + "; ".join(
        f"{p.title} against {p.peer}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in p.bars) for p in drawn
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 14:g}" width="{SHOWN}" role="img" '
        f'aria-label="{html.escape(label)}">\n<style>{STYLE}\n</style>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def main():
    match sys.argv[1:]:
        case ["--records", folder]:
            found = panels(pathlib.Path(folder))
            (pathlib.Path(folder) / "speed.svg").write_text(svg(found))
            for panel in found:
                print(f"{panel.title}, {panel.peer} = 1")
                print(*(f"{ratio:6.2f}  {label}" for label, ratio in panel.bars), sep="\n")
        case []:
            FILE.write_text(svg(panels(RESULTS)))
        case ["--check"]:
            if not FILE.exists() or FILE.read_text() != svg(panels(RESULTS)):
                sys.exit(f"{FILE.relative_to(ROOT)} differs from the chart of benchmarks/results: run tools/chart.py")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
