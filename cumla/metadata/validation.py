"""Checks a batch on the host: an impossible batch raises an error that names the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .batch import CommonAttentionMetadata, HostLens, first_true, host_array
from .builder import ServingConfig

INT32_MAX = 2**31 - 1

Table = tuple[Any, int, int]
"""A block table [num_reqs, B], the positions that one of its entries covers, and the positions of a row."""


def check_capacity(batch: CommonAttentionMetadata, config: ServingConfig, rows: int) -> None:
    """Raise ValueError for a batch that the builders' buffers cannot hold; `rows` are the entries of slot_mapping."""
    if not 0 <= batch.num_reqs <= config.max_num_seqs:
        raise ValueError(f"num_reqs: got {batch.num_reqs}, expected 0 to max_num_seqs = {config.max_num_seqs}")
    if not 0 <= batch.num_actual_tokens <= config.max_num_batched_tokens:
        raise ValueError(
            f"num_actual_tokens: got {batch.num_actual_tokens}, expected 0 to "
            f"max_num_batched_tokens = {config.max_num_batched_tokens}"
        )
    if not batch.num_actual_tokens <= rows <= config.max_num_batched_tokens:
        raise ValueError(
            f"slot_mapping: got {rows} entries, expected num_actual_tokens = {batch.num_actual_tokens} to "
            f"max_num_batched_tokens = {config.max_num_batched_tokens}"
        )


def check_batch(batch: CommonAttentionMetadata, lens: HostLens, config: ServingConfig, **tables: Table) -> None:
    """Raise ValueError for a batch that is inconsistent, unordered or longer than the config or a table allows.

    A valid batch takes a few steps of NumPy; otherwise the requests are checked one by one to find the wrong one.
    """
    num_tokens, (starts, _, seq_lens) = batch.num_actual_tokens, lens
    if starts[0] != 0 or starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc_cpu: got {starts[0]} to {starts[-1]}, expected 0 to at most "
            f"num_actual_tokens = {num_tokens}"
        )
    limit = min(batch.max_seq_len, config.max_model_len, *map(_covered, tables.values()))
    if len(seq_lens) and not _surely_right(lens, batch.max_query_len, limit, config.decode_threshold):
        _check_each(batch, lens, limit, config, tables)
    _check_computed(batch, lens)


def check_tables(seq_lens: np.ndarray, tables: Mapping[str, Table]) -> None:
    """Raise ValueError for a table that does not cover a sequence."""
    longest = int(seq_lens.max(initial=0))
    for name, table in tables.items():
        if longest > _covered(table):
            raise ValueError(_too_narrow(name, table, int(seq_lens.argmax()), longest))


def check_block_size(batch: Any, block_size: int) -> None:
    """Raise ValueError for a batch whose slots count pages of another size."""
    if batch.block_size not in (None, block_size):
        raise ValueError(
            f"block_size: got a batch with pages of {batch.block_size} positions, expected {block_size}, as the "
            "builder's configuration has"
        )


def check_columns(name: str, table: Any, block_size: int, rows: int) -> None:
    """Raise ValueError for a block table with too few pages of block_size rows for the longest sequence's rows."""
    columns = table.shape[1]
    if columns * block_size < rows:
        raise ValueError(
            f"{name}: got {columns} columns, pages of {block_size} rows each, expected at least "
            f"{-(-rows // block_size)} for the {rows} rows of the longest sequence"
        )


def check_pages(name: str, cache: Any, needed: int, of: str, unit: str = "pages") -> None:
    """Raise ValueError for a cache [num_blocks, ..] with fewer pages than needed. Checks nothing else."""
    shape: Any = getattr(cache, "shape", ())
    if len(shape) and shape[0] < needed:
        raise ValueError(f"{name}: got {shape[0]} {unit}, expected at least {needed} for {of}")


