"""Block tables of requests, compared with what the requests need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..dispatch import debug
from ..dispatch.values import check_kind
from .description import Description, Group, Missing

SWAPPED_OUT = -2  # and below: page -2 - entry of a host pool
INTEGERS = "iu"


def missing(
    description: Description, tables: Mapping[str, Any], seq_lens: Any, query_lens: Any = None,
    num_pages: Mapping[str, int] | None = None,
) -> list[Missing]:  # fmt: skip
    """The pages that requests need for their next step and do not have. Arrays on a device are copied to the host.

    Args:
        tables: by group, integers [R, B], pages of each request in the order of their positions; of rings [R] or [R,
            1]. An entry of -1 is an absent page, -2 - p is swapped out to page p of a host pool
        seq_lens: [R] tokens of each request, those of the step included
        query_lens: [R] tokens of the step, for which pages must be present, too; None: none
        num_pages: by group, pages of its pools; None: entries that are not negative are pages

    Raises TypeError or ValueError for tables and lengths that do not fit.
    """
    check_kind(Description, description=description)
    check_kind(Mapping, tables=tables)
    names = [group.name for group in description]
    if set(tables) != set(names):
        raise ValueError(f"tables: got {', '.join(map(str, tables))}, expected one for each of {', '.join(names)}")
    lens = _numbers("seq_lens", seq_lens, 1)
    new = np.zeros_like(lens) if query_lens is None else _numbers("query_lens", query_lens, 1)
    if len(new) != len(lens) or (new < 0).any() or (new > lens).any():
        raise ValueError(f"query_lens: got {new.tolist()}, expected 0 to {lens.tolist()}, as seq_lens has")
    found = []
    for group in description:
        table = _numbers(f"tables[{group.name!r}]", tables[group.name], 1 if group.tokens else None)
        table = table[:, None] if table.ndim == 1 else table
        if table.ndim != 2 or len(table) != len(lens):
            raise ValueError(f"tables[{group.name!r}]: got shape {table.shape}, expected a row for each of {len(lens)}")
        most = (num_pages or {}).get(group.name, np.iinfo(np.int64).max)
        for request, (length, added) in enumerate(zip(lens.tolist(), new.tolist(), strict=True)):
            found += _missing_of(group, request, table[request], length, added, most)
    return sorted(found)


def _missing_of(group: Group, request: int, row: np.ndarray, length: int, added: int, most: int) -> list[Missing]:
    """The absent pages of one request in one group."""
    if not length:
        return []
    part, found = group.part(length - added), []
    columns = group.pages(length, added) if added or group.tokens else part.pages
    for column in columns:
        page = int(row[column]) if column < len(row) else -1
        if not 0 <= page < most:
            found.append(Missing(request, group.name, column, max(part.first, column * group.tokens), page))
    return found


def check_tables(
    description: Description, tables: Mapping[str, Any], seq_lens: Any, query_lens: Any = None,
    num_pages: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Within `cumla.debug`, raise ValueError for a request whose needed pages are absent or swapped out.

    The arguments are as of `missing`. Outside of `cumla.debug` nothing is read, and no call waits for a
    device.
    """
    if not debug.is_on():
        return
    found = missing(description, tables, seq_lens, query_lens, num_pages)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(f"tables: {found[0]}{more}")


def _numbers(name: str, value: Any, axes: int | None) -> np.ndarray:
    """Integers on the host, as int64. axes: the least number of axes; None: 1 or 2."""
    if isinstance(value, Sequence):
        value = np.asarray(value)
    native = dlpack.borrow(value, name)
    array: np.ndarray = native if isinstance(native, np.ndarray) else native.get()
    if array.dtype.kind not in INTEGERS:
        raise TypeError(f"{name}: got dtype {array.dtype}, expected integers")
    if not array.ndim or (axes is not None and array.ndim < axes):
        raise ValueError(f"{name}: got shape {array.shape}, expected at least {axes or 1} axes")
    return array.astype(np.int64)
