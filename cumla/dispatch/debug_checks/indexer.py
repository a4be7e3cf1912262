"""Checks of `cumla.debug` for kernels of the indexer's keys, queries and scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from .sparse_cache import cp_gather_indexer_k_quant_cache, quantize_and_insert_k_cache
from .values import check_cached, check_positions, check_range


def fused_indexer_q_rope_quant(arguments: Any) -> None:
    if arguments.table is not None and len(arguments.table):  # without rows, queries are not rotated
        check_positions(arguments, arguments.table, name="index_q_cos_sin_cache")
    if arguments.scale <= 0:
        name = "index_weights_softmax_scale * index_weights_head_scale"
        raise ValueError(f"{name}: got {arguments.scale:g}, expected more than 0")


def mqa_logits(arguments: Any) -> int:
    starts = check_range("cu_seqlen_ks", arguments.starts, 0, len(arguments.k), "query", arguments.first)
    check_range("cu_seqlen_ke", arguments.ends, starts, len(arguments.k), "query", arguments.first)
    return len(starts)


def paged_mqa_logits_metadata(arguments: Any) -> None:
    check_range("context_lens", arguments.lens)


def paged_mqa_logits(arguments: Any) -> int:
    return check_lengths(arguments)


def check_lengths(arguments: Any) -> int:
    """Pages of all rows that the queries see, up to the width of the logits; the number of requests."""
    ends = longest(arguments)
    # A context beyond the block table is wrong, however wide the logits are.
    covered = arguments.block_table.shape[1] * arguments.pages.block_size
    check_cached(arguments, 0, np.where(ends > covered, ends, np.minimum(ends, arguments.logits.shape[1])))
    return len(ends)


def longest(arguments: Any) -> np.ndarray:
    """The rows that the queries of each request see."""
    ends = check_range("context_lens", arguments.context_lens, first=arguments.first)
    return ends.max(axis=1) if ends.ndim == 2 else ends


insert_keys, gather_keys = quantize_and_insert_k_cache, cp_gather_indexer_k_quant_cache