def check_rows_of_longest(name: str, cache: Any, block_size: int, rows: int) -> None:
    """`check_pages` for the rows of the longest sequence, all of whose pages differ."""
    check_pages(name, cache, -(-rows // max(block_size, 1)), f"the {rows} rows of the longest sequence")


def check_window_pages(name: str, cache: Any, longest: int) -> None:
    """`check_pages` for windows and states, whose earlier pages may be freed: one page if there is a sequence."""
    check_pages(name, cache, min(longest, 1), f"sequences of up to {longest} tokens")


def _check_computed(batch: CommonAttentionMetadata, lens: HostLens) -> None:
    """Raise ValueError where num_computed_tokens_cpu contradicts the lengths of a request that has a query."""
    if batch.num_computed_tokens_cpu is None:
        return
    computed = host_array("num_computed_tokens_cpu", batch.num_computed_tokens_cpu)
    if computed.shape != lens.seq_lens.shape:
        raise ValueError(f"num_computed_tokens_cpu: got shape {computed.shape}, expected {lens.seq_lens.shape}")
    expected = lens.seq_lens - lens.query_lens
    if computed.dtype == expected.dtype and computed.tobytes() == expected.tobytes():  # faster than elementwise
        return
    r = first_true((computed != expected) & (lens.query_lens > 0))
    if r >= 0:
        raise ValueError(
            f"num_computed_tokens_cpu: request {r} has {computed[r]}, expected {lens.seq_lens[r]} tokens without the "
            f"{lens.query_lens[r]} of its query"
        )


_UNSIGNED = {np.dtype(f"{sign}{size}"): np.dtype(f"u{size}") for sign in "iu" for size in (4, 8)}


def _surely_right(lens: HostLens, max_query_len: int, max_seq_len: int, decode_threshold: int) -> bool:
    """Whether all requests, at least one, are certainly valid. Takes few NumPy steps of a microsecond each."""
    _, query_lens, seq_lens = lens
    unsigned = _UNSIGNED.get(query_lens.dtype)
    if unsigned is None:
        return False
    longest = int(np.maximum.reduce(query_lens.view(unsigned)))  # a negative length becomes a very long one
    if longest > max_query_len or longest * len(query_lens) > INT32_MAX:  # otherwise no difference has overflowed
        return False
    if np.maximum.reduce(seq_lens) > max_seq_len or first_true(query_lens > seq_lens) >= 0:
        return False
    if longest <= decode_threshold:
        return True
    is_prefill = (query_lens > decode_threshold).tobytes()
    return is_prefill.rfind(b"\0") < is_prefill.find(b"\1")  # False may mean padding


def _check_each(
    batch: CommonAttentionMetadata, lens: HostLens, limit: int, config: ServingConfig, tables: dict[str, Table]
) -> None:
    """Raise the error of the first request that is wrong by itself, else the error of the order."""
    starts, seq_lens = lens.starts.tolist(), lens.seq_lens.tolist()
    for r, seq_len in enumerate(seq_lens):
        start, end = starts[r], starts[r + 1]
        query_len = end - start
        if query_len < 0:
            raise ValueError(
                f"query_start_loc_cpu: request {r} goes from {start} to {end}, expected starts that do not decrease"
            )
        if query_len > batch.max_query_len:
            raise ValueError(f"max_query_len: got {batch.max_query_len}, but request {r} has {query_len} query tokens")
        if query_len > seq_len:
            raise ValueError(
                f"seq_lens_cpu: request {r} has {seq_len} tokens, expected at least the {query_len} of its query"
            )
        if seq_len > limit:
            raise ValueError(_too_long(r, seq_len, batch, config, tables))
    lens.check_order(config.decode_threshold)


def _too_long(
    r: int, seq_len: int, batch: CommonAttentionMetadata, config: ServingConfig, tables: dict[str, Table]
) -> str:
    for name, table in tables.items():
        if seq_len > _covered(table):
            return _too_narrow(name, table, r, seq_len)
    got = f"request {r} has {seq_len} tokens"
    if seq_len > config.max_model_len:
        return f"seq_lens_cpu: {got}, expected at most max_model_len = {config.max_model_len}"
    return f"max_seq_len: got {batch.max_seq_len}, but {got}"


def _too_narrow(name: str, table: Table, r: int, seq_len: int) -> str:
    columns, positions, positions_per_row = table[0].shape[1], *table[1:]
    needed = -(-(seq_len // positions_per_row * positions_per_row) // positions)
    return (
        f"{name}: request {r} has {seq_len} tokens, but {columns} columns of {positions} cover {columns * positions}, "
        f"expected at least {needed} columns"
    )


def _covered(table: Table) -> int:
    """The longest sequence that fits in a table: positions that complete no row take no space."""
    entries, positions, positions_per_row = table
    return int(entries.shape[1]) * positions + positions_per_row - 1
