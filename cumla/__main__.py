"""The command line: `cumla replay`, `check`, `bench`, `warmup`, `export` and `info` (or `python -m cumla ...`)."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from . import __doc__ as summary
from . import __version__
from .bench import LAYOUT_NAMES, NAMES
from .dispatch.backends import BACKENDS
from .errors import InputError, RunError
from .kernels.cpu.threads import num_cores
from .layers.prefill_path import PATHS
from .replay.options import (
    DEVICE_DEFAULTS,
    FORMATS,
    HOST_DEFAULTS,
    INDEX_KEYS,
    LAYER_RATIOS,
    MLA_CACHES,
    V41_CACHE_FORMATS,
    V41_LAYOUT,
    WARM_KINDS,
    choose_backend,
)
from .replay.scheduler import STEP_MS
from .replay.trace import INT32_MAX

MAX_HEADS = 128
EXPORTED_KINDS = ("v4", "v41", "v32")
MAX_BATCH = 4096
MAX_SIZE = 2**20  # the largest array size that an option takes
MAX_SEED = 2**47  # 16 more bits still fit in a 64-bit integer

REPLAY = f"""\
Replay a trace of requests through a continuous-batching loop. Requests arrive by their timestamps, prompts are
prefilled in chunks, running requests decode. Blocks of the cache are shared by requests with equal prefixes and
freed at the end; a request that does not fit waits. Each step builds its metadata once and runs every layer over it.

Afterwards tables show throughput, time and bandwidth by op, the use of the cache, and how far a sample of every
step's tokens is from attention in float64: over the rows in the cache (are the kernels exact?) and over the rows
before quantisation (what does FP8 or FP4 cost?).

Q and K come from a seeded generator with the outliers of real activations. The clock is virtual: a step takes
{STEP_MS:.0f} ms of the trace's time, and idle time is skipped, so a run can be repeated.

