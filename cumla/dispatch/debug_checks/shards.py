"""Checks of `cumla.debug` for kernels of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.types.shard import Shard
from .values import check_indices, check_mapped, check_pages, check_range, checked_requests, host, last_positions


def local_seq_lens(arguments: Any) -> None:
    check_range("seq_lens", arguments.seq_lens)


def of_rank(rows: np.ndarray, shard: Shard) -> np.ndarray:
    """A request's rows as indices among the rank's own rows; -1 for rows of other ranks."""
    turn, within = np.divmod(rows, shard.interleave)
    own = (rows >= 0) & (turn % shard.size == shard.rank)
    return np.where(own, turn // shard.size * shard.interleave + within, -1)


def local_slot_mapping(arguments: Any) -> None:
    _, first_positions, lens = last_positions(arguments.query_start_loc, arguments.seq_lens)
    ranges = []
    firsts, ends = (np.maximum(x, 0) // arguments.compress_ratio for x in (first_positions, lens))
    for at, stop in zip(firsts, ends, strict=True):
        rows = of_rank(np.arange(at, max(at, stop)), arguments.shard)
        own = rows[rows >= 0]
        ranges.append((own.min(), own.max() + 1) if len(own) else (0, 0))
    begin, end = np.array(ranges, np.int64).reshape(-1, 2).T
    check_pages("block_table", arguments.block_table, begin, end, arguments.block_size)


def localise_indices(arguments: Any) -> None:
    values = host(arguments.indices)
    valid = np.ones(len(values), np.bool_) if arguments.is_valid_token is None else host(arguments.is_valid_token)
    requests = checked_requests(arguments.token_to_req, valid, len(arguments.block_table))
    used = np.broadcast_to(valid[:, None], values.shape)
    check_indices("indices", values, used, np.iinfo(np.int32).max, "token")
    check_mapped(
        "indices",
        of_rank(values, arguments.shard),
        used,
        requests,
        "block_table",
        arguments.block_table,
        arguments.block_size,
    )
