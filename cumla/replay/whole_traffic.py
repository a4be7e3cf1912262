"""Bytes that each part of a whole layer has to move in a step, from host numbers alone.

    projections  weights, hidden states read, queries and rows written (V4.1: and queries read and written by RoPE)
    insert       queries read and written by norm and RoPE (V3.2: the weights of the indexer's keys; V4.1: neither),
                 cache rows written
    compress     weights, hidden states read (V4.1: what is pooled), states written, the rows that the step completes
    select       weights, the indexer's keys of each request (V4.1: of each token's candidates, in a layer that reads
                 them), selected indices and candidate blocks written or read
    map          selected indices read, slots or workspace rows written
    decode, gather, prefill  as in traffic.py, in the activations' type
    output       weights, attention's output read, hidden states written

Weights and a request's indexer keys count once a step. Cache rows count as often as a token attends to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layers.prefill_path import chunk_paths, first_tokens
from ..layout import DSV4_FP8, INDEXER_FP8, V32_FP8, CacheLayout
from .options import V41_RATIOS, WHOLE_RATIOS, ReplayOptions
from .step_batch import StepBatch, completed_groups
from .traffic import INDEX, SLOT, bytes_moved
from .whole import V32, WholeLayer
from .whole_v41 import V41

FLOAT = 4  # bytes


def whole_bytes_moved(layer: WholeLayer, batch: StepBatch, metadata: Any, options: ReplayOptions) -> dict[str, int]:
    moved = {"v4": _v4, V32: _v32, V41: _v41}[layer.model](layer, batch, metadata, options)
    return {part: int(count) for part, count in moved.items() if count}


def _indexer_keys(batch: StepBatch, ratio: int, layout: CacheLayout = INDEXER_FP8) -> int:
    """Bytes of the keys that a step's requests score."""
    return sum(s.end // ratio for s in batch.scheduled) * layout.token_bytes


def _v4(layer: WholeLayer, batch: StepBatch, metadata: Any, options: ReplayOptions) -> dict[str, int]:
    weights, ratio = layer.attention, WHOLE_RATIOS[layer.name]
    config, value, tokens = weights.config, weights.activations.itemsize, batch.num_tokens
    topk = options.topk if ratio == 4 else None
    paths = list(chunk_paths(metadata.window, ratio, options.heads, topk, options.backend, weights.layouts.v4))
    over_pages = [x.path == "pages" for x in paths for _ in range(x.prefills.start, x.prefills.stop)]
    attention = bytes_moved(
        batch, ratio, options.heads, options.window, options.topk, None, over_pages, value=value, maps_decodes=False,
        with_decodes=first_tokens(batch.num_decodes, ratio, paths) - batch.num_decodes,
    )  # fmt: skip
    x, q = tokens * config.hidden_size * value, tokens * config.num_attention_heads * 512 * value
    low = tokens * len(weights.low_rank) * value
    row = DSV4_FP8.token_bytes
    moved = attention | {
        "projections": weights.low_rank.nbytes + weights.q_b.nbytes + x + low + q,
        "insert": 2 * q + tokens * (512 * value + row + SLOT),
        "output": weights.o_a.nbytes + weights.o_b.nbytes + q + x,
    }
    if ratio > 1:
        rows = len(completed_groups(batch, ratio).slots)
        states = sum(2 * len(compressor.position_bias[0]) for compressor in weights.compressors) * FLOAT
        made = rows * (row + (INDEXER_FP8.token_bytes if ratio == 4 else 0))
        moved["compress"] = weights.pooled.nbytes + x + tokens * states + made
    if ratio == 4:
        moved["select"] = weights.index_q_b.nbytes + _indexer_keys(batch, 4) + tokens * options.topk * INDEX
    return moved


def _v41(layer: Any, batch: StepBatch, metadata: Any, options: ReplayOptions) -> dict[str, int]:
    weights, ratio = layer.attention, V41_RATIOS[layer.name]
    config, layouts, value, tokens = weights.config, weights.layouts, weights.activations.itemsize, batch.num_tokens
    topk = options.topk if ratio else None
    paths = list(chunk_paths(metadata.window, ratio, options.heads, topk, options.backend, layouts.window))
    over_pages = [x.path == "pages" for x in paths for _ in range(x.prefills.start, x.prefills.stop)]
    attention = bytes_moved(
        batch, ratio, options.heads, options.window, options.topk, None, over_pages, value=value, maps_decodes=False,
        formats=(layouts.window, layouts.compressed), has_c1a=True,
        with_decodes=0 if ratio else first_tokens(batch.num_decodes, ratio, paths) - batch.num_decodes,
    )  # fmt: skip
    x, q = tokens * config.hidden_size * value, tokens * config.num_attention_heads * 512 * value
    low = tokens * len(weights.low_rank) * value
    moved = attention | {
        "projections": weights.low_rank.nbytes + weights.q_b.nbytes + x + low + 3 * q,
        "insert": tokens * (512 * value + layouts.window.token_bytes + SLOT),
        "output": weights.o_a.nbytes + weights.o_b.nbytes + q + x,
    }
    if weights.mode not in ("full", "reindex"):
        return moved
    moved["projections"] += weights.wide.nbytes + x + tokens * len(weights.wide) * FLOAT
    moved["select"] = weights.index_q_b.nbytes + low + tokens * options.topk * INDEX
    if weights.mode == "full":
        row = layouts.compressed.token_bytes + layouts.indexer.token_bytes
        pooled = tokens * ratio * 512 * FLOAT + 2 * tokens * 512 * value
        moved["compress"] = weights.index_k.nbytes + pooled + len(completed_groups(batch, ratio).slots) * row
        moved["select"] += _indexer_keys(batch, ratio, layouts.indexer)
    else:
        visible = (batch.positions + 1) // ratio
        candidates = np.minimum(visible, config.candidate_topk_blocks * config.candidate_block_size).sum()
        moved["select"] += int(candidates) * layouts.indexer.token_bytes
    if layer.chooses_candidates or weights.mode == "reindex":
        moved["select"] += tokens * config.candidate_topk_blocks * INDEX
    return moved


def _v32(layer: WholeLayer, batch: StepBatch, metadata: Any, options: ReplayOptions) -> dict[str, int]:
    weights = layer.attention
    config, value, tokens = weights.config, weights.activations.itemsize, batch.num_tokens
    heads, row = config.num_attention_heads, V32_FP8.token_bytes
    x, q, o = tokens * config.hidden_size * value, tokens * heads * 576 * value, tokens * heads * 512 * value
    latent, up = weights.latent.nbytes, weights.value.nbytes
    attended = int(np.minimum(batch.positions + 1, options.topk).sum())
    return {
        "projections": weights.low_rank.nbytes + weights.queries.nbytes + latent + x + q,
        "insert": tokens * (704 * value + row + INDEXER_FP8.token_bytes + 2 * SLOT),
        "select": weights.index_weights.nbytes + x + _indexer_keys(batch, 1) + tokens * options.topk * INDEX,
        "map": int(np.minimum(batch.positions + 1, options.topk)[batch.num_decodes :].sum()) * 2 * INDEX,
        "decode": attended * (row + INDEX) + q + o,
        "output": up + weights.o.nbytes + o + x,
    }