Exit status: 0; 1 if a sample is beyond its bounds or a file cannot be written; 2 for options or a trace that
cannot be used; 130 if interrupted.
"""


class HelpFormatter(argparse.HelpFormatter):
    """Keeps paragraphs apart, each wrapped to the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(HelpFormatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


class Store(argparse.Action):
    """Stores a value, and the option in `passed`: whether an option applies is known once all are parsed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        if option is not None:
            namespace.passed = (*namespace.passed, self.option_strings[-1])


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of cumla's commands."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **kwargs)
        self.register("action", None, Store)
        self.set_defaults(passed=())

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        """For --help and --version. argparse ignores errors of writing."""
        print(message, end="", file=file, flush=True)


def make_parser() -> Parser:
    parser = Parser(prog="cumla", description=summary)
    parser.add_argument("--version", action="version", version=f"cumla {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_replay(commands.add_parser(
        "replay", help="replay a request trace through the paged cache and the attention layers",
        description=REPLAY,
    ))  # fmt: skip
    check = commands.add_parser(
        "check", help="compare every backend that can run here with the reference",
        description="Compare every backend that can run here with the reference, on small random cases. "
        "Exit status 1 if a result is beyond its bounds.",
    )  # fmt: skip
    check.add_argument("--backend", choices=[name for name in BACKENDS if name != "reference"], help="only this one")
    _add_number(check, "--seed", 0, MAX_SEED, "of the random numbers", default=0)
    check.set_defaults(run=_check)
    add_bench(commands.add_parser(
        "bench", help="time the operations on this machine, compare and draw results",
        description="Time the operations on this machine: inside CUDA graphs on a device, call by call on the CPU, "
        "and FlashMLA's operations where it can be imported. Results of attention are checked first. "
        "In a checkout `python -m benchmarks.suites` measures layers and their other operations. "
        "Exit status 1 if --compare finds a row that is slower beyond noise.",
    ))  # fmt: skip
    _add_warmup(commands.add_parser(
        "warmup", help="compile, test and store on disk the kernels that serving a model needs",
        description="Compile the kernels that serving needs into the caches on disk, and test each against the "
        "reference. A later process then starts warm: it compiles, tests and waits for nothing. "
        "Exit status 1 if a compiled kernel gives wrong results; the message names it and says what to do.",
    ))  # fmt: skip
    _add_export(commands.add_parser(
        "export", help="compiled kernels and their launches in one file, for engines without Python",
        description="Write a file with the compiled kernels and the launches of every call that a model's attention "
        "needs, for the C runtime (docs: Without Python). No GPU is needed. Exit status 1 if a call's launches follow "
        "from no formula, or the file cannot be written.",
    ))  # fmt: skip
    info = commands.add_parser(
        "info", help="versions, devices and backends, and how to install what is missing",
        description="Print versions, devices and backends; for each backend that cannot run, why, and the line "
        "that installs it.",
    )  # fmt: skip
    info.add_argument(
        "--capability",
        metavar="X.Y",
        help="which kernels a device of this compute capability gets",
    )
    info.set_defaults(run=_info)
    return parser


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE",
        help="JSON lines, plain or gzipped, with timestamp (ms), input_length, output_length and hash_ids (one "
        "for each 512 tokens of input; equal ids: shared prefix); default: a production trace that comes with "
        "cumla (300 requests, Mooncake project); - for stdin",
    )  # fmt: skip
    load = parser.add_argument_group("load")
    of_place = {name: _default(name) for name in ("requests", "max_len", "batch_tokens", "heads", "topk")}
    _add_number(load, "--requests", 1, INT32_MAX, "first N requests", shown=of_place["requests"])
    _add_number(
        load, "--max-len", 2, INT32_MAX, "cut requests to this length, at most 1/16 of it output", unit="TOKENS",
        shown=of_place["max_len"],
    )  # fmt: skip
    _add_number(
        load, "--max-output", 1, INT32_MAX, "cut outputs to this length", unit="TOKENS", shown="(default: uncut)"
    )  # fmt: skip
    _add_number(
        load, "--batch-tokens", 1, MAX_SIZE, "tokens of a step", unit="TOKENS", shown=of_place["batch_tokens"]
    )  # fmt: skip
    _add_number(
        load, "--cache-tokens", 1, INT32_MAX, "tokens of the cache", unit="TOKENS",
        shown="(default: half the tokens of all requests, at least the tokens of the largest request)",
    )  # fmt: skip
    _add_number(
        load, "--host-pages", 1, INT32_MAX, "pages of each page group in host memory: prefixes that a full cache would "
        "drop are swapped out to them, and in for later hits, and compared", shown="(default: none)",
    )  # fmt: skip
    _add_number(load, "--seed", 0, MAX_SEED, "of Q and K", default=0)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--layers", default=",".join(LAYER_RATIOS), metavar="TYPES",
        help="comma list of swa (attends to a window), c4a (to a selection of compressed rows of 4 tokens too), "
        "c128a (to all compressed rows of 128 tokens too), mla (dense: to all tokens), and whole layers from hidden "
        "states to their output: v4 (one of each of the first three kinds), v32, v41 (one of each of V4.1's six "
        "kinds, which share rows and selections), glm52 and hy4 (a layer that selects, and one that takes its "
        "selection), glm53 (of GLM-5.3-Flash) and mistral4 (layers with and without RoPE, that share rows and "
        "selections); default: the first three",
    )  # fmt: skip
    _add_number(model, "--heads", 1, MAX_HEADS, "query heads", shown=of_place["heads"])
    _add_number(model, "--window", 1, MAX_SIZE, unit="TOKENS", default=128)
    _add_number(
        model, "--topk", 1, MAX_SIZE, "rows that a token selects at c4a and in layers of models", shown=of_place["topk"]
    )  # fmt: skip
    model.add_argument(
        "--layout", choices=list(FORMATS), metavar="FORMAT[,FORMAT]",
        help=f"formats of the caches of swa, c4a, c128a and v41: first of window rows, then of compressed rows; one of "
        f"{'; '.join(FORMATS)} (default: DSV4_FP8, of v41 {V41_LAYOUT})",
    )  # fmt: skip
    model.add_argument(
        "--mla-cache", choices=MLA_CACHES, default=MLA_CACHES[0], help="values of mla's cache (default: bf16)"
    )
    model.add_argument(
        "--index-keys", choices=INDEX_KEYS, default=INDEX_KEYS[0], help="of v41's layers that select (default: fp8)"
    )
    model.add_argument(
        "--prefill-path",
        choices=PATHS,
        help="how sparse layers prefill: over the caches' pages, or over rows gathered from them "
        "(default: the faster path for each chunk)",
    )
    model.add_argument(
        "--batch-invariant", action="store_true", help="layers whose tokens have the same bits in any batch"
    )
    _add_number(
        model, "--ranks", 1, 64, "shard the rows of long contexts across N GPUs, or N threads on the CPU", default=1
    )  # fmt: skip
    model.add_argument(
        "--backend", choices=list(BACKENDS), help="default: cuda if there is a device that CuPy can use, else cpu"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write all results, including each step's; - for stdout"
    )
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page that needs no other file: steps over time, cache "
        "occupancy, prefix hits and time by op",
    )  # fmt: skip
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png",
        help="draw batch make-up, cache occupancy and time by op over the steps (needs matplotlib)",
    )  # fmt: skip
    parser.set_defaults(run=_replay, needs_less="a smaller --cache-tokens, --batch-tokens or --heads needs less")


def add_bench(parser: argparse.ArgumentParser, names: Sequence[str] = NAMES) -> None:
    """Add the options of `cumla bench`. names: of the suites."""
    parser.add_argument(
        "suite", nargs="*", type=OneOf(names), metavar="SUITE", help=f"{', '.join(names)} (default: all of these)",
    )  # fmt: skip
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--layout", choices=LAYOUT_NAMES, default="DSV4_FP8", metavar="FORMAT",
        help=f"format of the cache: {', '.join(LAYOUT_NAMES)} (default: DSV4_FP8); with DSV41_FP8 and DSV41_FP8_SPLIT "
        "the second cache has FP4 rows",
    )  # fmt: skip
    _add_number(sizes, "--heads", 1, MAX_HEADS, default=64)
    _add_number(sizes, "--batch", 1, MAX_BATCH, "requests", default=[1, 32])
    _add_number(sizes, "--tokens", 1, MAX_SIZE, "tokens of insert, gather and prefill", default=[1024])
    _add_number(sizes, "--topk", 1, MAX_SIZE, "keys of the first cache", default=128)
    _add_number(
        sizes, "--extra", 1, MAX_SIZE, "keys of V4's and V4.1's second cache, and rows that the indexer chooses",
        default=512,
    )  # fmt: skip
    _add_number(sizes, "--context", 64, MAX_SIZE, unit="TOKENS", default=8192)
    sizes.add_argument("--backend", choices=list(BACKENDS), help="default: cuda if there is a device, else cpu")
    output = parser.add_argument_group("results")
    output.add_argument("--json", metavar="FILE", help="write the rows, with versions and device; - for stdout")
    output.add_argument("--results", metavar="FILE", help="draw or compare these instead of measuring; - for stdin")
    output.add_argument(
        "--compare", nargs="+", metavar="FILE",
        help="compare with the results OLD; with OLD NEW, compare the two files without measuring",
    )  # fmt: skip
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from .cli import bench

    return bench.run(args)


def _add_warmup(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config", type=Path, metavar="FILE",
        help="config.json of a DeepSeek V2, V3, V3.2, V4 or V4.1, GLM-5 or Hy4 model; - for stdin",
    )  # fmt: skip
    _add_number(model, "--ranks", 1, MAX_SIZE, "ranks that share the heads of --config", default=1)
    model.add_argument("--kind", choices=WARM_KINDS, default="v4", help="without --config (default: v4)")
    _add_number(model, "--heads", 1, MAX_HEADS, "query heads of a rank, without --config", default=64)
    _add_number(model, "--topk", 1, MAX_SIZE, "rows a token selects, without --config", default=512)
    model.add_argument(
        "--layout", choices=list(FORMATS), metavar="FORMAT[,FORMAT]",
        help=f"formats of v4's or v41's caches, as of cumla replay: {'; '.join(FORMATS)} (default: DSV4_FP8, of v41 "
        f"{V41_LAYOUT})",
    )  # fmt: skip
    model.add_argument("--batch-invariant", action="store_true", help="of a model served with batch_invariant=True")
    _add_number(parser, "--batch", 1, MAX_BATCH, "requests of a step", default=[1, 8, 32, 128])
    _add_number(parser, "--block-size", 1, 2**16, "tokens of a page", unit="TOKENS", default=64)
    parser.add_argument("--backend", choices=["cpu", "cuda"], help="default: cuda if there is a device, else cpu")
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="list the kernels that a device of this compute capability gets; compiles nothing, needs no such device",
    )
    parser.set_defaults(run=_warmup)


def _add_export(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config", type=Path, metavar="FILE",
        help="config.json of a DeepSeek V3.2, V4 or V4.1, GLM-5, Mistral Large 4 or Hy4 model; - for stdin",
    )  # fmt: skip
    _add_number(model, "--ranks", 1, MAX_SIZE, "ranks that share the heads of --config", default=1)
    model.add_argument("--kind", choices=EXPORTED_KINDS, default="v4", help="without --config (default: v4)")
    _add_number(model, "--heads", 1, MAX_HEADS, "query heads of a rank, without --config", default=64)
    _add_number(model, "--topk", 1, MAX_SIZE, "rows a token selects, without --config", default=512)
    device = parser.add_argument_group("device")
    device.add_argument("--capability", metavar="X.Y", default="9.0", help="compute capability (default: 9.0)")
    _add_number(device, "--sms", 1, 1024, "SMs: 132 of an H100 SXM, H200 or GH200, 114 or 78 of other Hoppers",
                default=132)  # fmt: skip
    device.add_argument(
        "--clusters", metavar="CTAS:NUMBER,...",
        help="clusters that run at a time, by their CTAs (default: an H200's numbers for 132 SMs, else no clusters)",
    )  # fmt: skip
    sizes = parser.add_argument_group("sizes")
    _add_number(sizes, "--tokens", 1, 2**16, "most tokens of a step", default=4096)
    _add_number(sizes, "--requests", 1, MAX_BATCH, "most requests of a step", default=256)
    _add_number(sizes, "--block-size", 1, 2**16, "tokens of a page", unit="TOKENS", default=64)
    _add_number(sizes, "--context", 1, 2**20, "positions of the longest context", unit="TOKENS", default=2**17)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the file is written")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what a file serves, and export nothing")
    parser.add_argument("--runtime", type=Path, metavar="DIR", help="write the C runtime's sources there")
    parser.set_defaults(run=_export)


def _default(name: str) -> str:
    device, host = (getattr(defaults, name) for defaults in (DEVICE_DEFAULTS, HOST_DEFAULTS))
    return f"(default: {'uncut' if device is None else device} on a device, {host} on the CPU)"


class OneOf:
    """An argparse type: one of some names. (`choices` would also have to contain the empty list of no arguments.)"""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {', '.join(self.names)}")
        return text


class Between:
    """An argparse type: an integer within bounds."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = minimum, maximum

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self.minimum - 1
        if not self.minimum <= value <= self.maximum:
            raise argparse.ArgumentTypeError(
                f"got {text!r:.80}, expected an integer from {self.minimum} to {self.maximum}"
            )
        return value


class ListOf:
    """An argparse type: a comma list of integers within bounds."""

    def __init__(self, part: Between) -> None:
        self.part = part

    def __call__(self, text: str) -> list[int]:
        return [self.part(part) for part in text.split(",")]


def _add_number(
    group: argparse._ActionsContainer, option: str, least: int, most: int, what: str = "", *, unit: str = "N",
    default: Any = None, shown: str = "",
) -> None:  # fmt: skip
    """Add an option that takes an integer within bounds, or a comma list of them if that is the default.

    Args:
        what: help text before the bounds and the default
        shown: text in place of the default
    """
    number, many = Between(least, most), isinstance(default, list)
    bounds = f"{least} to {most}" if most < INT32_MAX else f"from {least}"
    shown = shown or f"(default: {','.join(map(str, default)) if many else default})"
    group.add_argument(
        option, type=ListOf(number) if many else number, default=default,
        metavar=f"{unit},{unit},..." if many else unit,
        help=f"{what}, {bounds} {shown}" if what else f"{bounds} {shown}",
    )  # fmt: skip


def _replay(args: argparse.Namespace) -> int:
    from .cli import replay as command

    return command.run(args)


def _check(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .cli import check

    return check.run(Console(), None if args.backend is None else check.checked(args.backend), args.seed)


def _warmup(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .cli import inapplicable, warmup

    model = warmup.Model(args.kind, args.heads, args.topk)
    if args.config is None:
        inapplicable.refuse(args, ["--ranks"], "without --config, whose heads are sharded across ranks")
    else:
        inapplicable.refuse(args, ["--kind", "--heads", "--topk"], "with --config, which sets it")
        model = warmup.Model.from_config(args.config, args.ranks)
    if model.kind == "mla":
        inapplicable.refuse(args, ["--topk"], "to mla, which attends to all rows")
    if not model.has_window:
        inapplicable.refuse(args, ["--layout"], f"to {model.kind}, but to v4 and v41")
    if model.kind == "v41":
        if args.layout not in (None, *V41_CACHE_FORMATS):
            raise InputError(f"--layout: got {args.layout} for v41, expected one of {'; '.join(V41_CACHE_FORMATS)}")
        model = replace(model, layout=args.layout or V41_LAYOUT)
    elif args.layout is not None:
        model = replace(model, layout=args.layout)
    model = replace(model, batch_invariant=args.batch_invariant)
    if args.capability is not None:
        from .cli import warm_capability

        inapplicable.refuse(args, ["--backend"], "with --capability, which lists kernels of cuda")
        return warm_capability.run(Console(), model, args.batch, args.block_size, args.capability)
    return warmup.run(Console(), model, args.batch, args.block_size, choose_backend(args.backend))


def _export(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .cli import export, inapplicable

    if args.config is None:
        inapplicable.refuse(args, ["--ranks"], "without --config, whose heads are sharded across ranks")
        model = export.Model(args.kind, args.heads, args.topk)
    else:
        inapplicable.refuse(args, ["--kind", "--heads", "--topk"], "with --config, which sets it")
        model = export.Model.from_config(args.config, args.ranks)
    device = export.device_of(args.capability, args.sms, args.clusters)
    claims = export.Claims(args.tokens, args.requests, args.block_size, args.context)
    return export.run(Console(), model, device, claims, args.out, args.show, args.runtime)


def _info(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .cli import info

    if args.capability is not None:
        return info.run_capability(Console(), args.capability)
    return info.run(Console())


def main(argv: Sequence[str] | None = None, parser: Parser | None = None) -> int:
    """Run a command. Returns the exit status; errors that a user can fix are one line on stderr.

    Args:
        parser: sets `run`, a function of the parsed options; None: `cumla`'s own
    """
    needs_less = "smaller sizes need less"
    _replace_closed_streams()
    if sys.stdout is None:  # closed by the caller: `>&-`
        return _fail("cannot write: stdout is closed", 1)
    try:
        args = (make_parser() if parser is None else parser).parse_args(argv)
        needs_less = getattr(args, "needs_less", needs_less)
        _check_environment()
        status: int = args.run(args)
        sys.stdout.flush()  # while a failure can still be reported
        return status
    except InputError as error:
        return _fail(str(error), 2)
    except RunError as error:
        return _fail(str(error), 1)
    except MemoryError:
        return _fail(f"out of memory; {needs_less}", 1)
    except KeyboardInterrupt:
        print("cumla: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # stdout: commands handle errors of their own files
        return _stdout_is_gone(error)


def _replace_closed_streams() -> None:
    """Open the null device as stdin and stderr where the caller closed them (`<&-`, `2>&-`).

    Otherwise lines of progress would be printed to stdout.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _check_environment() -> None:
    """Check the environment variables that would otherwise raise an error in the middle of a command, or silence it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and not int(columns):  # unknown, as for shutil; Rich would print nothing
        del os.environ["COLUMNS"]
    try:
        num_cores()
    except ValueError as error:
        raise InputError(str(error)) from None


def _stdout_is_gone(error: OSError) -> int:
    """The exit status for a closed pipe, silently, or a full disk, with an error line. Raises any other error."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    with contextlib.suppress(OSError, ValueError):  # otherwise Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if error.errno == errno.EPIPE else _fail(f"cannot write: {error.strerror}", 1)


def _fail(message: str, status: int) -> int:
    """Print one line; a terminal gets it wrapped between words."""
    line = f"cumla: error: {message}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
