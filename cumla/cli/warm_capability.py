"""`cumla warmup --capability 8.6`: which kernels serving takes on a device of this compute capability, without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..dispatch.dry_run import dry_running
from ..errors import InputError
from ..ops.support import assumed_capability, kernels_asked, shown_capability
from ..terminal import say
from .selection_calls import call_all, selection_calls
from .served_model import Model
from .serving_calls import compressor_calls, pooled_key_calls, sparse_calls

BACKEND = "cuda"


def run(console: Console, model: Model, batches: Sequence[int], block_size: int, capability: str) -> int:
    """Print the kernels of each call of a step. Returns 0; raises InputError for a capability that is not known."""
    found: dict[str, dict[str, None]] = {}  # calls by their kernels
    try:
        with assumed_capability(capability) as limits, dry_running(0, anywhere=True) as dry_run:
            for name, call in _calls(model, batches, block_size):
                dry_run.asked.clear()
                call()
                for kernel in kernels_asked(dry_run, BACKEND, 0):
                    found.setdefault(kernel, {})[name] = None
    except ValueError as error:
        raise InputError(f"--{error}") from None
    title = f"{model.kind} on compute capability {shown_capability(limits.capability)}"
    table = Table("kernel", "calls", title=title, title_justify="left")
    for kernel, names in found.items():
        table.add_row(kernel, ", ".join(names))
    console.print(table)
    say(console, "Nothing was compiled: kernels are kept by device and compiler. `cumla warmup` there compiles them.")
    return 0


def _calls(model: Model, batches: Sequence[int], block_size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls by operation."""
    if model.has_window and model.kind == "v4":
        yield from compressor_calls(BACKEND)
    if model.pool > 1:
        yield from pooled_key_calls(model, BACKEND)
    if model.kind != "mla":
        for batch in batches:
            yield from sparse_calls(model, batch, block_size, BACKEND)
        yield "selection", functools.partial(call_all, selection_calls(model, max(batches), BACKEND))
