"""`cumla warmup`: what serving will call is compiled, tested and kept on disk before it is called."""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from ..dispatch import backends
from ..dispatch.kernel_check import run_pending
from ..errors import InputError, RunError
from ..kernels.check_results import (
    NOT_REACHED,
    RESULTS,
    RIGHT,
    SAVED,
    UNSAVED,
    VARIABLE,
    MiscompiledError,
    note_unsaved,
)
from ..layers.prefill_path import PATHS
from ..layout import DSV4_FP8
from ..replay.engine import warm_up
from ..replay.options import (
    FORMATS,
    V41_CACHE_FORMATS,
    V41_LAYOUT,
    V41_RATIOS,
    WARM_KINDS,
    ReplayOptions,
    choose_backend,
)
from ..specs.self_test import CASES, Case
from ..terminal import Progress, say
from . import inapplicable, warm_capability
from .options import MAX_BATCH, add_model, add_number
from .selection_calls import Thunk, call_all, find_needed, selection_calls
from .served_model import Model
from .serving_calls import compressor_calls, decodes_of_any_number, norm_calls, pooled_key_calls, sparse_calls

MAX_REPLAYED_TOKENS = 512
FOLDERS = "NUMBA_CACHE_DIR, or for CUDA CUPY_CACHE_DIR"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compile the kernels that serving needs into the caches on disk, and test each against the "
        "reference. A later process then starts warm: it compiles, tests and waits for nothing. "
        "Exit status 1 if a compiled kernel gives wrong results; the message names it and says what to do."
    )
    model = add_model(parser, WARM_KINDS)
    model.add_argument(
        "--layout", choices=list(FORMATS), metavar="FORMAT[,FORMAT]",
        help=f"formats of v4's or v41's caches, as of cumla replay: {'; '.join(FORMATS)} (default: DSV4_FP8, of v41 "
        f"{V41_LAYOUT})",
    )  # fmt: skip
    model.add_argument("--batch-invariant", action="store_true", help="of a model served with batch_invariant=True")
    add_number(parser, "--batch", 1, MAX_BATCH, "requests of a step", default=[1, 8, 32, 128])
    add_number(parser, "--block-size", 1, 2**16, "tokens of a page", unit="TOKENS", default=64)
    parser.add_argument("--backend", choices=["cpu", "cuda"], help="default: cuda if there is a device, else cpu")
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="list the kernels that a device of this compute capability gets; compiles nothing, needs no such device",
    )
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    model = Model(args.kind, args.heads, args.topk)
    if args.config is None:
        inapplicable.refuse(args, ["--ranks"], "without --config, whose heads are sharded across ranks")
    else:
        inapplicable.refuse(args, ["--kind", "--heads", "--topk"], "with --config, which sets it")
        model = Model.from_config(args.config, args.ranks)
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
        inapplicable.refuse(args, ["--backend"], "with --capability, which lists kernels of cuda")
        return warm_capability.run(Console(), model, args.batch, args.block_size, args.capability)
    return run(Console(), model, args.batch, args.block_size, choose_backend(args.backend))


