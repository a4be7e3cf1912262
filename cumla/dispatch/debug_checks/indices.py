"""Checks of `cumla.debug` for kernels of index maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import (
    check_complete,
    check_indices,
    check_mapped,
    check_pages,
    check_range,
    checked_requests,
    host,
    last_positions,
    rows_complete,
)


def compute_swa_indices_and_lens(arguments: Any) -> None:
    valid = host(arguments.is_valid_token)[arguments.token_offset : arguments.token_offset + len(arguments.swa_lens)]
    num_reqs = min(len(host(arguments.seq_lens)), len(arguments.block_table))
    requests = np.where(
        valid, checked_requests(arguments.token_to_req_indices, valid, num_reqs, arguments.token_offset), -1
    )
    tokens = len(arguments.is_valid_token)
    _, begin, end = last_positions(arguments.query_start_loc, arguments.seq_lens, tokens)
    present = np.isin(np.arange(num_reqs), requests)
    begin, end = begin[:num_reqs] - (arguments.window_size - 1), np.where(present, end[:num_reqs], 0)
    check_pages("block_table", arguments.block_table[:num_reqs], begin, end, arguments.block_size)


def compute_global_topk_indices_and_lens(arguments: Any) -> None:
    values = host(arguments.topk_indices)
    valid = host(arguments.is_valid_token)[: len(values)]
    requests = checked_requests(arguments.token_to_req_indices, valid, len(arguments.block_table))
    used = np.broadcast_to(valid[:, None], values.shape)
    if arguments.positions is not None:  # rows that are not complete at the token's position count as absent
        complete = (host(arguments.positions)[: len(values)] + 1) // arguments.compress_ratio
        check_complete("topk_indices", values, used, complete)
        used = used & (values < complete[:, None])
    check_mapped(
        "topk_indices",
        arguments.topk_indices,
        used,
        requests,
        "block_table",
        arguments.block_table,
        arguments.block_size // arguments.pool,
    )


def combine_topk_swa_indices(arguments: Any) -> None:
    values = host(arguments.topk_indices)[:, : arguments.topk]
    complete = rows_complete(
        arguments.query_start_loc,
        arguments.seq_lens,
        int(host(arguments.query_start_loc)[0]),
        len(values),
        arguments.compress_ratio,
    )
    first = np.arange(values.shape[1]) < complete[:, None]
    check_complete("topk_indices", values, np.ones_like(first) if arguments.compact else first, complete)
    used = values < complete[:, None] if arguments.compact else first
    check_indices("topk_indices", values, used, arguments.swa_start, "token")
    check_range("gather_lens", arguments.gather_lens, 0, np.maximum(host(arguments.seq_lens), 0))


def build_flashinfer_mixed_sparse_indices(arguments: Any) -> None:
    decodes, prefills = len(arguments.decode_swa_indices), len(arguments.prefill_topk_indices)
    valid = np.ones(decodes + prefills, np.bool_)
    if arguments.decode_is_valid_token is not None:
        valid[:decodes] = host(arguments.decode_is_valid_token)[:decodes]
    requests = checked_requests(arguments.token_to_req_indices, valid, len(arguments.swa_block_table))
    if arguments.decode_compressed_topk_lens is not None and arguments.decode_compressed_indices is not None:
        most = arguments.decode_compressed_indices.shape[1]
        check_range("decode_compressed_topk_lens", arguments.decode_compressed_topk_lens, 0, most, "token")
    table = "compressed_block_table", arguments.compressed_block_table, arguments.compressed_block_size
    if arguments.compressed_block_table is None:
        return
    selected = arguments.decode_compressed_indices
    if arguments.decode_compressed_indices_are_local and selected is not None:
        lens = arguments.decode_compressed_topk_lens
        used = np.full(decodes, selected.shape[1]) if lens is None else host(lens)
        used = np.where(valid[:decodes], used, 0)
        check_mapped("decode_compressed_indices", selected, used, requests, *table)
    complete = rows_complete(arguments.query_start_loc, arguments.seq_lens, decodes, prefills, arguments.compress_ratio)
    used = np.minimum(complete, arguments.topk)
    prefilled = host(arguments.prefill_topk_indices)
    check_complete("prefill_topk_indices", prefilled, np.arange(prefilled.shape[1]) < used[:, None], complete)
    check_mapped("prefill_topk_indices", arguments.prefill_topk_indices, used, requests[decodes:], *table)
