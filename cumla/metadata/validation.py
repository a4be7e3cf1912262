"""Host checks of a batch: what no scheduler can mean is an error that names the request."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from .batch import CommonAttentionMetadata, HostLens
from .builder import ServingConfig

Table = tuple[Any, int, int]
"""A block table [num_reqs, B], the positions that one of its entries covers, and how many of them make a row."""


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

    A good batch costs one compiled pass over its requests.
    """
    num_tokens, (starts, query_lens, seq_lens) = batch.num_actual_tokens, lens
    if starts[0] != 0 or starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc_cpu: got {starts[0]} to {starts[-1]}, expected 0 to at most "
            f"num_actual_tokens = {num_tokens}"
        )
    limit = min(batch.max_seq_len, config.max_model_len, *map(_covered, tables.values()))
    faults = _faults()
    r, fault = faults.first_fault(starts, seq_lens, batch.max_query_len, limit, config.decode_threshold)
    if fault == faults.NOTHING:
        return
    if fault == faults.LONG_SEQUENCE:
        raise ValueError(_too_long(r, int(seq_lens[r]), batch, config, tables))
    raise ValueError(
        {
            faults.DECREASES: f"query_start_loc_cpu: request {r} goes from {starts[r]} to {starts[r + 1]}, "
            "expected starts that do not decrease",
            faults.LONG_QUERY: f"max_query_len: got {batch.max_query_len}, but request {r} has {query_lens[r]} "
            "query tokens",
            faults.SHORT_SEQUENCE: f"seq_lens_cpu: request {r} has {seq_lens[r]} tokens, expected at least the "
            f"{query_lens[r]} of its query",
            faults.LATE_DECODE: f"query_start_loc_cpu: request {r} with {query_lens[r]} query tokens follows a "
            f"prefill, expected decodes (at most {config.decode_threshold} tokens) first",
        }[fault]
    )


@functools.cache
def _faults() -> Any:
    """The compiled pass, without which `import cumla` takes half as long."""
    return importlib.import_module("cumla.kernels.numba_common.batch_checks")


def _too_long(
    r: int, seq_len: int, batch: CommonAttentionMetadata, config: ServingConfig, tables: dict[str, Table]
) -> str:
    got = f"request {r} has {seq_len} tokens"
    for name, table in tables.items():
        if seq_len > _covered(table):
            columns, positions = table[0].shape[1], table[1]
            return f"{name}: {got}, but {columns} columns of {positions} cover {columns * positions}"
    if seq_len > config.max_model_len:
        return f"seq_lens_cpu: {got}, expected at most max_model_len = {config.max_model_len}"
    return f"max_seq_len: got {batch.max_seq_len}, but {got}"


def _covered(table: Table) -> int:
    """The longest sequence whose rows all have a place: positions that complete no row need none."""
    entries, positions, positions_per_row = table
    return int(entries.shape[1]) * positions + positions_per_row - 1
