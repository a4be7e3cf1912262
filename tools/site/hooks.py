"""MkDocs hooks: drawings of formats and of recorded results, inserted where a page names them."""

import pathlib
import re
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import drawings  # noqa: E402

from cumla.layout import LAYOUTS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PICTURE = re.compile(r"^\{\{ (layout|results) ([\w/]+) \}\}$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return PICTURE.sub(lambda found: picture(found[1], found[2]), markdown)


def picture(kind: str, name: str) -> str:
    """A drawing, as one block of HTML."""
    svg = drawings.layout_svg(LAYOUTS[name]) if kind == "layout" else drawings.results_svg(RESULTS / f"{name}.json")
    return "<figure>" + re.sub(r"\n\s*", " ", with_own_ids(svg, name.replace("/", "-"))) + "</figure>"


def with_own_ids(svg: str, prefix: str) -> str:
    """An SVG whose ids no other one on the page has: matplotlib gives every picture the same."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
