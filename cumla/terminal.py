"""What commands print in addition to tables: lines wrapped between words, and progress on stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from rich import progress as bars
from rich.console import Console
from rich.table import Column

FIRST_SECONDS, LINE_SECONDS = 1.0, 5.0  # until the first line of progress, and between lines, without a terminal
TIME_WIDTH = len("0:00:00")


def say(console: Console, text: str) -> None:
    """Print a line that may contain markup: wrapped between words in a terminal, unchanged in a file or a pipe."""
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows on stderr what a command is doing, from the start of the context to its end.

    A terminal gets a bar; elsewhere there is a line after FIRST_SECONDS, and then every LINE_SECONDS.
    """

    def __init__(self, what: str) -> None:
        self._state: tuple[str, int, int | None] = (what, 0, None)
        self._begun, self._over = time.perf_counter(), threading.Event()
        console = Console(stderr=True)
        self._bar = _bar(console) if console.is_interactive else None
        self._task = bars.TaskID(0)
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Progress:
        if self._bar is None:
            self._lines.start()
        else:
            self._task = self._bar.add_task(self._state[0], total=None)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is None:
            self._over.set()
            self._lines.join()
        else:
            self._bar.stop()

    def update(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Show that the command does `what` now, and how much of its total is done."""
        self._state = what, done, total
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done, total=total)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context without the bar, for results that are printed to the same terminal."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def _print_lines(self) -> None:
        seconds = FIRST_SECONDS
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            while not self._over.wait(seconds):
                what, done, total = self._state
                share = "" if total is None else f"{done / total:.0%}, "
                print(f"{share}{time.perf_counter() - self._begun:.0f} s, {what}", file=sys.stderr, flush=True)
                seconds = LINE_SECONDS


def _bar(console: Console) -> bars.Progress:
    """A bar that shortens its description to fit the terminal, never a number."""
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False, table_column=Column(ratio=3, no_wrap=True)),
        bars.BarColumn(bar_width=None, table_column=Column(ratio=1)),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(table_column=Column(min_width=TIME_WIDTH, no_wrap=True)),
        bars.TimeRemainingColumn(table_column=Column(min_width=TIME_WIDTH, no_wrap=True)),
        console=console,
        transient=True,
        expand=True,
        redirect_stdout=False,  # else results would go to stderr
        refresh_per_second=2,  # seldom, because the bar is drawn while calls are timed
    )
