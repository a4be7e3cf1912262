#!/usr/bin/env python3
"""Rewrite the tables of page groups in Markdown pages from `cumla.pages.describe`.

A table stands between `<!-- pages of NAME -->` and an empty line; MODELS has the names. tests/pages/test_tables.py
compares the pages with this script's output.

tools/page_tables.py docs/guide/page-groups.md
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cumla.pages import Description, Group, describe  # noqa: E402
from tools.published import CONFIGS  # noqa: E402

MODELS = {
    "V3.2": lambda: describe(CONFIGS["V3.2"], layers=61),
    "GLM-5.2": lambda: describe(CONFIGS["GLM-5.2"], drafts=1),
    "GLM-5.3-Flash": lambda: describe(CONFIGS["GLM-5.3-Flash"], drafts=1, num_speculative_tokens=3),
    "V4": lambda: describe(CONFIGS["V4"]),
    "V4.1": lambda: describe(CONFIGS["V4.1"], drafts=3, num_speculative_tokens=5),
}
HEADINGS = (
    "group", "layers", "caches", "positions of a page", "bytes of a page", "a hit of n tokens needs",
    "bytes, n = 8,191", "n = 131,071",
)  # fmt: skip
LENGTHS = (8191, 131071)
TABLE = re.compile(r"^<!-- pages of ([\w.-]+) -->\n(?:\|[^\n]*\n)*", re.MULTILINE)


def rewritten(page: str) -> str:
    """The page with the tables of the models that it names."""
    return TABLE.sub(lambda found: found[0].partition("\n")[0] + "\n" + table(MODELS[found[1]]()), page)


def table(description: Description) -> str:
    rows = [HEADINGS, ["---"] * 3 + ["---:"] * 2 + ["---"] + ["---:"] * 2]
    for group in description:
        layers = sorted({layer for cache in group.caches for layer in cache.layers})
        rows.append([
            f"`{group.name}`", str(len(layers)), caches(group), f"{group.tokens:,}" if group.tokens else "a ring",
            f"{group.page_bytes:,}", needs(group), *(f"{group.hit_bytes(n):,}" for n in LENGTHS),
        ])  # fmt: skip
    sums = (f"{sum(group.hit_bytes(n) for group in description):,}" for n in LENGTHS)
    rows.append(["all", str(description.layers + description.drafts), "", "", "", "", *sums])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def caches(group: Group) -> str:
    """The group's caches: layers, name, rows of a page, format."""
    return "; ".join(f"{len(x.layers)} `{x.cache}`: {x.rows} of `{x.layout}`" for x in group.caches)


def needs(group: Group) -> str:
    """What n tokens need, in words."""
    last = "n - 1"
    if group.lifetime == "window":
        return f"rows max(0, n - {group.reach}) to {last}"
    if group.lifetime == "request":
        of = {"rows": set[int](), "keys": set[int]()}
        for cache in group.caches:
            of["keys" if cache.cache == "indexer" else "rows"].add(cache.positions)
        rows = " and ".join(f"rows 0 to {last}" if r == 1 else f"floor(n / {r}) rows" for r in sorted(of["rows"]))
        if of["keys"] <= of["rows"]:
            return rows + (", their keys" if of["keys"] else "")
        return ", ".join([rows, *(f"floor(n / {r}) keys" for r in sorted(of["keys"]))])
    first = f"{group.reach} floor(n / {group.reach})"
    if group.lifetime == "states":
        first = f"max(0, {first} - {group.reach})" if group.overlap else first
        return f"states of {first} to {last}"
    return f"the ring's rows of {first} to {last}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        path.write_text(rewritten(path.read_text()))