def tasks(
    model: Model, batches: Sequence[int], block_size: int, backend: str
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls by name."""
    calls: Iterable[Thunk] = ()
    if model.kind != "mla":
        calls = selection_calls(model, max(batches), backend)
        if backend == "cuda":  # one call for each kernel, compiled by threads while the tasks in between run
            needed: list[Thunk] = []
            yield "kernels of selections of every size, begun", functools.partial(find_needed, calls, needed)
            calls = needed
    for case in CASES:
        if model.needs(case):
            yield f"{case.op} {case.variant}".strip(), functools.partial(run_case, case, backend, model.heads)
    if model.has_window:
        if model.formats[0] is DSV4_FP8:
            yield from compressor_calls(backend)
        yield from norm_calls(model, block_size, backend)
    if model.pool > 1:
        yield from pooled_key_calls(model, backend)
    if model.kind != "mla":
        for batch in batches:
            for name, call in sparse_calls(model, batch, block_size, backend):
                yield f"{name}, {batch} requests", call
        if backends.takes_device_arrays(backend):
            most = max(batches)
            yield f"decodes of 1 to {most} requests", functools.partial(decodes_of_any_number, model, most, backend)
        yield "selections of every size", functools.partial(call_all, calls)
    if model.kind == "v41":
        yield f"a step of {', '.join(V41_RATIOS)} layers", functools.partial(warm_up, v41_options(model, backend))
    elif model.kind not in ("v32", "glm5_next"):
        layers = ("mla",) if model.kind == "mla" else ("swa", "c4a", "c128a")
        for prefill_path in PATHS if model.kind == "v4" and not model.batch_invariant else (None,):
            options = ReplayOptions(
                backend, layers, model.heads, model.window, model.topk, MAX_REPLAYED_TOKENS, 1 << 14, 1152, 0,
                layout=model.layout, prefill_path=prefill_path, batch_invariant=model.batch_invariant,
            )  # fmt: skip
            name = f"a step of {', '.join(layers)} layers, prefill over {prefill_path or 'keys'}"
            yield name, functools.partial(warm_up, options)
    yield "self-tests of kernels that only self-tests called", run_pending


def v41_options(model: Model, backend: str) -> ReplayOptions:
    """A replay of small layers: kernels do not depend on the size of hidden states."""
    return ReplayOptions(
        backend, tuple(V41_RATIOS), model.heads, model.window, model.topk, MAX_REPLAYED_TOKENS, 1 << 14, 1152, 0,
        v41_layout=model.layout, tiny=True, batch_invariant=model.batch_invariant,
    )  # fmt: skip


def run_case(case: Case, backend: str, heads: int) -> None:
    """A case of `cumla check` where the backend has the operation."""
    try:
        backends.kernels(backend, case.kernels)
    except ValueError:
        return
    case.run(backend, 0, heads)


def run(console: Console, model: Model, batches: Sequence[int], block_size: int, backend: str) -> int:
    """Call everything once. Returns 0; raises RunError where a kernel gives wrong results or cannot be kept on disk."""
    formats = "" if model.layout == DSV4_FP8.name else f", {model.layout.replace(',', ' and ')}"
    console.print(f"{model.kind}{formats}, {model.heads} heads, backend {backend}", highlight=False)
    start, slowest, count = time.perf_counter(), 0.0, 0
    with Progress("compiling kernels") as progress:
        for name, call in tasks(model, batches, block_size, backend):
            progress.update(name)
            before = time.perf_counter()
            try:
                call()
            except MiscompiledError as error:
                raise RunError(str(error)) from None
            except OSError as error:  # CuPy's, for its folder
                note_unsaved(str(error))
            check_saved(name)
            seconds, count = time.perf_counter() - before, count + 1
            slowest = max(slowest, seconds)
            if seconds > 0.1:  # what was there already is not worth a line
                with progress.paused():
                    say(console, f"{seconds:6.2f} s  {name}")
    seconds = time.perf_counter() - start
    say(console, f"{count} calls in {seconds:.1f} s, the slowest {slowest:.2f} s. {found()}")
    return 0


def check_saved(name: str) -> None:
    """Raise RunError if the code of a call, or the result of its test, is not on disk: the next ones would not be."""
    if UNSAVED:
        raise RunError(
            f"{name}: compiled kernels cannot be kept, so that every process would compile them again "
            f"({'; '.join(UNSAVED)}). Set {FOLDERS}, to a folder that can be written"
        )


def found() -> str:
    """What became of the kernels, in a sentence."""
    if os.environ.get(VARIABLE) == "0":
        return f"Kernels were not tested ({VARIABLE}=0)"
    cached, right, missed = (RESULTS[key] for key in (SAVED, RIGHT, NOT_REACHED))
    if not right + missed:
        return f"All {cached} kernels were in the cache"
    return (
        f"{right + missed} kernels were compiled: {right} tested and right, {missed} not reached by a small case; "
        f"{cached} were in the cache"
    )
