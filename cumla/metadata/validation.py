"""Host checks of a batch: what no scheduler can mean is an error that names the request."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..batch import CommonAttentionMetadata, HostLens, first_true
from .base import ServingConfig

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}  # by bytes

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

    A good batch costs three comparisons of all requests, and one of those behind the first prefill.
    """
    num_tokens, (starts, query_lens, seq_lens) = batch.num_actual_tokens, lens
    if starts[0] != 0 or starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc_cpu: got {starts[0]} to {starts[-1]}, expected 0 to at most "
            f"num_actual_tokens = {num_tokens}"
        )
    # As unsigned numbers, negative lengths are longer than any.
    if (r := first_true(query_lens.view(UNSIGNED[query_lens.itemsize]) > max(batch.max_query_len, 0))) >= 0:
        if query_lens[r] < 0:
            raise ValueError(
                f"query_start_loc_cpu: request {r} goes from {starts[r]} to {starts[r + 1]}, "
                "expected starts that do not decrease"
            )
        raise ValueError(f"max_query_len: got {batch.max_query_len}, but request {r} has {query_lens[r]} query tokens")
    if (r := first_true(query_lens > seq_lens)) >= 0:
        raise ValueError(
            f"seq_lens_cpu: request {r} has {seq_lens[r]} tokens, expected at least the {query_lens[r]} of its query"
        )
    _check_lengths(seq_lens, batch, config, tables)
    if batch.max_query_len > config.decode_threshold:
        _check_order(query_lens, config.decode_threshold)


def _check_lengths(
    seq_lens: Any, batch: CommonAttentionMetadata, config: ServingConfig, tables: dict[str, Table]
) -> None:
    limit = min(batch.max_seq_len, config.max_model_len, *map(_covered, tables.values()))
    if (r := first_true(seq_lens > limit)) < 0:
        return
    got = f"request {r} has {seq_lens[r]} tokens"
    for name, table in tables.items():
        if seq_lens[r] > _covered(table):
            columns, positions = table[0].shape[1], table[1]
            raise ValueError(f"{name}: {got}, but {columns} columns of {positions} cover {columns * positions}")
    if seq_lens[r] > config.max_model_len:
        raise ValueError(f"seq_lens_cpu: {got}, expected at most max_model_len = {config.max_model_len}")
    raise ValueError(f"max_seq_len: got {batch.max_seq_len}, but {got}")


def _covered(table: Table) -> int:
    """The longest sequence whose rows all have a place: positions that complete no row need none."""
    entries, positions, positions_per_row = table
    return int(entries.shape[1]) * positions + positions_per_row - 1


def _check_order(query_lens: Any, decode_threshold: int) -> None:
    first = first_true(query_lens > decode_threshold)
    if first < 0:
        return
    behind = query_lens[first:]
    short = behind <= decode_threshold
    if first_true(short) >= 0 and (late := first_true(short & (behind > 0))) >= 0:
        raise ValueError(
            f"query_start_loc_cpu: request {first + late} with {behind[late]} query tokens follows a prefill, "
            f"expected decodes (at most {decode_threshold} tokens) first"
        )
