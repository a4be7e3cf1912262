"""Every backend that can run here against the reference, on small random cases of every op."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..dispatch import backends
from ..errors import InputError
from ..specs.self_test import CASES, Case, Outcome, check_case
from ..terminal import Progress, say
from .options import MAX_SEED, add_number

NUMBER_WIDTH = len("1.2e-05 of 1.2e-05")
CASE_WIDTH = 36
WHOLE_NAMES = 80  # columns of a terminal that names of operations fit as they are


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare every backend that can run here with the reference, on small random cases. "
        "Exit status 1 if a result is beyond its bounds."
    )
    names = [name for name in backends.BACKENDS if name != "reference"]
    parser.add_argument("--backend", choices=names, help="only this one")
    add_number(parser, "--seed", 0, MAX_SEED, "of the random numbers", default=0)
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    return run(Console(), None if args.backend is None else checked(args.backend), args.seed)


def checked(backend: str) -> str:
    """A backend that was asked for. Raises InputError with what it lacks."""
    reason = backends.unavailable(backend)
    if reason is not None:
        others = ", ".join(name for name in backends.available() if name != "reference")
        raise InputError(f"--backend {backend}: it cannot be checked here: {reason}; what can be checked: {others}")
    return backend


def run(console: Console, backend: str | None, seed: int) -> int:
    """Print the table. Returns the exit status: 1 if anything is off."""
    names = [name for name in backends.available() if name != "reference"] if backend is None else [backend]
    notes, failed = [], 0
    found: list[tuple[Case, list[Outcome]]] = []
    with Progress("checking") as progress:
        for number, case in enumerate(CASES):
            progress.update(f"{case.op} {case.variant}".strip(), number, len(CASES))
            outcomes = [outcome_of(case, name, seed) for name in names]
            failed += sum(not outcome.passed for outcome in outcomes)
            notes += [
                f"{name}: {case.op} {case.variant}: {outcome.note}"
                for name, outcome in zip(names, outcomes, strict=True)
                if outcome.note
            ]
            found.append((case, outcomes))
    # Numbers are not split: a terminal too narrow for all backends gets a table for each.
    together = console.width >= CASE_WIDTH + (NUMBER_WIDTH + 3) * len(names)
    for columns in [range(len(names))] if together else [[i] for i in range(len(names))]:
        found_of_part = [(case, [outcomes[i] for i in columns]) for case, outcomes in found]
        console.print(_table([names[i] for i in columns], found_of_part, console.width >= WHOLE_NAMES))
    for note in notes:
        say(console, escape(note))
    if failed:
        console.print(
            f"[red]{failed} beyond bounds[/red]: do not use these backends here; please report the lines above"
        )
    else:
        console.print(f"[green]all within bounds[/green] on {', '.join(names)}")
    return 1 if failed else 0


def outcome_of(case: Case, backend: str, seed: int) -> Outcome:
    """The outcome of a case; an error of the backend is one, too. A lack of memory is not: it is raised."""
    try:
        return check_case(case, backend, seed, case.heads)
    except MemoryError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Outcome(False, None, f"{type(error).__name__}: {lines[0]}")


def _table(names: Sequence[str], found: Sequence[tuple[Case, Sequence[Outcome]]], whole_names: bool) -> Table:
    table = Table(
        title="Largest error against the reference, and what is allowed there", title_justify="left",
        caption="0: equal, as maps, bytes and gathered values must be. -: the backend does not have the op.",
        caption_justify="left",
    )  # fmt: skip
    table.add_column("op", overflow="fold", no_wrap=whole_names)
    table.add_column("case", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, min_width=NUMBER_WIDTH)
    for case, outcomes in found:
        table.add_row(case.op, case.variant, *(_cell(outcome) for outcome in outcomes))
    return table


def _cell(outcome: Outcome) -> str:
    if outcome.error is None:
        return "-" if outcome.passed else "[red]error[/red]"
    text = f"{outcome.error:.2g}" + (f" of {outcome.allowed:.2g}" if outcome.allowed else "")
    return f"[green]{text}[/green]" if outcome.passed else f"[red]{text}[/red]"
