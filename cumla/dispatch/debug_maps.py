"""The checks of `cumla.debug` for index maps, builders and ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..kernels.types.metadata import C128A_RATIO
from ..kernels.types.shard import Shard
from .debug_validation import dequantize_and_gather_k_cache
from .debug_values import CHECKS as CHECKS  # with those of debug_validation
from .debug_values import (
    check,
    check_complete,
    check_indices,
    check_mapped,
    check_pages,
    check_range,
    check_slots,
    checked_requests,
    host,
    last_positions,
    rows_complete,
)


@check
def compute_swa_indices_and_lens(given: Any) -> None:
    valid = host(given.is_valid_token)[given.token_offset : given.token_offset + len(given.swa_lens)]
    num_reqs = min(len(host(given.seq_lens)), len(given.block_table))
    requests = np.where(valid, checked_requests(given.token_to_req_indices, valid, num_reqs, given.token_offset), -1)
    _, begin, end = last_positions(given.query_start_loc, given.seq_lens)
    present = np.isin(np.arange(num_reqs), requests)
    begin, end = begin[:num_reqs] - (given.window_size - 1), np.where(present, end[:num_reqs], 0)
    check_pages("block_table", given.block_table[:num_reqs], begin, end, given.block_size)


@check
def compute_global_topk_indices_and_lens(given: Any) -> None:
    values = host(given.topk_indices)
    valid = host(given.is_valid_token)[: len(values)]
    requests = checked_requests(given.token_to_req_indices, valid, len(given.block_table))
    used = np.broadcast_to(valid[:, None], values.shape)
    if given.positions is not None:  # rows that are not complete at the token's position count as absent
        complete = (host(given.positions)[: len(values)] + 1) // given.compress_ratio
        check_complete("topk_indices", values, used, complete)
        used = used & (values < complete[:, None])
    check_mapped("topk_indices", given.topk_indices, used, requests, "block_table", given.block_table, given.block_size)


@check
def combine_topk_swa_indices(given: Any) -> None:
    values = host(given.topk_indices)[:, : given.topk]
    complete = rows_complete(
        given.query_start_loc, given.seq_lens, int(host(given.query_start_loc)[0]), len(values), given.compress_ratio
    )
    first = np.arange(values.shape[1]) < complete[:, None]
    check_complete("topk_indices", values, np.ones_like(first) if given.compact else first, complete)
    used = values < complete[:, None] if given.compact else first
    check_indices("topk_indices", values, used, given.swa_start, "token")
    check_range("gather_lens", given.gather_lens, 0, np.maximum(host(given.seq_lens), 0))


@check
def gather_prefill_rows(given: Any) -> None:
    for gather in (given.windows, given.compressed):
        if gather is not None:
            dequantize_and_gather_k_cache(SimpleNamespace(**gather._asdict(), first=0))
    combine_topk_swa_indices(SimpleNamespace(**given.lists._asdict(), first=0))


@check
def build_flashinfer_mixed_sparse_indices(given: Any) -> None:
    decodes, prefills = len(given.decode_swa_indices), len(given.prefill_topk_indices)
    valid = np.ones(decodes + prefills, np.bool_)
    if given.decode_is_valid_token is not None:
        valid[:decodes] = host(given.decode_is_valid_token)[:decodes]
    requests = checked_requests(given.token_to_req_indices, valid, len(given.swa_block_table))
    if given.decode_compressed_topk_lens is not None and given.decode_compressed_indices is not None:
        most = given.decode_compressed_indices.shape[1]
        check_range("decode_compressed_topk_lens", given.decode_compressed_topk_lens, 0, most, "token")
    table = "compressed_block_table", given.compressed_block_table, given.compressed_block_size
    if given.compressed_block_table is None:
        return
    selected = given.decode_compressed_indices
    if given.decode_compressed_indices_are_local and selected is not None:
        lens = given.decode_compressed_topk_lens
        used = np.full(decodes, selected.shape[1]) if lens is None else host(lens)
        used = np.where(valid[:decodes], used, 0)
        check_mapped("decode_compressed_indices", selected, used, requests, *table)
    complete = rows_complete(given.query_start_loc, given.seq_lens, decodes, prefills, given.compress_ratio)
    used = np.minimum(complete, given.topk)
    prefilled = host(given.prefill_topk_indices)
    check_complete("prefill_topk_indices", prefilled, np.arange(prefilled.shape[1]) < used[:, None], complete)
    check_mapped("prefill_topk_indices", given.prefill_topk_indices, used, requests[decodes:], *table)


@check
def advance_step(given: Any) -> None:
    lens = host(given.seq_lens)[: given.num_queries]
    check_pages("block_tables", given.block_tables[: given.num_queries], lens, lens + 1, given.block_size)


def of_rank(rows: np.ndarray, shard: Shard) -> np.ndarray:
    """A request's rows as indices among the rank's own rows; -1 for rows of other ranks."""
    turn, within = np.divmod(rows, shard.interleave)
    own = (rows >= 0) & (turn % shard.size == shard.rank)
    return np.where(own, turn // shard.size * shard.interleave + within, -1)


@check
def local_slot_mapping(given: Any) -> None:
    _, first_positions, lens = last_positions(given.query_start_loc, given.seq_lens)
    ranges = []
    firsts, ends = (np.maximum(x, 0) // given.compress_ratio for x in (first_positions, lens))
    for at, stop in zip(firsts, ends, strict=True):
        rows = of_rank(np.arange(at, max(at, stop)), given.shard)
        own = rows[rows >= 0]
        ranges.append((own.min(), own.max() + 1) if len(own) else (0, 0))
    begin, end = np.array(ranges, np.int64).reshape(-1, 2).T
    check_pages("block_table", given.block_table, begin, end, given.block_size)


@check
def localise_indices(given: Any) -> None:
    values = host(given.indices)
    valid = np.ones(len(values), np.bool_) if given.is_valid_token is None else host(given.is_valid_token)
    requests = checked_requests(given.token_to_req, valid, len(given.block_table))
    used = np.broadcast_to(valid[:, None], values.shape)
    check_indices("indices", values, used, np.iinfo(np.int32).max, "token")
    check_mapped(
        "indices", of_rank(values, given.shard), used, requests, "block_table", given.block_table, given.block_size
    )


@check
def build_sparse_swa(given: Any) -> None:
    check_slots("slot_mapping", given.slot_mapping, None)
    starts, begin, lens = last_positions(given.query_start_loc, given.seq_lens)
    end = lens * (np.diff(starts) > 0)  # padding requests read nothing
    reached = np.full(len(lens), given.window_size - 1)
    if given.noncausal:  # the tokens of a decode see the whole window of its first token's predecessor
        reached[: given.counts.num_decodes] += 1
    first = begin - reached
    if given.replay_start is not None:  # whose windows have nothing before it, save those of noncausal decodes
        late = (host(given.replay_start) > begin) & (end > 0)
        if late.any():
            r = int(np.argmax(late))
            raise ValueError(
                f"replay_start: request {r} has {host(given.replay_start)[r]}, expected at most {begin[r]}, its first "
                "position of this step"
            )
        causal = np.arange(len(lens)) >= (given.counts.num_decodes if given.noncausal else 0)
        first = np.where(causal, np.maximum(first, host(given.replay_start)), first)
    check_pages("block_table_tensor", given.block_table, first, end, given.block_size)
    table, rows = given.c128a_block_table, end // C128A_RATIO
    if table is not None:
        check_pages("c128a_block_table", table, np.zeros_like(end), rows, given.c128a_block_size)


@check
def build_indexer(given: Any) -> None:
    starts, __, end = last_positions(given.query_start_loc, given.seq_lens)
    rows = end * (np.diff(starts) > 0) // given.counts.compress_ratio
    check_pages("block_table", given.block_table, np.zeros_like(rows), rows, given.counts.block_size)


@check
def compressed_slot_mapping(given: Any) -> None:
    if given.compress_ratio > 1:  # ratio 1: pages of states, freed when no longer needed
        __, begin, end = last_positions(given.query_start_loc, given.seq_lens)
        begin, end = np.maximum(begin, 0) // given.compress_ratio, end // given.compress_ratio
        check_pages("block_table", given.block_table, begin, end, given.block_size)
