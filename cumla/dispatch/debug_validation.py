"""The checks of `cumla.debug` for kernels of caches, attention, RoPE and the indexer; debug_maps.py has the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.types.segments import Pages
from .debug_values import (
    CHECKS,
    check,
    check_cached,
    check_indices,
    check_packed,
    check_pages,
    check_positions,
    check_range,
    check_scale,
    check_slots,
    checked_requests,
    host,
)


@check
def quantize_and_insert_k_cache(given: Any) -> None:
    check_slots("slot_mapping", given.slot_mapping, given.pages.num_slots)


CHECKS["insert_keys"] = quantize_and_insert_k_cache


@check
def concat_and_cache_mla(given: Any) -> None:
    check_slots("slot_mapping", given.slot_mapping, given.pages.num_slots)


@check
def qnorm_rope_and_insert(given: Any) -> None:
    check_positions(given, given.cos_sin, given.slots)
    check_slots("slot_mapping", given.slots, given.pages.num_slots, given.positions)


@check
def norm_rope_and_insert(given: Any) -> None:
    check_positions(given, given.cos_sin, given.slots, all_read=False)
    check_slots("slot_mapping", given.slots, given.pages.num_slots, given.positions)


@check
def indexer_knorm_rope_and_insert(given: Any) -> None:
    check_positions(given, given.cos_sin, given.slots, all_read=False)
    check_slots("slot_mapping", given.slots, given.pages.num_slots, given.positions)


@check
def apply_rope(given: Any) -> None:
    check_positions(given, given.cos_sin)


@check
def inverse_rope_and_quantize(given: Any) -> None:
    check_positions(given, given.cos_sin)


@check
def fused_indexer_q_rope_quant(given: Any) -> None:
    if len(given.table):  # without rows, queries are not rotated
        check_positions(given, given.table, name="index_q_cos_sin_cache")
    if given.scale <= 0:
        name = "index_weights_softmax_scale * index_weights_head_scale"
        raise ValueError(f"{name}: got {given.scale:g}, expected more than 0")


@check
def compress_and_insert(given: Any) -> None:
    positions, slots, state_table, ratio = given.positions, given.slots, given.state_block_table, given.compress_ratio
    check_positions(given, given.cos_sin, slots)
    at, states, num_reqs = host(positions), given.compressors[0].state, len(state_table)
    requests = checked_requests(given.token_to_req, at >= 0, num_reqs)
    for prefix, rows in zip(("", "index_"), given.compressors, strict=False):
        check_slots(f"slot_mapping of {prefix}k_cache", slots, rows.pages.num_slots, positions, requests)
        num_states = rows.state.shape[0] * rows.state.shape[1]
        check_slots(f"state_slot_mapping of {prefix}state_cache", given.state_slots, num_states, positions, requests)
    window = ratio * given.compressors[0].kv_score.shape[1] // (2 * given.compressors[0].pages.layout.head_dim)
    begin, end = np.full(num_reqs, np.iinfo(np.int64).max), np.zeros(num_reqs, np.int64)
    for i in np.flatnonzero(at >= 0):  # rows that a step's first tokens complete also read states before the step
        r = requests[i]
        before = at[i] - (i - host(given.query_start_loc)[r])  # the step's first position
        if (at[i] + 1) % ratio == 0 and i < len(slots) and host(slots)[i] >= 0:
            begin[r], end[r] = min(begin[r], at[i] + 1 - window), before
    check_pages("state_block_table", state_table, begin, end, states.shape[1], len(states))


@check
def dequantize_and_gather_k_cache(given: Any) -> None:
    end = check_range("seq_lens", given.seq_lens) // given.compress_ratio
    lens = end if given.gather_lens is None else check_range("gather_lens", given.gather_lens, 0, end)
    check_cached(given, end - lens, end)


@check
def cp_gather_indexer_k_quant_cache(given: Any) -> None:
    check_cached(given, 0, np.diff(check_packed("cu_seq_lens", given.cu_seq_lens, len(given.dst_k), "dst_k")))


CHECKS["gather_keys"] = cp_gather_indexer_k_quant_cache


@check
def gather_cache(given: Any) -> None:
    lens = np.diff(check_packed("cu_seq_lens", given.cu_seq_lens, len(given.dst), "dst"))
    begin = np.zeros_like(lens) if given.seq_starts is None else check_range("seq_starts", given.seq_starts)
    check_cached(given, begin, begin + lens)


@check
def dense_mla_decode(given: Any) -> None:
    check_scale(given.softmax_scale, given.q.shape[-1])
    check_cached(given, 0, check_range("cache_seqlens", given.cache_seqlens))


@check
def mha_varlen(given: Any) -> None:
    check_scale(given.softmax_scale, given.q.shape[-1])
    check_packed("cu_seqlens_q", given.cu_seqlens_q, len(given.q), "q")
    check_packed("cu_seqlens_k", given.cu_seqlens_k, len(given.k), "k")


@check
def mqa_logits(given: Any) -> int:
    starts = check_range("cu_seqlen_ks", given.starts, 0, len(given.k), "query", given.first)
    check_range("cu_seqlen_ke", given.ends, starts, len(given.k), "query", given.first)
    return len(starts)


@check
def paged_mqa_logits_metadata(given: Any) -> None:
    check_range("context_lens", given.lens)


@check
def paged_mqa_logits(given: Any) -> int:
    return check_lengths(given)


@check
def paged_logits_and_blocks(given: Any) -> int:
    return check_lengths(given)


def check_lengths(given: Any) -> int:
    """Pages of all rows that the queries see, up to the width of the logits; the number of requests."""
    ends = longest(given)
    covered = (
        given.block_table.shape[1] * given.pages.block_size
    )  # a context beyond is wrong, however wide the logits are
    check_cached(given, 0, np.where(ends > covered, ends, np.minimum(ends, given.logits.shape[1])))
    return len(ends)


def longest(given: Any) -> np.ndarray:
    """The rows that the queries of each request see."""
    ends = check_range("context_lens", given.context_lens, first=given.first)
    return ends.max(axis=1) if ends.ndim == 2 else ends


@check
def top_k_per_row(given: Any) -> int:
    return check_columns(given)


@check
def select_candidate_blocks(given: Any) -> int:
    return check_columns(given)


@check
def apply_candidate_mask(given: Any) -> int:
    return check_columns(given)


def check_columns(given: Any) -> int:
    """The columns of rows of logits; the number of rows. Lengths may be beyond the logits: max_context_len leaves out
    the rest."""
    rows, first = given.rows, given.first
    width = given.logits.shape[1] if rows.num_keys is None else rows.num_keys
    for name, columns in (("row_starts", rows.starts), ("row_ends", rows.ends)):
        if columns is not None:
            check_range(name, columns, 0, width, "row", first)
    if rows.lens is not None:
        check_range("seq_lens", rows.lens, first=first // rows.next_n)
    return len(given.logits)


@check
def compress_latents(given: Any) -> None:
    if given.state is None:
        return
    rings, capacity, _ = given.state.shape
    slots, at = host(given.slots), host(given.positions)[: len(given.slots)]
    wrong = (slots < -1) | (slots >= rings * capacity) | ((slots >= 0) & (slots % capacity != at % capacity))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"slot_mapping: row {row} (position {at[row]}) has slot {slots[row]}, expected -1 or 0 to "
            f"{rings * capacity - 1} with remainder {at[row] % capacity} modulo the capacity {capacity}"
        )
    starts, owner = host(given.query_start_loc), dict[int, int]()
    for request in range(len(starts) - 1):
        its = slots[max(starts[request], 0) : max(starts[request + 1], 0)]
        for ring in np.unique(its[its >= 0] // capacity).tolist():
            other = owner.setdefault(ring, request)
            if other != request:
                raise ValueError(
                    f"slot_mapping: requests {other} and {request} both have ring {ring}, expected rings that differ"
                )


@check
def candidate_logits(given: Any) -> int:
    ends = longest(given)
    check_cached(given, 0, ends)
    next_n, chosen = given.q.shape[1], host(given.candidates)
    most = np.repeat(-(-np.maximum(ends, 0) // given.block), next_n)[:, None]
    wrong = (chosen < -1) | (chosen >= most)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"candidate_blocks: row {given.first * next_n + row} has block {chosen[row, column]}, expected -1"
            + (f" or 0 to {most[row, 0] - 1}" if most[row, 0] else "")
        )
    return len(ends)


@check
def sparse_mla_decode(given: Any) -> None:
    check_scale(given.softmax_scale, given.q.shape[-1])
    for prefix, (pages, indices, lengths) in zip(("", "extra_"), given.segments, strict=False):
        batch, queries, entries = indices.shape
        used = np.full((batch, queries), entries)
        if lengths is not None:
            used = check_range(f"{prefix}topk_length", lengths, 0, entries)
        for i in range(queries):
            of = f"query {i} of request" if queries > 1 else "query"
            check_indices(f"{prefix}indices", indices[:, i], used[:, i], pages.num_slots, of)


@check
def sparse_mla_prefill(given: Any) -> None:
    check_scale(given.softmax_scale, given.q.shape[-1])
    used, entries = np.full(len(given.indices), given.indices.shape[1]), given.indices.shape[1]
    if given.topk_length is not None:
        used = check_range("topk_length", given.topk_length, 0, entries, "query")
    rows = given.kv.num_slots if isinstance(given.kv, Pages) else len(given.kv)
    check_indices("indices", given.indices, used, rows)


@check
def copy_blocks(given: Any) -> None:
    for name, column, pages in (("first", 0, len(given.src)), ("second", 1, len(given.dst))):
        blocks = host(given.src_to_dst)[:, column]
        wrong = (blocks < -1) | (blocks >= pages)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"src_to_dst: pair {i} has {blocks[i]} as its {name} block, expected -1 or 0 to {pages - 1}"
            )


CHECKS["copy_blocks_across"] = copy_blocks
