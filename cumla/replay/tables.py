"""Numeric tables that fit the terminal: a wide table is printed in parts, and no number is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

GAP = 2  # spaces between columns, and at both edges of a table together


@dataclass
class NumberTable:
    """A table whose first column is text and whose other columns are numbers.

    Attributes:
        attached: indices of columns that stay with the column before
    """

    title: str
    columns: Sequence[str]
    caption: str | None = None
    attached: Sequence[int] = ()
    rows: list[tuple[Sequence[str], bool]] = field(default_factory=list)

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        self.rows.append((cells, end_section))

    def print(self, console: Console) -> None:
        """Print the table, in several parts if the terminal is too narrow for its numbers."""
        parts = self._parts(console.width)
        for number, part in enumerate(parts):
            console.print(self._drawn(part, console.width, number == 0, number == len(parts) - 1))

    def _widths(self, column: int) -> tuple[int, int]:
        """The widths at which no number or word is split, and at which no line is broken."""
        cells = [cells[column] for cells, _ in self.rows]
        least = self.columns[column].split() + (cells if column else [word for cell in cells for word in cell.split()])
        return max(map(cell_len, (*least, ""))), max(map(cell_len, (self.columns[column], *cells)))

    def _least(self, column: int) -> int:
        return self._widths(column)[0]

    def _parts(self, width: int) -> list[list[int]]:
        """Indices of the columns of each part; every part has the first column."""
        first, parts = self._least(0) + GAP, list[list[int]]()
        left = 0
        starts = [column for column in range(1, len(self.columns)) if column not in self.attached]
        for start, end in zip(starts, [*starts[1:], len(self.columns)], strict=True):
            columns = list(range(start, end))
            needed = sum(self._least(column) + GAP for column in columns)
            if not parts or needed > left:
                parts.append([0])
                left = width - GAP - first
            parts[-1] += columns
            left -= needed
        return parts

    def _drawn(self, part: Sequence[int], width: int, is_first: bool, is_last: bool) -> Table:
        table = Table(
            title=self.title if is_first else None, title_justify="left", caption=self.caption if is_last else None,
            caption_justify="left", box=box.HORIZONTALS, pad_edge=False, collapse_padding=True,
        )  # fmt: skip
        left = width - GAP - sum(self._least(column) + GAP for column in part)
        for column in part:
            least, widest = self._widths(column)
            extra = min(max(0, left), widest - least)
            left -= extra
            heading, cell_width = self.columns[column], least + extra
            table.add_column(heading, justify="right" if column else "left", width=cell_width, overflow="fold")
        for cells, end_section in self.rows:
            table.add_row(*(cells[column] for column in part), end_section=end_section)
        return table
