"""Cases of index maps, of advance_step, and of the indexer's scores and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bounds import EQUAL, SCORES
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..ops.candidates import apply_candidate_mask, candidate_logits, candidate_topk, select_candidate_blocks
from ..ops.indexer import (
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    fused_indexer_q_rope_quant,
    get_paged_mqa_logits_metadata,
)
from ..ops.indexer_topk import indexer_topk, top_k_per_row
from .arrays import NUM_BLOCKS, Bench
from .case import UNWRITTEN, Case, Run

WINDOW = 8


def _scores(bench: Bench, *shape: int) -> Any:
    """e4m3 bytes of queries or keys, at most 1."""
    return bench.put(bench.rng.integers(0, 0x39, shape), np.uint8)


def _index_queries(bench: Bench, positions: Sequence[int], **options: Any) -> Sequence[Any]:
    q, weights = fused_indexer_q_rope_quant(
        bench.put(list(positions), np.int64), bench.normal(3, 5, 128), bench.normal(7, 64, dtype=np.float32),
        bench.normal(3, 5, dtype=np.float32), **options, backend=bench.backend,
    )  # fmt: skip
    return q, weights


def _indexer_queries(bench: Bench) -> Sequence[Any]:
    return _index_queries(bench, (3, 0, 9), quantize=False)


def _mxfp4_queries(bench: Bench) -> Sequence[Any]:
    """Not rotated, so that a rounding to bfloat16 cannot differ."""
    return _index_queries(bench, (-1, -1, -1), q_format="mxfp4_rows")


def _indexer_scores(bench: Bench) -> Sequence[Any]:
    q, k, scales = _scores(bench, 5, 64, 128), _scores(bench, 70, 128), abs(bench.normal(70, dtype=np.float32))
    ranges = bench.indices(60, 5), bench.indices(75, 5)
    weights = bench.normal(5, 64, dtype=np.float32) / np.float32(np.sqrt(64 * 128))  # the scale of an indexer's weights
    return (fp8_mqa_logits(q, k, weights, *ranges, True, kv_scales=scales, backend=bench.backend),)


def _indexer_paged(bench: Bench) -> dict[str, Any]:
    table = bench.put(bench.rng.permutation(NUM_BLOCKS)[:6].reshape(3, 2), np.int32)
    return {
        "q": _scores(bench, 3, 2, bench.heads, 128), "weights": bench.normal(6, bench.heads, dtype=np.float32),
        "context_lens": bench.put([9, 2, 0], np.int32), "block_table": table, "backend": bench.backend,
    }  # fmt: skip


def _indexer_paged_scores(layout: CacheLayout) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        cache = bench.cache(layout)
        return (fp8_paged_mqa_logits(kv_cache=cache, clean_logits=True, layout=layout, **_indexer_paged(bench)),)

    return run


def _indexer_schedule(bench: Bench) -> Sequence[Any]:
    lens = bench.put([1000, 0, 500, 64], np.int32)
    return (get_paged_mqa_logits_metadata(lens, 64, 5, backend=bench.backend),)


def _top_k(bench: Bench) -> Sequence[Any]:
    logits = bench.put(bench.rng.integers(-20, 20, (5, 90)), np.float32)
    return (top_k_per_row(logits, 16, None, bench.indices(100, 5), backend=bench.backend),)


def _indexer_topk(bench: Bench) -> Sequence[Any]:
    return (indexer_topk(kv=bench.cache(INDEXER_FP8), topk=4, **_indexer_paged(bench)),)


def _indexer_slots(bench: Bench) -> Sequence[Any]:
    slots = bench.xp.full((6, 4), UNWRITTEN, np.int32), bench.xp.full(6, UNWRITTEN, np.int32)
    is_valid = bench.put([1, 1, 0, 1, 1, 1], np.bool_)
    chosen = indexer_topk(
        kv=bench.cache(INDEXER_FP8), topk=4, slots=slots, is_valid_token=is_valid, **_indexer_paged(bench)
    )
    return chosen, *slots


def _indexer_blocks(bench: Bench) -> Sequence[Any]:
    blocks = bench.xp.full((6, 2), UNWRITTEN, np.int32)
    chosen = indexer_topk(kv=bench.cache(INDEXER_FP8), topk=4, candidate_blocks=blocks, **_indexer_paged(bench))
    return chosen, blocks


def _candidate_blocks(bench: Bench) -> Sequence[Any]:
    logits = bench.put(bench.rng.integers(-20, 20, (5, 90)), np.float32)
    return (select_candidate_blocks(logits, 4, None, bench.indices(100, 5), backend=bench.backend),)


def _candidate_mask(bench: Bench) -> Sequence[Any]:
    logits = bench.put(bench.rng.integers(-20, 20, (5, 90)), np.float32)
    apply_candidate_mask(logits, bench.indices(12, 5, 3), None, bench.indices(100, 5), backend=bench.backend)
    return (logits,)


def _candidate_scores(layout: CacheLayout) -> Run:
    def run(bench: Bench) -> Sequence[Any]:
        return (
            candidate_logits(
                kv_cache=bench.cache(layout), candidate_blocks=bench.indices(4, 6, 2), candidate_block_size=3,
                layout=layout, **_indexer_paged(bench),
            ),
        )  # fmt: skip

    return run


def _candidate_topk(bench: Bench) -> Sequence[Any]:
    blocks = bench.put(np.tile([0, 2, -1], (6, 1)), np.int32)
    return (
        candidate_topk(
            kv_cache=bench.cache(INDEXER_FP8), candidate_blocks=blocks, topk=4, candidate_block_size=3,
            **_indexer_paged(bench),
        ),
    )  # fmt: skip


CASES = (
    Case("fused_indexer_q_rope_quant", "not quantised", "indexer", (SCORES, SCORES), _indexer_queries),
    Case("fused_indexer_q_rope_quant", "mxfp4_rows", "indexer", (EQUAL, SCORES), _mxfp4_queries),
    Case("fp8_mqa_logits", "", "indexer", (SCORES,), _indexer_scores),
    Case("fp8_paged_mqa_logits", "", "indexer", (SCORES,), _indexer_paged_scores(INDEXER_FP8)),
    Case("fp8_paged_mqa_logits", "INDEXER_MXFP4", "indexer", (SCORES,), _indexer_paged_scores(INDEXER_MXFP4)),
    Case("get_paged_mqa_logits_metadata", "", "indexer", (EQUAL,), _indexer_schedule),
    Case("top_k_per_row", "", "indexer_topk", (EQUAL,), _top_k),
    Case("indexer_topk", "", "indexer", (EQUAL,), _indexer_topk),
    Case("indexer_topk", "candidate_blocks", "indexer", (EQUAL,) * 2, _indexer_blocks),
    Case("indexer_topk", "slots", "indexer", (EQUAL,) * 3, _indexer_slots),
    Case("select_candidate_blocks", "", "candidates", (EQUAL,), _candidate_blocks),
    Case("apply_candidate_mask", "", "candidates", (EQUAL,), _candidate_mask),
    Case("candidate_logits", "INDEXER_FP8", "candidates", (SCORES,), _candidate_scores(INDEXER_FP8)),
    Case("candidate_logits", "INDEXER_MXFP4", "candidates", (SCORES,), _candidate_scores(INDEXER_MXFP4)),
    Case("candidate_topk", "", "candidates", (EQUAL,), _candidate_topk),
)
