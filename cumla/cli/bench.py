"""`cumla bench`: measure, compare, draw."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench import LAYOUT_NAMES, NAMES, plot, rows
from ..bench.measure import environment
from ..bench.problem import Sizes
from ..dispatch.backends import BACKENDS
from ..errors import InputError, RunError
from ..layout import LAYOUTS
from ..replay.options import choose_backend
from ..replay.plot import check_can_plot
from ..terminal import Progress, say
from ..timing import limit_blas_threads
from . import inapplicable
from .files import check_outputs
from .options import MAX_BATCH, MAX_HEADS, MAX_SIZE, OneOf, add_number

HEADING = f"{'':29} {'us':>8} {'limit':>6} {'GB/s':>6} {'TF':>6}"
SIZES = ("--layout", "--heads", "--batch", "--tokens", "--topk", "--extra", "--context")


def add_options(parser: argparse.ArgumentParser, names: Sequence[str] = NAMES) -> None:
    """Add the options of `cumla bench`. names: of the suites."""
    parser.description = (
        "Time the operations on this machine: inside CUDA graphs on a device, call by call on the CPU, "
        "and FlashMLA's operations where it can be imported. Results of attention are checked first. "
        "In a checkout `python -m benchmarks.suites` measures layers and their other operations. "
        "Exit status 1 if --compare finds a row that is slower beyond noise."
    )
    parser.add_argument(
        "suite", nargs="*", type=OneOf(names), metavar="SUITE", help=f"{', '.join(names)} (default: all of these)",
    )  # fmt: skip
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--layout", choices=LAYOUT_NAMES, default="DSV4_FP8", metavar="FORMAT",
        help=f"format of the cache: {', '.join(LAYOUT_NAMES)} (default: DSV4_FP8); with DSV41_FP8 and DSV41_FP8_SPLIT "
        "the second cache has FP4 rows",
    )  # fmt: skip
    add_number(sizes, "--heads", 1, MAX_HEADS, default=64)
    add_number(sizes, "--batch", 1, MAX_BATCH, "requests", default=[1, 32])
    add_number(sizes, "--tokens", 1, MAX_SIZE, "tokens of insert, gather and prefill", default=[1024])
    add_number(sizes, "--topk", 1, MAX_SIZE, "keys of the first cache", default=128)
    add_number(
        sizes, "--extra", 1, MAX_SIZE, "keys of V4's and V4.1's second cache, and rows that the indexer chooses",
        default=512,
    )  # fmt: skip
    add_number(sizes, "--context", 64, MAX_SIZE, unit="TOKENS", default=8192)
    sizes.add_argument("--backend", choices=list(BACKENDS), help="default: cuda if there is a device, else cpu")
    output = parser.add_argument_group("results")
    output.add_argument("--json", metavar="FILE", help="write the rows, with versions and device; - for stdout")
    output.add_argument("--results", metavar="FILE", help="draw or compare these instead of measuring; - for stdin")
    output.add_argument(
        "--compare", nargs="+", metavar="FILE",
        help="compare with the results OLD; with OLD NEW, compare the two files without measuring",
    )  # fmt: skip
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, suites: Mapping[str, rows.Suite] = rows.SUITES) -> int:
    """The exit status: 0, or 1 where --compare finds something slower beyond noise."""
    check_outputs({"--json": None if args.json is None else Path(args.json), "--plot": args.plot})
    if args.results is not None or (args.compare is not None and len(args.compare) == 2):
        which = "with --results" if args.results is not None else "with two files to compare"
        if args.suite:
            raise InputError(f"SUITE: got {', '.join(args.suite)}, which does not apply {which}: nothing is measured")
        inapplicable.refuse(args, (*SIZES, "--backend"), f"{which}: nothing is measured")
    if args.compare is not None and len(args.compare) == 2:
        inapplicable.refuse(args, ["--results"], "with two files to compare")
    if args.plot is not None:
        check_can_plot(args.plot)
    # What is written to stdout is for a program; a person reads stderr then.
    console = Console(stderr=args.json == "-")
    record: dict[str, Any]
    if args.compare is not None and len(args.compare) > 2:
        raise InputError(f"--compare: got {len(args.compare)} files, expected OLD, or OLD and NEW")
    old = None if args.compare is None else rows.read(args.compare[0])
    if args.compare is not None and len(args.compare) == 2:
        record = rows.read(args.compare[1])
    elif args.results is not None:
        record = rows.read(args.results)
        if args.compare is None and args.plot is None and args.json is None:
            show_all(console, record)
    else:
        record = measure(console, args, suites)
    if args.plot is not None and not any(map(rows.time_of, record["rows"])):
        raise InputError("--plot: the results have no times to draw")
    with Progress("writing the results") as progress, progress.paused() if args.json == "-" else nullcontext():
        problem = _write(args, record)
    slower = 0 if old is None else compare(console, old["rows"], record["rows"])
    if problem is not None:
        raise RunError(problem)
    return 1 if slower else 0


def measure(console: Console, args: argparse.Namespace, suites: Mapping[str, rows.Suite]) -> dict[str, Any]:
    """Measure what is asked for, a line a row."""
    backend = choose_backend(args.backend)
    sizes = Sizes(
        backend, LAYOUTS[args.layout], args.heads, tuple(args.batch), tuple(args.tokens), args.topk,
        args.extra, args.context,
    )  # fmt: skip
    where = environment(sizes.on_device)
    if not sizes.on_device:
        limit_blas_threads()
    say(console, f"{where['device']}, backend {backend}")
    console.print(HEADING, highlight=False)
    found = []
    with Progress("measuring") as progress:
        for row in rows.measured(args.suite or list(suites), sizes, progress.update, suites):
            found.append(row)
            with progress.paused():
                show(console, row, sizes.on_device)
    return {"environment": where, "backend": backend, "rows": found}


def show_all(console: Console, record: dict[str, Any]) -> None:
    """Print results of a file as they were printed when they were measured."""
    where = record.get("environment", {}).get("device", "unknown device")
    say(console, escape(f"{where}, backend {record.get('backend', 'unknown')}"))
    console.print(HEADING, highlight=False)
    for row in record["rows"]:
        show(console, row, row.get("us_graph") is not None)
    console.print(f"{len(record['rows'])} rows. --plot draws them, --compare OLD says what changed", highlight=False)


def show(console: Console, row: rows.Row, on_device: bool) -> None:
    """Print a row."""
    name = f"{row['op']} {row['config']}" + ("" if row.get("impl", "cumla") == "cumla" else f" {row['impl']}")
    limit = row.get("limit_us") if on_device else None
    numbers = rows.time_of(row), limit, row.get("gbps"), row.get("tflops")
    text = " ".join(f"{_short(x):>{width}}" for x, width in zip(numbers, (8, 6, 6, 6), strict=True))
    lines = [f"{name:29} {text}"] if len(name) <= 29 else [name, f"{'':29} {text}"]
    say(console, "\n".join(map(escape, lines)))


def _short(number: float | None) -> str:
    """Three digits, or all of those before the point."""
    return "" if number is None else f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def compare(console: Console, old: Sequence[rows.Row], new: Sequence[rows.Row]) -> int:
    """Print what changed. Returns how many rows are slower beyond noise."""
    found = rows.changes(old, new)
    if not found:
        raise InputError("--compare: the files have no row in common")
    table = Table(box=None, pad_edge=False)
    table.add_column("row", overflow="fold", min_width=12)
    for name in ("old us", "new us", "new/old", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for change in found:
        mark = "" if not change.beyond_noise else "[red]slower[/red]" if change.ratio > 1 else "[green]faster[/green]"
        table.add_row(escape(change.row), f"{change.old:.4g}", f"{change.new:.4g}", f"{change.ratio:.3f}", mark)
    console.print(table)
    slower = sum(change.beyond_noise and change.ratio > 1 for change in found)
    faster = sum(change.beyond_noise and change.ratio < 1 for change in found)
    console.print(f"{len(found)} rows: {slower} slower, {faster} faster, the others within noise", highlight=False)
    return slower


def _write(args: argparse.Namespace, record: dict[str, Any]) -> str | None:
    """Write what --json and --plot ask for. Returns what went wrong, if anything did."""
    path: Any = args.json
    try:
        if args.json is not None:
            text = rows.text(record)
            if args.json == "-":
                sys.stdout.write(text)
            else:
                Path(args.json).write_text(text, encoding="utf-8")
        path = args.plot
        if args.plot is not None:
            plot.write(args.plot, record["rows"], str(record.get("environment", {}).get("device", "")))
    except BrokenPipeError:
        raise
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}"
    return None
