"""`cumla replay`: options in, progress while it runs, tables and files out."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..dispatch.backends import BACKENDS
from ..errors import InputError, RunError
from ..layers.prefill_path import PATHS
from ..parallel import Communicator, RankError
from ..replay.engine import Engine, StepRecord, warm_up
from ..replay.models import POOL
from ..replay.options import (
    DEVICE_DEFAULTS,
    FORMATS,
    HOST_DEFAULTS,
    INDEX_KEYS,
    LAYER_RATIOS,
    MLA_CACHES,
    MODEL_LAYERS,
    V4_RATIOS,
    V41_CACHE_FORMATS,
    V41_LAYOUT,
    V41_RATIOS,
    ReplayOptions,
    cache_size,
    choose_backend,
    defaults_for,
    parse_layers,
)
from ..replay.page import write_page
from ..replay.plot import check_can_plot, write_plot
from ..replay.ranks import run_on_ranks
from ..replay.report import counted, json_text, print_report, write_json
from ..replay.scheduler import STEP_MS
from ..replay.summary import summarize, summarize_ranks
from ..replay.trace import INT32_MAX, Share, TraceRequest, in_order, requests_of
from ..terminal import Progress, say
from ..timing import limit_blas_threads
from . import inapplicable
from .files import STDOUT, check_outputs
from .info import describe_machine
from .options import MAX_HEADS, MAX_SEED, MAX_SIZE, add_number

LATENT = {
    name for model in ("v32", "glm52", "glm53", "mistral4", "hy4") for name in MODEL_LAYERS[model]
}  # over latent rows
# Layers that an option is for, where it is not for all.
LAYERS_OF = {
    "--window": {*LAYER_RATIOS, *V4_RATIOS, *V41_RATIOS},
    "--topk": {"c4a", "v4 c4a", *LATENT, *(name for name, ratio in V41_RATIOS.items() if ratio)},
    "--mla-cache": {"mla"},
    "--index-keys": {name for name, ratio in V41_RATIOS.items() if ratio},
    "--prefill-path": set(LAYER_RATIOS),
    "--layout": {*LAYER_RATIOS, *V41_RATIOS},
}

Run = tuple[Engine, list[StepRecord], float, float]  # the seconds are of warm-up and run


DESCRIPTION = f"""\
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE",
        help="JSON lines, plain or gzipped, with timestamp (ms), input_length, output_length and hash_ids (one "
        "for each 512 tokens of input; equal ids: shared prefix); default: a production trace that comes with "
        "cumla (300 requests, Mooncake project); - for stdin",
    )  # fmt: skip
    load = parser.add_argument_group("load")
    of_place = {name: _default(name) for name in ("requests", "max_len", "batch_tokens", "heads", "topk")}
    add_number(load, "--requests", 1, INT32_MAX, "first N requests", shown=of_place["requests"])
    add_number(
        load, "--max-len", 2, INT32_MAX, "cut requests to this length, at most 1/16 of it output", unit="TOKENS",
        shown=of_place["max_len"],
    )  # fmt: skip
    add_number(
        load, "--max-output", 1, INT32_MAX, "cut outputs to this length", unit="TOKENS", shown="(default: uncut)"
    )  # fmt: skip
    add_number(
        load, "--batch-tokens", 1, MAX_SIZE, "tokens of a step", unit="TOKENS", shown=of_place["batch_tokens"]
    )  # fmt: skip
    add_number(
        load, "--cache-tokens", 1, INT32_MAX, "tokens of the cache", unit="TOKENS",
        shown="(default: half the tokens of all requests, at least the tokens of the largest request)",
    )  # fmt: skip
    add_number(
        load, "--host-pages", 1, INT32_MAX, "pages of each page group in host memory: prefixes that a full cache would "
        "drop are swapped out to them, and in for later hits, and compared", shown="(default: none)",
    )  # fmt: skip
    add_number(load, "--seed", 0, MAX_SEED, "of Q and K", default=0)
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
    add_number(model, "--heads", 1, MAX_HEADS, "query heads", shown=of_place["heads"])
    add_number(model, "--window", 1, MAX_SIZE, unit="TOKENS", default=128)
    add_number(
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
    add_number(
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
    parser.set_defaults(run=run, needs_less="a smaller --cache-tokens, --batch-tokens or --heads needs less")


def _default(name: str) -> str:
    device, host = (getattr(defaults, name) for defaults in (DEVICE_DEFAULTS, HOST_DEFAULTS))
    return f"(default: {'uncut' if device is None else device} on a device, {host} on the CPU)"


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, or 1 where a sample is beyond its bounds or a file cannot be written."""
    options, requests, share = resolve(args)
    check_outputs({"--json": args.json, "--html": args.html, "--plot": args.plot}, read=args.trace)
    if args.html == STDOUT:
        raise InputError("--html: got -, expected a file")
    if args.plot is not None:
        check_can_plot(args.plot)
    limit_blas_threads()
    console = Console(stderr=args.json == STDOUT)
    trace = "shipped with cumla" if args.trace is None else str(args.trace)
    heads = counted(options.heads, "head")
    title = f"{share}, {'+'.join(options.layers)} layers, {heads}, backend {options.backend}"
    if args.layout is not None:
        title += f", {args.layout.replace(',', ' and ')}"
    if options.ranks > 1:
        title += f", {options.ranks} ranks"
    say(console, escape(f"{title}; trace: {trace}"))
    with Progress("compiling kernels") as progress:
        call = functools.partial(replay, options, requests, progress)
        runs = [call()] if options.ranks == 1 else replay_on_ranks(options, call)
        progress.update("writing the results")
        summary = {
            "config": {"trace": trace, "requests": len(requests), "step_ms": STEP_MS, **asdict(options)},
            "share": asdict(share),
            "machine": describe_machine(),
            **summary_of(runs),
        }
        # Files first: a reader of stdout may go away.
        with progress.paused() if args.json == STDOUT else nullcontext():
            problem = write_files(args, summary, title)
    print_report(console, summary)
    if problem is not None:
        raise RunError(problem)
    return 1 if summary["verification"]["failures"] else 0


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The numbers of a run, by rank."""
    engine, records, warm_up_seconds, wall_seconds = runs[0]
    for _, others, _, _ in runs[1:]:  # ranks take turns at checking
        for record, other in zip(records, others, strict=True):
            record.samples.extend(other.samples)
    summary = {"warm_up_seconds": warm_up_seconds, **summarize(engine, records, wall_seconds)}
    if len(runs) > 1:
        summary["ranks"] = summarize_ranks([run[:2] for run in runs])
    return summary


def write_files(args: argparse.Namespace, summary: dict[str, Any], title: str) -> str | None:
    """Write what --json, --html and --plot ask for. Returns what went wrong, if anything did."""
    path = args.json
    try:
        if args.json is not None:
            if args.json == STDOUT:
                print(json_text(summary), flush=True)
            else:
                write_json(args.json, summary)
        path = args.html
        if args.html is not None:
            write_page(args.html, summary, title)
        path = args.plot
        if args.plot is not None:
            write_plot(args.plot, summary, title)
    except BrokenPipeError:  # the reader of our output is gone
        raise
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}"
    return None


def resolve(args: argparse.Namespace) -> tuple[ReplayOptions, list[TraceRequest], Share]:
    """Options with the machine's defaults filled in, the requests cut to them, and how much of the trace that is.

    Raises InputError.
    """
    layers = parse_layers(args.layers)
    for option, names in LAYERS_OF.items():
        if not names & set(layers):
            inapplicable.refuse(args, [option], f"to --layers {args.layers}, but to {', '.join(sorted(names))}")
    has_v41 = bool(V41_RATIOS.keys() & set(layers))
    if has_v41 and args.layout not in (None, *V41_CACHE_FORMATS):
        raise InputError(
            f"--layout: got {args.layout} with layers of v41, expected one of {'; '.join(V41_CACHE_FORMATS)}"
        )
    backend = choose_backend(args.backend)
    defaults = defaults_for(backend)

    def value_of(name: str) -> Any:
        value = getattr(args, name)
        return getattr(defaults, name) if value is None else value

    max_len = value_of("max_len")
    with nullcontext() if args.trace is None else Progress("reading the trace"):  # its own is small
        trace = requests_of(args.trace)
    taken = trace[: value_of("requests")]
    requests = [request.clipped(max_len, args.max_output) for request in in_order(taken)]
    if args.requests is not None and len(requests) < args.requests:
        raise InputError(f"--requests: got {args.requests}, but the trace has {len(requests)}")
    options = ReplayOptions(
        backend=backend,
        layers=layers,
        heads=value_of("heads"),
        window=args.window,
        topk=value_of("topk"),
        batch_tokens=value_of("batch_tokens"),
        cache_tokens=cache_size(args.cache_tokens, requests),
        max_len=max_len,
        max_output=args.max_output,
        seed=args.seed,
        layout=args.layout or ReplayOptions.layout,
        v41_layout=args.layout if args.layout in V41_CACHE_FORMATS else V41_LAYOUT,
        mla_cache=args.mla_cache,
        index_keys=args.index_keys,
        prefill_path=args.prefill_path,
        batch_invariant=args.batch_invariant,
        ranks=args.ranks,
        host_pages=args.host_pages or 0,
    )
    if options.ranks > 1 and options.prefill_path == "rows":
        raise InputError("--prefill-path: got rows with --ranks, expected pages: a rank has not all rows")
    if options.batch_invariant and options.prefill_path == "rows":
        raise InputError("--prefill-path: got rows with --batch-invariant, expected pages")
    if options.ranks > 1 and options.host_pages:
        raise InputError(f"--host-pages: got {options.host_pages} with --ranks, expected one device")
    if options.topk % POOL and {"glm53"} & set(layers):
        raise InputError(f"--topk: got {options.topk} with layers of glm53, expected a multiple of {POOL}")
    return options, requests, Share.of(trace, taken, requests)


def replay_on_ranks(options: ReplayOptions, call: Callable[[Communicator], Run]) -> list[Run]:
    """The results of `call` by rank. Errors that a user can fix are the same errors as with one rank."""
    try:
        return run_on_ranks(options, call)
    except RankError as error:
        if isinstance(error.__cause__, (MemoryError, InputError, RunError)):
            raise error.__cause__ from None
        if error.__cause__ is None:  # a rank that did not come
            raise RunError(str(error)) from None
        raise


def replay(
    options: ReplayOptions, requests: list[TraceRequest], progress: Progress, comm: Communicator | None = None
) -> Run:
    """Run, and show the progress of rank 0. Returns engine, steps and the seconds of warm-up and run."""
    start = time.perf_counter()
    warm_up(options, comm)
    warm_up_seconds = time.perf_counter() - start
    engine = Engine(options, requests, comm=comm)
    total = sum(request.total_length for request in requests)
    records = []
    start = time.perf_counter()
    for record in engine.steps():
        records.append(record)
        if comm is None or comm.rank == 0:
            scheduler = engine.scheduler
            done = sum(sequence.computed for sequence in (*scheduler.running, *scheduler.finished))
            what = (
                f"step {record.step}: {record.prefill_tokens} prefill, {record.decode_tokens} decode, "
                f"{record.waiting} waiting, cache {record.blocks_held / options.num_blocks:.0%}"
            )
            progress.update(what, done, total)
    return engine, records, warm_up_seconds, time.perf_counter() - start
