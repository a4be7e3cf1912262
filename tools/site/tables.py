"""Tables of the performance page, from the records in benchmarks/results."""

import collections
import json
import pathlib
from typing import Any

LEVEL = 0.03  # a peer's time within 3% of cumla's is level
OURS = ("cumla", "cumla-cuda")
NOT_PEERS = ("copy", "portable", "two steps", "all positions", "without blocks", "triton", "torch")


def word(ratio: float) -> str:
    return "level" if abs(ratio - 1) <= LEVEL else "ahead" if ratio > 1 else "**behind**"


def number(us: float | None) -> str:
    return "" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def heading(record: dict[str, Any], path: pathlib.Path) -> str:
    where = record["environment"]
    commit = where.get("commit", "unknown")[:7]
    return f"*us of a call; {where['device']}, commit {commit}, `{path.parent.name}/{path.name}`*"


def times(path: pathlib.Path, op: str, config: str = "") -> str:
    """Rows of one operation whose configuration contains a text: a column per implementation, and cumla's rank."""
    record = json.loads(path.read_text())
    rows: dict[str, dict[str, float]] = collections.defaultdict(dict)
    impls: dict[str, None] = {}
    for row in record["rows"]:
        us = row.get("us_graph") or row.get("us")
        if row["op"] == op and config in row["config"] and us and row["impl"] != "cumla-numba_cuda":
            rows[row["config"]][row["impl"]] = us
            impls[row["impl"]] = None
    if not rows:
        raise ValueError(f"{path}: no rows of {op} with {config!r}")
    ours = next((impl for impl in impls if impl in OURS), None)
    peer = next((x for x in impls if ours and x not in (*OURS, *NOT_PEERS) and not x.startswith("sm_")), None)
    lines = [heading(record, path), ""]
    lines.append(
        "| | "
        + " | ".join("cumla" if impl == ours else impl for impl in impls)
        + (f" | {peer} / cumla | |" if peer else " |")
    )
    lines.append("|---|" + "---:|" * len(impls) + ("---:|---|" if peer else ""))
    for name, us in rows.items():
        line = f"| {name} | " + " | ".join(number(us.get(impl)) for impl in impls) + " |"
        if peer:
            ratio = us[peer] / us[str(ours)] if peer in us else None
            line += " | |" if ratio is None else f" {ratio:.2f} | {word(ratio)} |"
        lines.append(line)
    return "\n".join(lines)


def steps(path: pathlib.Path) -> str:
    """The table of a request trace's steps: time of vLLM's kernels divided by cumla's, by layer and step."""
    record = json.loads(path.read_text())
    kinds = list(dict.fromkeys(line["kind"] for line in record["table"]))
    cells: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for line in record["table"]:
        ratio, found = line["ratio"], line["ratios"]
        text = "" if ratio is None else f"{ratio:.2f}"
        if len(found) > 1:
            text += f" ({min(found):.2f} to {max(found):.2f})"
        cells[f"{line['heads'][1:]} heads, {line['steps']}"][line["kind"]] = text
    lines = [heading(record, path).replace("us of a call", "vLLM's time / cumla's, of one layer"), ""]
    lines += ["| | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    lines += [f"| {name} | " + " | ".join(row.get(kind, "") for kind in kinds) + " |" for name, row in cells.items()]
    return "\n".join(lines)
