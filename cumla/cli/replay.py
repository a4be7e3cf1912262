"""`cumla replay`: options in, progress while it runs, tables and files out."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..errors import InputError, RunError
from ..parallel import Communicator, RankError
from ..replay.engine import Engine, StepRecord, warm_up
from ..replay.models import POOL
from ..replay.options import (
    LAYER_RATIOS,
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
from ..replay.trace import Share, TraceRequest, in_order, requests_of
from ..terminal import Progress, say
from ..timing import limit_blas_threads
from . import inapplicable
from .files import STDOUT, check_outputs
from .info import describe_machine

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
    if options.ranks > 1 and options.batch_invariant:
        raise InputError("--batch-invariant: got it with --ranks, expected one device")
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
