"""Every backend that can run here against the reference, on small random cases of every op."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..checks import CASES, Outcome, check_case
from ..dispatch import backends


def run(console: Console, backend: str | None, seed: int) -> int:
    """Print the table. Returns the exit status: 1 if anything is off."""
    names = [name for name in backends.available() if name != "reference"] if backend is None else [backend]
    table = Table(
        title="Largest error against the reference", title_justify="left", caption_justify="left",
        caption="0: equal, as maps, bytes and gathered values must be. -: the backend does not have the op.",
    )  # fmt: skip
    for column in ("op", "case"):
        table.add_column(column, overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    notes, failed = [], 0
    with console.status("checking"):
        said = time.perf_counter()
        for number, case in enumerate(CASES):
            if not console.is_terminal and time.perf_counter() - said > 5:
                said = time.perf_counter()
                print(f"{number} of {len(CASES)} cases checked", file=sys.stderr)
            outcomes = [check_case(case, name, seed, case.heads) for name in names]
            failed += sum(not outcome.passed for outcome in outcomes)
            notes += [
                f"{name}: {case.op} {case.variant}: {outcome.note}"
                for name, outcome in zip(names, outcomes, strict=True)
                if outcome.note
            ]
            table.add_row(case.op, case.variant, *(_cell(outcome) for outcome in outcomes))
    console.print(table)
    for note in notes:
        console.print(escape(note), highlight=False, soft_wrap=True)
    console.print(f"[red]{failed} beyond bounds[/red]" if failed else "[green]all within bounds[/green]")
    return 1 if failed else 0


def _cell(outcome: Outcome) -> str:
    if outcome.passed:
        return "-" if outcome.error is None else f"[green]{outcome.error:.2g}[/green]"
    return "[red]error[/red]" if outcome.error is None else f"[red]{outcome.error:.2g} failed[/red]"
