"""`cumla bench trace`: steps of a request trace, their table and their rows."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..bench import TRACE
from ..bench.measure import environment
from ..bench.trace import TraceOptions, measured
from ..bench.trace_layers import KINDS
from ..bench.trace_steps import parsed
from ..bench.trace_table import record, table
from ..errors import InputError
from ..replay.options import HOST_DEFAULTS, choose_backend
from ..replay.trace import requests_of
from ..timing import limit_blas_threads

SAVE_SECONDS = 5.0  # from one time that rows are written to the next: a run that is cut short leaves what it had


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, or 1 where a part failed or both sides disagree."""
    if args.suite != [TRACE]:
        raise InputError(f"SUITE: got {', '.join(args.suite)}, expected {TRACE} alone")
    for option in ("compare", "results", "plot"):
        if getattr(args, option) is not None:
            raise InputError(f"--{option}: a trace has no such results")
    for kind in args.kinds or ():
        if kind not in KINDS:
            raise InputError(f"--kinds: got {kind!r}, expected {', '.join(KINDS)}")
    options = TraceOptions(
        choose_backend(args.backend),
        args.kinds or tuple(KINDS),
        args.heads and tuple(args.heads),
        args.steps,
        args.layers,
    )
    requests = requests_of(args.trace)
    if not options.on_device:
        requests = [request.clipped(HOST_DEFAULTS.max_len) for request in requests[: HOST_DEFAULTS.requests]]
        limit_blas_threads()
    for name in options.all_steps:
        parsed(name)
    console = Console(stderr=args.json == "-")
    where: dict[str, Any] = {"environment": environment(options.on_device), "backend": options.backend}
    console.print(f"{where['environment']['device']}, backend {options.backend}", highlight=False, soft_wrap=True)
    rows, saved = [], time.monotonic()
    for row in measured(options, requests):
        rows.append(row)
        us = row["us_graph"] if row["us_graph"] is not None else row["us"]
        text = f"{row['op']:22} {row['config']:34} {row['impl']:6} " + ("-" if us is None else f"{us:10.2f}")
        if row.get("error"):
            text += f"  {row['error']}"
        console.print(escape(text), highlight=False, soft_wrap=True)
        if args.json not in (None, "-") and time.monotonic() - saved > SAVE_SECONDS:
            _write(Path(args.json), {**where, "rows": rows})
            saved = time.monotonic()
    console.print(escape("\n".join(table(rows))), highlight=False, soft_wrap=True)
    done = {**where, "table": record(rows), "rows": rows}
    if args.json == "-":
        sys.stdout.write(json.dumps(done, indent=1) + "\n")
    elif args.json is not None:
        _write(Path(args.json), done)
    return 1 if any(row.get("error") for row in rows) else 0


def _write(path: Path, done: dict[str, Any]) -> None:
    path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
