"""Checks of `cumla.debug` for kernels of advanced steps."""

from __future__ import annotations

from typing import Any

from .values import check_pages, check_range


def advance_step(arguments: Any) -> None:
    lens = check_range("seq_lens", arguments.seq_lens[: arguments.num_queries])
    check_pages("block_tables", arguments.block_tables[: arguments.num_queries], lens, lens + 1, arguments.block_size)
