"""Specs of the indexer's top-k."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import EQUAL
from ..dispatch.call import BOOL, FLOAT32, INT32
from ..dispatch.debug_checks import candidates, indexer
from ..dispatch.debug_checks import indexer_topk as checks
from ..layout import INDEXER_FP8, CacheLayout
from ..ops.indexer_topk import CANDIDATE_BLOCK, WORKSPACE_BYTES, indexer_topk, logits_row_bytes, top_k_per_row
from ..ops.indexer_topk import blocks_of as blocks_in
from ..ops.indices import pooled_width
from .indexer import KV_SCALES, LENGTHS, PACKED, PAGED, STARTS, packed, packed_width, paged, paged_width
from .inputs import Inputs
from .spec import Array, OperationSpec, Result, Variant, shape

COLUMNS = {"row_starts": STARTS, "row_ends": LENGTHS, "seq_lens": LENGTHS}  # which a row of scores has
WRITTEN = Array(INT32, "out")


def topk_of(x: Inputs) -> int:
    return x.choose(x.size.topk, 0, 1, 512, 2048, 5000)


def columns(x: Inputs) -> dict[str, Any]:
    """The columns of scores."""
    starts, ends = x.ranges(x.size.tokens, x.size.keys)
    seen = x.choose({"row_ends": ends}, {"row_starts": starts, "row_ends": ends}, {"seq_lens": ends})
    return {"logits": x.scores(x.size.tokens, x.size.keys), **seen}


def choice(x: Inputs) -> dict[str, Any]:
    return {**columns(x), "topk": topk_of(x)}


def over_keys(x: Inputs, blocks: int = 0) -> dict[str, Any]:
    """blocks: candidate blocks to write as well."""
    return {**packed(x), "topk": topk_of(x), **blocks_of(x, x.size.tokens, blocks)}


def over_pages(
    x: Inputs, layout: CacheLayout = INDEXER_FP8, next_n: int = 2, blocks: int = 0, with_slots: bool = False,
    pool: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """blocks: candidate blocks to write as well; with_slots: slots of the rows, too; pool: rows of a key."""
    scores, topk = paged(x, layout, next_n), topk_of(x)
    rows = len(scores["weights"])
    scores |= {"kv": scores.pop("kv_cache"), "topk": topk, **blocks_of(x, rows, blocks)}
    if with_slots:
        topk = scores["topk"] = max(topk, 1) if pool > 1 else topk
        slots = x.unwritten(rows, pooled_width(topk, pool), dtype=np.int32), x.unwritten(rows, dtype=np.int32)
        scores |= {"slots": slots, "is_valid_token": x.valid(rows)}
    if pool > 1:
        requests, next_n = scores["q"].shape[:2]
        ends = x.newest(x.size.context * pool, requests, next_n)
        scores |= {
            "context_lens": x.put((ends + 1) // pool, np.int32), "positions": x.put(ends.reshape(-1), np.int32),
            "slot_block_table": x.table(requests, x.size.context), "slot_block_size": pool * x.size.block_size,
            "pool": pool,
        }  # fmt: skip
    return scores


def blocks_of(x: Inputs, rows: int, count: int) -> dict[str, Any]:
    return {"candidate_blocks": x.unwritten(rows, count, dtype=np.int32)} if count else {}


def choice_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    rows, _ = shape(arguments, "logits", "M", "N")
    return (Result((rows, arguments["topk"]), "int32"),)


def topk_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    *tokens, _, _ = arguments["q"].shape
    return (Result((math.prod(tokens), arguments["topk"]), "int32"),)


def bounded_scratch(arguments: Mapping[str, Any], rows: int, width: int, block_columns: int = 0) -> int:
    """Bytes for as many float32 rows at a time as fit into `max_workspace_bytes`, and for their blocks' scores."""
    row_bytes = logits_row_bytes(width)
    of_blocks = logits_row_bytes(block_columns) if block_columns else 0
    most = max(arguments.get("max_workspace_bytes", WORKSPACE_BYTES), row_bytes)
    if block_columns:
        most = most // row_bytes * (row_bytes + of_blocks)
    return int(min(most, rows * (row_bytes + of_blocks)))


def topk_scratch(arguments: Mapping[str, Any]) -> int:
    is_paged = arguments.get("block_table") is not None
    width = paged_width(arguments, "kv") if is_paged else packed_width(arguments)
    has_blocks = arguments.get("candidate_blocks") is not None
    columns = blocks_in(int(width), arguments.get("candidate_block_size", CANDIDATE_BLOCK)) if has_blocks else 0
    return bounded_scratch(arguments, math.prod(arguments["q"].shape[:-2]), int(width), columns)


SPECS = (
    OperationSpec(
        top_k_per_row, "indexer_topk", {"logits": Array(FLOAT32), **COLUMNS}, (Variant("", choice),),
        checks.top_k_per_row, results=choice_results, bounds=(EQUAL,), outputs=("out",),
    ),
    OperationSpec(
        indexer_topk, "indexer",
        {
            **PACKED, "kv_scales": KV_SCALES, "context_lens": PAGED["context_lens"],
            "block_table": PAGED["block_table"], "schedule_metadata": STARTS, "slots": WRITTEN,
            "is_valid_token": Array(BOOL), "slot_block_table": PAGED["block_table"],
            "positions": Array(INT32, holds="positions"), "candidate_blocks": WRITTEN,
        },
        (
            Variant("", over_pages), Variant("candidate_blocks", functools.partial(over_pages, blocks=2)),
            Variant("slots", functools.partial(over_pages, with_slots=True)),
            Variant("pool", functools.partial(over_pages, with_slots=True, pool=4)), Variant("cu_seqlen_ks", over_keys),
        ),
        (
            indexer.paged_mqa_logits, indexer.mqa_logits, candidates.paged_logits_and_blocks,
            candidates.select_candidate_blocks, checks.top_k_per_row,
        ),
        results=topk_results, bounds=(EQUAL,), outputs=("out",),
        eager=(
            "slots", "is_valid_token", "slot_block_table", "slot_block_size", "pool", "positions", "candidate_blocks",
            "candidate_block_size",
        ),
        scratch=topk_scratch, plan=None,
    ),
)  # fmt: skip
