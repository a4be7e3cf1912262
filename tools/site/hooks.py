"""MkDocs hooks: drawings of formats and tables of recorded results, inserted where a page names them.

{{ layout NAME }}                     a format's row and page
{{ times DEVICE/FILE | OP | TEXT }}   times of one operation; TEXT: in configurations that contain it
{{ steps DEVICE/FILE }}               the steps of a request trace, as a picture and a table
"""

import pathlib
import re
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import drawings  # noqa: E402
import ratios  # noqa: E402
import tables  # noqa: E402

from cumla.layout import LAYOUTS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
INSERT = re.compile(r"^\{\{ (layout|times|steps) ([^}]+) \}\}$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return INSERT.sub(lambda found: inserted(found[1], [part.strip() for part in found[2].split("|")]), markdown)


def inserted(kind: str, given: list[str]) -> str:
    if kind == "layout":
        return "<figure>" + re.sub(r"\n\s*", " ", drawings.layout_svg(LAYOUTS[given[0]])) + "</figure>"
    path = RESULTS / f"{given[0]}.json"
    if kind == "steps":
        return f"<figure>{ratios.steps_svg(path)}</figure>\n\n{tables.steps(path)}"
    return tables.times(path, *given[1:])
