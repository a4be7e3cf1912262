"""Checks of one kind of value: slots, pages, indices, lengths, positions. They wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np

UNBOUNDED = 2**31 - 1  # no length is more
MOST_SCALE = 4.5  # of a softmax, in units of 1 / sqrt(head_dim)


def host(array: Any) -> np.ndarray:
    """An array's values, integers as int64."""
    values = array if isinstance(array, np.ndarray) else array.get()
    return values.astype(np.int64) if values.dtype.kind in "iu" else values


def check_equal(name: str, array: Any, twin_name: str, twin: np.ndarray) -> None:
    """Raise ValueError where an array of a batch differs from its copy in host memory."""
    got = host(array)
    r = int(np.argmax(got != twin)) if (got != twin).any() else -1
    if r >= 0:
        raise ValueError(f"{name}: request {r} has {got[r]}, but {twin[r]} in {twin_name}")


def check_slots(
    name: str, slots: Any, num_slots: int | None, positions: Any = None, requests: np.ndarray | None = None
) -> None:
    """Raise ValueError for a slot that is neither -1 nor in the cache, and for a slot that two rows have."""
    values = host(slots)

    def row(i: int) -> str:
        where = [] if requests is None else [f"request {requests[i]}"]
        where += [] if positions is None else [f"position {host(positions)[i]}"]
        return f"row {i}" + (f" ({', '.join(where)})" if where else "")

    last = np.iinfo(np.int64).max if num_slots is None else num_slots - 1
    wrong = (values < -1) | (values > last)
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = "-1 or a slot" if num_slots is None else f"-1 or 0 to {last}"
        raise ValueError(f"{name}: {row(at)} has slot {values[at]}, expected {expected}")
    order = np.argsort(values, kind="stable")
    again = np.flatnonzero((np.diff(values[order]) == 0) & (values[order][1:] >= 0))
    if len(again):
        one, other = order[again[0] : again[0] + 2].tolist()
        raise ValueError(
            f"{name}: {row(one)} and {row(other)} both have slot {values[one]}, expected slots that differ"
        )


