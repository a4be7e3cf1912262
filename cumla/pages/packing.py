"""A request as one array: rows by token, so that page numbers and page sizes of the receiver do not matter.

The array has for every group, cache and layer in the description's order the needed rows, then their scales where the
format keeps these at the page's end. Each of these parts begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dlpack
from ..dispatch.values import check_integers, check_kind, shown
from ..ops.spans import copy_spans
from .description import VERSION, Description, Group, PagedCache
from .pools import Pool, Pools, align
from .tables import missing

FORMAT = "cumla.pages"
FIELDS = ("format", "version", "model", "digest", "tokens", "bytes", "ranks", "rank", "interleave", "caches")


class _Section(NamedTuple):
    """The rows of one cache of one layer in the array: rows [first, end), rows at byte `rows`, scales at `tails`."""

    pool: int
    group: Group
    cache: PagedCache
    first: int
    end: int
    rows: int
    tails: int


def pack(
    pools: Pools, tables: Mapping[str, Any], tokens: int, *, out: Any = None, backend: str | None = None,
    stream: Any = None,
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """Copy what a request of n tokens needs into one array, by one launch; no call waits for the device.

    Args:
        pools: the model's pages
        tables: by group, the request's pages: integers [B] on the host; of rings [1] or a number
        tokens: n: positions 0 to n - 1 are computed
        out: uint8 [bytes] to write instead of allocating, where the pools are or in a host pool; at least
            `packed_size` bytes

    Returns the header, a dictionary of plain values for JSON, and uint8 [header["bytes"]]. The header has no checksum
    until `verify` computes it. Raises ValueError for a page that is absent.
    """
    check_kind(Pools, pools=pools)
    description = pools.description
    check_integers(1, tokens=tokens)
    sections, size = _sections(description, int(tokens))
    columns = _columns(pools, tables, int(tokens))
    array = _packed_array(out, size, pools)
    copy_spans(pools.arrays, [array[None]], _spans(pools, sections, columns, True), backend=backend, stream=stream)
    return _header(description, int(tokens), size), array


def packed_size(description: Description, tokens: int) -> int:
    """Bytes of the array of a request of n tokens."""
    return _sections(description, tokens)[1]


def unpack(
    header: Mapping[str, Any] | str | bytes, array: Any, pools: Pools, tables: Mapping[str, Any], *,
    backend: str | None = None, stream: Any = None,
) -> int:  # fmt: skip
    """Copy a packed request into pages of this model's pools, by one launch; page sizes may differ from the sender's.

    Args:
        header: of `pack`, as a dictionary or as JSON
        array: uint8 [bytes], where the pools are or in a host pool
        tables: by group, the request's pages, as of `pack`; every page that the request needs must be present

    Returns the number of tokens. Raises TypeError or ValueError, before anything is written, for a header of another
    version, model, format, rank or size, an array of another size, and a page that is absent. Formats are never
    converted. The array's content is not read: `verify` compares it with a checksum.
    """
    check_kind(Pools, pools=pools)
    given = _parsed(header)
    tokens = _checked(given, pools.description)
    sections, size = _sections(pools.description, tokens)
    native = _bytes_of(array, int(given["bytes"]))
    if size != given["bytes"]:
        raise ValueError(f"header: got bytes {given['bytes']}, expected {size} for {tokens} tokens")
    columns = _columns(pools, tables, tokens)
    copy_spans([native[None]], pools.arrays, _spans(pools, sections, columns, False), backend=backend, stream=stream)
    return tokens


def verify(header: Mapping[str, Any] | str | bytes, array: Any) -> dict[str, Any]:
    """The header with the checksum of the array. The only call that waits for the device and reads the array.

    Raises ValueError if the header has a checksum, and the array has another one; or for an array of another size.
    """
    given = _parsed(header)
    native = _bytes_of(array, given["bytes"])
    host = native if isinstance(native, np.ndarray) else native.get()
    found = zlib.crc32(np.ascontiguousarray(host).data)
    if given.get("checksum") not in (None, found):
        raise ValueError(f"array: got checksum {found}, expected {given['checksum']} as the header has")
    return {**given, "checksum": found}


def spans(pools: Pools, tables: Mapping[str, Any], tokens: int, peer: Description) -> list[tuple[int, int]]:
    """Addresses and bytes of the whole pages that a request of n tokens needs, for NIXL, Mooncake or LMCache.

    The receiver's list for its own pools and tables has the same order and sizes. Whole pages are moved, so that both
    sides must have pages of equal sizes: raises ValueError unless `peer`, the receiver's description, has them. For
    pages of other sizes use `pack`, whose array is one span.
    """
    check_kind(Pools, pools=pools)
    check_kind(Description, peer=peer)
    check_integers(1, tokens=tokens)
    if peer.digest != pools.description.digest:
        raise ValueError(f"peer: got digest {peer.digest}, expected {pools.description.digest}: another model")
    ours, theirs = (
        [(x.name, x.tokens, [(c.cache, c.layout, c.layers, c.page_bytes) for c in x.caches]) for x in made]
        for made in (pools.description, peer)
    )
    if ours != theirs:
        raise ValueError(
            "peer: got pages of other sizes or formats, expected equal pages, as whole pages are moved; pack moves rows"
        )
    columns, found = _columns(pools, tables, int(tokens)), []
    for pool in pools.pools:
        start, step = _address(pool.array), int(pool.array.strides[0])
        for column in pool.group.part(int(tokens)).pages:
            if _is_used(pool, column, int(tokens)):
                found.append((start + int(columns[pool.group.name][column]) * step, pool.cache.page_bytes))
    return found


def _is_used(pool: Pool, column: int, tokens: int) -> bool:
    """Whether a page has needed rows of this cache: caches of a group may have different rows of a page."""
    if not pool.group.tokens:
        return True
    first, end = pool.group.rows(pool.cache, tokens)
    return first < (column + 1) * pool.cache.rows and end > column * pool.cache.rows


def _sections(description: Description, tokens: int) -> tuple[list[_Section], int]:
    """The parts of the array, and its bytes."""
    found, at, number = [], 0, 0
    for group in description:
        for cache in group.caches:
            first, end = group.rows(cache, tokens)
            for _ in cache.layers:
                tails = align(at + (end - first) * cache.row_bytes)
                found.append(_Section(number, group, cache, first, end, at, tails))
                at = align(tails + (end - first) * cache.tail_bytes)
                number += 1
    return found, at


def _spans(pools: Pools, sections: list[_Section], columns: Mapping[str, np.ndarray], out: bool) -> np.ndarray:
    """Spans of all rows between pages and the array."""
    found = [np.zeros((0, 7), np.int64)]
    for section in sections:
        for page, row, count, done in _runs(section, columns[section.group.name]):
            cache = section.cache
            pieces = [(row * cache.row_bytes, section.rows + done * cache.row_bytes, count * cache.row_bytes)]
            if cache.tail_bytes:
                tails = cache.rows * cache.row_bytes + row * cache.tail_bytes
                pieces.append((tails, section.tails + done * cache.tail_bytes, count * cache.tail_bytes))
            for in_page, in_array, size in pieces:
                pages = [np.full_like(page, section.pool), page, in_page]
                packed = [np.zeros_like(page), np.zeros_like(page), in_array]
                found.append(np.stack([*pages, *packed, size] if out else [*packed, *pages, size], axis=1))
    return np.concatenate(found)


def _runs(section: _Section, pages: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Runs of neighbouring rows within pages: page, first row in it, rows, rows of the section before the run."""
    group, cache, first, end = section.group, section.cache, section.first, section.end
    if end <= first:
        return
    if cache.whole:
        yield pages[:1], np.zeros(1, np.int64), np.full(1, cache.rows), np.zeros(1, np.int64)
    elif not group.tokens:
        positions = np.arange(first, end)
        one = np.ones_like(positions)
        yield pages[0] * one, positions % cache.rows, one, positions - first
    else:
        columns = np.arange(first // cache.rows, -(-end // cache.rows))
        start, stop = np.maximum(columns * cache.rows, first), np.minimum((columns + 1) * cache.rows, end)
        yield pages[columns], start - columns * cache.rows, stop - start, start - first


def _columns(pools: Pools, tables: Mapping[str, Any], tokens: int) -> dict[str, np.ndarray]:
    """A request's pages by group. Raises ValueError for a needed page that is absent."""
    check_kind(Mapping, tables=tables)
    rows = {}
    for name, value in tables.items():
        row = np.atleast_1d(np.asarray(value))
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ValueError(f"tables[{name!r}]: got {row.dtype} of shape {row.shape}, expected integers [B]")
        rows[name] = row.astype(np.int64)
    found = missing(pools.description, {name: row[None] for name, row in rows.items()}, [tokens], None, pools.num_pages)
    if found:
        raise ValueError(f"tables: {found[0]}")
    return rows


def _packed_array(out: Any, size: int, pools: Pools) -> Any:
    if out is None:
        return dlpack.empty((size,), np.dtype(np.uint8), pools.pools[0].array)
    native = dlpack.borrow(out, "out", writable=True)
    if native.ndim != 1 or native.dtype != np.uint8 or len(native) < size:
        raise ValueError(f"out: got {native.dtype} of shape {native.shape}, expected uint8 of at least {size} bytes")
    return native[:size]


def _bytes_of(array: Any, size: int) -> Any:
    native = dlpack.borrow(array, "array")
    if native.ndim != 1 or native.dtype != np.uint8:
        raise ValueError(f"array: got {native.dtype} of shape {native.shape}, expected uint8 [{size}]")
    if len(native) != size:
        raise ValueError(f"array: got {len(native)} bytes, expected {size} as the header has")
    return native


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _header(description: Description, tokens: int, size: int) -> dict[str, Any]:
    group = description.groups[0]
    return {
        "format": FORMAT, "version": description.version, "model": description.model, "digest": description.digest,
        "tokens": tokens, "bytes": size, "ranks": group.ranks, "rank": group.rank, "interleave": group.interleave,
        "caches": _formats(description), "checksum": None, "byte_order": sys.byteorder,
    }  # fmt: skip


def _formats(description: Description) -> list[list[Any]]:
    """Group, cache, format, positions of a row, and layers of every cache, in order: pages may have other sizes."""
    return [
        [group.name, cache.cache, cache.layout, cache.positions, list(cache.layers)]
        for group in description
        for cache in group.caches
    ]


def _parsed(header: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
    """A header as a dictionary. Raises TypeError or ValueError unless it has every field."""
    given: Any = header
    if isinstance(header, (str, bytes)):
        try:
            given = json.loads(header)
        except ValueError as error:
            raise ValueError(f"header: got text that is no JSON ({error}), expected a whole header") from None
    if not isinstance(given, Mapping):
        raise TypeError(f"header: got {shown(given)} of type {type(given).__name__}, expected the header of pack")
    lacks = [name for name in FIELDS if name not in given]
    if lacks:
        raise ValueError(f"header: got none of {', '.join(lacks)}, expected the header of pack")
    if given["format"] != FORMAT or given["version"] != VERSION:
        got = f"{shown(given['format'])} version {shown(given['version'])}"
        raise ValueError(f"header: got format {got}, expected {FORMAT!r} version {VERSION}")
    check_integers(1, **{"header.tokens": given["tokens"]})
    check_integers(0, 2**63 - 1, **{"header.bytes": given["bytes"]})
    return dict(given)


def _checked(header: Mapping[str, Any], description: Description) -> int:
    """The tokens of a request. Raises ValueError for a header of other caches."""
    expected = _header(description, int(header["tokens"]), int(header["bytes"]))
    for name in ("model", "digest", "ranks", "rank", "interleave", "byte_order"):
        if header.get(name) != expected[name]:
            raise ValueError(f"header: got {name} {shown(header.get(name))}, expected {shown(expected[name])}")
    theirs, ours = [list(x) for x in header["caches"]], expected["caches"]
    for one, other in zip(theirs, ours, strict=False):
        if one != other:
            raise ValueError(f"header: got cache {shown(one)}, expected {shown(other)}")
    if len(theirs) != len(ours):
        raise ValueError(f"header: got {len(theirs)} caches, expected {len(ours)}")
    return int(header["tokens"])
