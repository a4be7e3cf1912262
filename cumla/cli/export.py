"""`cumla export`: compiled kernels and the launches of every call of a model, for engines without Python."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from ..errors import InputError, RunError
from ..export import cubins, file_of, record_of
from ..export.calls import KINDS, Claims, calls_of
from ..export.file import read
from ..export.header import write_runtime
from ..export.library import self_test
from ..export.record import ExportError, Program
from ..kernels.cuda.device import HOPPER, LIMITS, Device
from ..terminal import Progress, say
from . import inapplicable
from .options import MAX_BATCH, add_model, add_number
from .served_model import Model

T = TypeVar("T")
CLUSTERS = {132: ((2, 66), (3, 39), (4, 30), (5, 22), (6, 17))}  # of an H200, as its driver answers


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a file with the compiled kernels and the launches of every call that a model's attention "
        "needs, for the C runtime (docs: Without Python). No GPU is needed. Exit status 1 if a call's launches follow "
        "from no formula, the file cannot be written, or a result of --test differs."
    )
    add_model(parser, KINDS)
    device = parser.add_argument_group("device")
    device.add_argument("--capability", metavar="X.Y", default="9.0", help="compute capability (default: 9.0)")
    add_number(device, "--sms", 1, 1024, "SMs: 132 of an H100 SXM, H200 or GH200, 114 or 78 of other Hoppers",
                default=132)  # fmt: skip
    device.add_argument(
        "--clusters", metavar="CTAS:NUMBER,...",
        help="clusters that run at a time, by their CTAs (default: an H200's numbers for 132 SMs, else no clusters)",
    )  # fmt: skip
    sizes = parser.add_argument_group("sizes")
    add_number(sizes, "--tokens", 1, 2**16, "most tokens of a step", default=4096)
    add_number(sizes, "--requests", 1, MAX_BATCH, "most requests of a step", default=256)
    add_number(sizes, "--block-size", 1, 2**16, "tokens of a page", unit="TOKENS", default=64)
    add_number(sizes, "--context", 1, 2**20, "positions of the longest context", unit="TOKENS", default=2**17)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the file is written")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what a file serves, and export nothing")
    parser.add_argument(
        "--test", type=Path, metavar="FILE",
        help="run a small call of every kernel of a file on the device, by the C runtime, which cc compiles",
    )  # fmt: skip
    parser.add_argument("--runtime", type=Path, metavar="DIR", help="write the C runtime's sources there")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    if args.config is None:
        inapplicable.refuse(args, ["--ranks"], "without --config, whose heads are sharded across ranks")
        model = Model(args.kind, args.heads, args.topk)
    else:
        inapplicable.refuse(args, ["--kind", "--heads", "--topk"], "with --config, which sets it")
        model = Model.from_config(args.config, args.ranks)
    device = device_of(args.capability, args.sms, args.clusters)
    claims = Claims(args.tokens, args.requests, args.block_size, args.context)
    return run(Console(), model, device, claims, args.out, args.show, args.runtime, args.test)


def device_of(capability: str, sms: int, clusters: str | None) -> Device:
    """The description of a device. Raises InputError."""
    known = {f"{number // 10}.{number % 10}": limits for number, limits in LIMITS.items()}
    if capability not in known:
        raise InputError(f"--capability: got {capability}, expected one of {', '.join(known)}")
    limits = known[capability]
    has_clusters = limits.capability >= HOPPER
    found = CLUSTERS.get(sms, ()) if clusters is None else _clusters(clusters)
    return Device(limits, sms, has_clusters, found if has_clusters else None)


def _clusters(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in text.split(",")]
        if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
            raise ValueError
    except ValueError:
        raise InputError(f"--clusters: got {text!r}, expected CTAS:NUMBER,... such as 2:66,4:30") from None
    return tuple((size, most) for size, most in pairs)


def run(
    console: Console, model: Model, device: Device, claims: Claims, out: Path | None, show: Path | None,
    runtime: Path | None, test: Path | None = None,
) -> int:  # fmt: skip
    """Returns 0; raises InputError or RunError."""
    if out is None and show is None and runtime is None and test is None:
        raise InputError("--out, --show, --test, --runtime: got none of them, expected at least one")
    if runtime is not None:
        for path in _written(lambda: write_runtime(runtime), runtime):
            say(console, f"wrote {path}")
    if show is not None:
        print_file(console, show)
    if out is not None:
        export(console, model, device, claims, out)
    if test is not None:
        try:
            say(console, f"{test}: {self_test(test)} calls, all results within their bounds")
        except (InputError, RunError) as error:
            raise type(error)(f"--test: {error}") from None
    return 0


def export(console: Console, model: Model, device: Device, claims: Claims, out: Path) -> None:
    """Record, compile and write."""
    start = time.perf_counter()
    with Progress("recording launches") as progress:
        try:
            calls = list(calls_of(model, claims, device))
            records = []
            for number, call in enumerate(calls):
                progress.update(f"recording {call.name}", number, len(calls))
                records.append(record_of(call, device))
        except ExportError as error:
            raise RunError(f"export: {error}") from None
        except ValueError as error:
            raise InputError(f"--config: {error}") from None
        recorded = time.perf_counter()

        def compile_all(programs: list[Program], capability: int) -> dict[Program, bytes]:
            return cubins(
                programs, capability,
                lambda program, left: progress.update(f"compiled {program.file}", len(programs) - left, len(programs)),
            )  # fmt: skip

        data = file_of(records, device, compile_all)
    _written(lambda: out.write_bytes(data), out)
    seconds = recorded - start, time.perf_counter() - recorded
    programs = len({launch.function.program for x in records for sequence in x.sequences for launch in sequence})
    say(console, f"wrote {out}: {len(data) / 1e6:.1f} MB, {len(records)} kinds of calls, {programs} programs; "
        f"recorded in {seconds[0]:.0f} s, compiled in {seconds[1]:.0f} s")  # fmt: skip


def _written(write: Callable[[], T], path: Path) -> T:
    try:
        return write()
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def print_file(console: Console, path: Path) -> None:
    """The operations of a file, and the fields of each kind of call that are free."""
    try:
        tables = read(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--show: {error}") from None
    data = tables["bytes"][0][0]

    def text(place: int) -> str:
        return str(data[place : data.index(b"\0", place)].decode())

    header = tables["header"][0]
    say(console, f"capability {header[5] / 10}, {header[6]} SMs, {len(tables['programs'])} programs, "
        f"{len(data) / 1e6:.1f} MB")  # fmt: skip
    table = Table("kind of call", "field", "from", "to", "multiple of")
    for entry in tables["records"]:
        _, name, first, count, *_ = entry
        names = tables["operations"][entry[0]][2]
        for condition in tables["conditions"][first : first + count]:
            field, kind, _, multiple, least, most = condition
            label = text(tables["field_names"][names + field][0])
            if kind == 1 and not label.endswith(".data") and ".strides" not in label:
                table.add_row(text(name), label, str(least), str(most), str(multiple))
    console.print(table)