def check_pages(
    name: str, block_table: Any, begin: Any, end: Any, block_size: int, num_pages: int | None = None, first: int = 0
) -> None:
    """Raise ValueError where a request has no page of the cache for one of its positions from begin[r] to end[r] - 1.

    Args:
        num_pages: of the cache; None: unknown, any index that is not negative is a page
    """
    table, begin, end = host(block_table), np.maximum(begin, 0)[:, None], np.asarray(end)[:, None]
    columns = table.shape[1]
    begin, covered = np.broadcast_to(begin, end.shape), columns * block_size
    beyond = (end[:, 0] > covered) & (end[:, 0] > begin[:, 0])
    if beyond.any():
        long = int(np.argmax(beyond))
        raise ValueError(
            f"{name}: request {first + long} has positions {begin[long, 0]} to {end[long, 0] - 1}, but "
            f"{columns} columns of {block_size} cover {covered}"
        )
    column = np.arange(columns)
    used = (end > begin) & (column >= begin // block_size) & (column * block_size < end)
    wrong = used & ((table < 0) | (table >= (np.iinfo(np.int64).max if num_pages is None else num_pages)))
    if wrong.any():
        r, c = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        position = max(int(begin[r, 0]), int(c) * block_size)
        expected = "a page" if num_pages is None else f"0 to {num_pages - 1}"
        raise ValueError(
            f"{name}: request {first + int(r)} has page {table[r, c]} for position {position} (column {c}), "
            f"expected {expected}"
        )


def check_cached(arguments: Any, begin: Any, end: Any) -> None:
    """The same for the cache whose pages and block table a call has."""
    begin, pages = np.broadcast_to(begin, np.shape(end)), arguments.pages
    check_pages("block_table", arguments.block_table, begin, end, pages.block_size, len(pages.bytes), arguments.first)


def check_indices(name: str, indices: Any, used: Any, limit: int, what: str = "query") -> np.ndarray:
    """Raise ValueError for an entry in use that is neither -1 nor below a limit; the indices [rows, entries].

    Args:
        used: [rows] the number of first entries in use, or [rows, entries] bool
    """
    values = host(indices)
    used = np.asarray(used)
    if used.dtype != np.bool_:
        used = np.arange(values.shape[1]) < used[:, None]
    wrong = used & ((values < -1) | (values >= limit))
    if wrong.any():
        i, entry = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ValueError(f"{name}: {what} {i}, entry {entry}: got {values[i, entry]}, expected -1 or 0 to {limit - 1}")
    return values


def check_mapped(
    name: str, indices: Any, used: Any, requests: np.ndarray, table_name: str, block_table: Any, block_size: int
) -> None:
    """The same for rows of requests, which must also have a page; one request for each token, or more."""
    table, requests = host(block_table), requests[: len(indices)]
    values = check_indices(name, indices, used, table.shape[1] * block_size, "token")
    used = used if used.dtype == np.bool_ else np.arange(values.shape[1]) < used[:, None]
    used = used & (values >= 0)
    if not used.any():
        return
    column = np.where(used, values // block_size, 0)
    pages = table[np.where(used.any(axis=1), requests, 0)[:, None], column]
    wrong = used & (pages < 0)
    if wrong.any():
        i, entry = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ValueError(
            f"{table_name}: request {requests[i]} has page {pages[i, entry]} for row {values[i, entry]} "
            f"(column {column[i, entry]}), which entry {entry} of token {i} in {name} selects, expected a page"
        )


def checked_requests(token_to_req: Any, valid: np.ndarray, num_reqs: int, first: int = 0) -> np.ndarray:
    """The request of each token. Raises ValueError for a valid token whose request does not exist."""
    requests = host(token_to_req)[first : first + len(valid)]
    wrong = valid & ((requests < 0) | (requests >= num_reqs))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"token_to_req_indices: token {first + i} is of request {requests[i]}, expected 0 to {num_reqs - 1}"
        )
    return requests


def last_positions(
    query_start_loc: Any, seq_lens: Any, tokens: int = UNBOUNDED
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each request's first query token, and the first and end of its positions in this step.

    Raises ValueError for starts that descend or are beyond the step's tokens, and for a sequence shorter than its
    query.
    """
    starts = check_packed("query_start_loc", query_start_loc, tokens, "tokens")
    queries = np.diff(starts)
    lens = check_range("seq_lens", seq_lens, queries)
    return starts, np.where(queries > 0, lens - queries, lens), lens


def check_range(
    name: str, values: Any, least: Any = 0, most: Any = UNBOUNDED, of: str = "request", first: int = 0
) -> np.ndarray:
    """Raise ValueError for a length out of range; the lengths, [n] or [n, queries].

    Args:
        least, most: a number, or one for each entry
        first: number of the first entry
    """
    got = host(values)
    least, most = np.broadcast_to(least, got.shape), np.broadcast_to(most, got.shape)
    wrong = (got < least) | (got > most)
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        query = f"query {at[1]} of " if got.ndim > 1 and got.shape[1] > 1 else ""
        expected = f"{least[at]} to {most[at]}" if most[at] < UNBOUNDED else f"at least {least[at]}"
        raise ValueError(f"{name}: {query}{of} {first + int(at[0])} has {got[at]}, expected {expected}")
    return got


def check_packed(name: str, starts: Any, rows: int, of: str) -> np.ndarray:
    """Raise ValueError for bounds of packed sequences that descend or are beyond the rows; the bounds."""
    got = check_range(name, starts, 0, rows, "entry")
    falls = np.diff(got) < 0
    if falls.any():
        i = int(np.argmax(falls))
        raise ValueError(f"{name}: entry {i + 1} has {got[i + 1]} after {got[i]}, expected ascending rows of {of}")
    return got


def check_positions(
    arguments: Any, table: Any, slots: Any = None, name: str = "cos_sin_cache", all_read: bool = True
) -> None:
    """Raise ValueError for a position without a row in RoPE's table: -1 is a padding token, which has no slot.

    Args:
        all_read: False: only positions of rows with a slot are checked
    """
    at, rows = host(arguments.positions), len(table)
    written = np.zeros(len(at), np.bool_)
    if slots is not None:
        written[: len(slots)] = host(slots) >= 0
    wrong = ((at < -1) | (at >= rows)) & (written | all_read) | written & (at < 0)
    if wrong.any():
        i = int(np.argmax(wrong))
        padding = "" if written[i] else ", or -1 for padding"
        raise ValueError(f"positions: token {i} has {at[i]}, expected 0 to {rows - 1}, a row of {name}{padding}")


def check_scale(softmax_scale: float, head_dim: int) -> None:
    """Raise ValueError for a scale of the softmax that no model has: YaRN's reach 4.2 / sqrt(head_dim)."""
    most = MOST_SCALE * head_dim**-0.5
    if not 0 < softmax_scale <= most:
        raise ValueError(
            f"softmax_scale: got {softmax_scale:g}, expected more than 0 and at most {most:.3g}, {MOST_SCALE:g} / "
            f"sqrt({head_dim})"
        )


def check_complete(name: str, indices: np.ndarray, used: np.ndarray, complete: np.ndarray) -> None:
    """Raise ValueError for a token that selects rows, but none of those that are complete at its position, as where
    slots are given for rows.

    Args:
        indices, used: [tokens, entries], and which of them count
        complete: [tokens] number of complete rows
    """
    selected = used & (indices >= 0)
    none = selected.any(axis=1) & (complete > 0) & ~(selected & (indices < complete[:, None])).any(axis=1)
    if none.any():
        i = int(np.argmax(none))
        entry = int(np.argmax(selected[i]))
        raise ValueError(
            f"{name}: token {i} selects no complete row: entry {entry} is {indices[i, entry]}, expected an entry among "
            f"its rows 0 to {complete[i] - 1}"
        )


def rows_complete(query_start_loc: Any, seq_lens: Any, first: int, tokens: int, ratio: int) -> np.ndarray:
    """The number of complete rows of its request at each token from `first` on; 0 for a token of no request."""
    starts, begin, _ = last_positions(query_start_loc, seq_lens)
    at = first + np.arange(tokens)
    request = np.searchsorted(starts, at, side="right") - 1
    inside = (request >= 0) & (request < len(begin))
    request = np.where(inside, request, 0)
    position = begin[request] + at - starts[request] if len(begin) else at
    return np.where(inside, np.maximum(position + 1, 0) // ratio, 0)
