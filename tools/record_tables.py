#!/usr/bin/env python3
"""Rewrite the tables of results in Markdown pages from the records in benchmarks/results.

A table belongs to a record if the paragraph above it begins with "Record: `benchmarks/results/FOLDER/FILE.json`". Its
first column has the record's configurations; the column's heading is the operation, or each row begins with
the operation. The other headings are implementations ("cumla", "FlashMLA": microseconds) or quotients of two
("FlashMLA / cumla").

tools/record_tables.py docs/kernels/*.md
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
TABLE = re.compile(r"^Record: `([\w/]+\.json)`(?:[^\n]*\n)+?\n((?:\|[^\n]*\n)+)", re.MULTILINE)
IMPLEMENTATIONS = {"FlashMLA": "flash_mla", "DeepGEMM": "deep_gemm", "vLLM": "vllm"}

Times = dict[tuple[str, str], dict[str, float]]


def times_of(record: pathlib.Path) -> Times:
    """Microseconds by (operation, configuration) and implementation: inside a CUDA graph if the record has it."""
    times: Times = {}
    for row in json.loads(record.read_text())["rows"]:
        times.setdefault((row["op"], row["config"]), {})[row["impl"]] = row.get("us_graph") or row["us"]
    return times


def rewritten(page: str) -> str:
    """The page with its records' figures. Raises KeyError for a row or column that a record lacks."""
    return TABLE.sub(lambda found: found[0].replace(found[2], table(found[2], times_of(ROOT / found[1]))), page)


def table(lines: str, times: Times) -> str:
    heading, rule, *rows = lines.splitlines()
    operation, *columns = cells(heading)
    written = [heading, rule]
    for row in rows:
        label = cells(row)[0]
        _, name, config = label.split("`") if "`" in label else ("", operation.strip("`"), label)
        measured = times[name, config.strip()]
        written.append("| " + " | ".join([label, *(figure(measured, column) for column in columns)]) + " |")
    return "\n".join(written) + "\n"


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def figure(measured: dict[str, float], column: str) -> str:
    """Three digits of a time, or a quotient; empty where a library has no kernel for the configuration."""
    names = [IMPLEMENTATIONS.get(name, name) for name in column.split(" / ")]
    if names[0] not in measured and names[0] != "cumla":
        return ""
    first, *others = (measured[name] for name in names)
    if others:
        return f"{first / others[0]:.3g}" if first >= 10 * others[0] else f"{first / others[0]:.2f}"
    return f"{first:,.0f}" if first >= 100 else f"{first:#.3g}"


def main() -> None:
    for path in map(pathlib.Path, sys.argv[1:]):
        page = path.read_text()
        path.write_text(rewritten(page))


if __name__ == "__main__":
    main()
