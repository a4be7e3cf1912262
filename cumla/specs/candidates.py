"""Specs of the candidate blocks of V4.1's indexer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..bounds import EQUAL, SCORES
from ..dispatch.call import FLOAT32, INT32
from ..dispatch.debug_checks import candidates as checks
from ..layout import INDEXER_FP8, INDEXER_MXFP4, CacheLayout
from ..ops import candidates
from ..ops.candidates import apply_candidate_mask, candidate_logits, candidate_topk, select_candidate_blocks
from .indexer import PAGED, paged
from .indexer_topk import COLUMNS, bounded_scratch, columns, topk_of
from .inputs import Inputs
from .spec import Array, OperationSpec, Result, Variant, shape

BLOCKS = Array(INT32, holds="entries")
BLOCK = 3  # positions of a block


def select(x: Inputs, count: int = 4) -> dict[str, Any]:
    return {**columns(x), "topk_blocks": count, "candidate_block_size": x.choose(candidates.CANDIDATE_BLOCK, BLOCK)}


def mask(x: Inputs) -> dict[str, Any]:
    return {**columns(x), "candidate_blocks": x.entries(12, x.size.tokens, 3), "with_nan": x.choose(False, True)}


def logits(x: Inputs, layout: CacheLayout) -> dict[str, Any]:
    scores = paged(x, layout)
    return {**scores, "candidate_blocks": x.entries(4, len(scores["weights"]), 2), "candidate_block_size": BLOCK}


def choice(
    x: Inputs, layout: CacheLayout = INDEXER_FP8, next_n: int = 2, count: int = 3, block: int = BLOCK
) -> dict[str, Any]:
    """count: blocks of a query; block: positions of each."""
    scores = paged(x, layout, next_n)
    blocks = x.blocks(len(scores["weights"]), count, -(-x.size.context // block))
    return {
        **scores, "candidate_blocks": blocks, "topk": topk_of(x), "candidate_block_size": block,
        "batch_invariant": x.choose(False, True),
    }  # fmt: skip


def block_size(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("candidate_block_size", candidates.CANDIDATE_BLOCK))


def select_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    rows, _ = shape(arguments, "logits", "M", "N")
    return (Result((rows, arguments.get("topk_blocks", candidates.TOPK_BLOCKS)), "int32"),)


def select_scratch(arguments: Mapping[str, Any]) -> int:
    rows, width = shape(arguments, "logits", "M", "N")
    return bounded_scratch(arguments, rows, candidates.blocks_of(width, block_size(arguments)))


def logits_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, blocks = shape(arguments, "candidate_blocks", "T", "K")
    return (Result((tokens, blocks * block_size(arguments)), "float32"),)


def choice_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, _ = shape(arguments, "candidate_blocks", "T", "K")
    return (Result((tokens, arguments["topk"]), "int32"),)


def choice_scratch(arguments: Mapping[str, Any]) -> int:
    tokens, blocks = shape(arguments, "candidate_blocks", "T", "K")
    return bounded_scratch(arguments, tokens, blocks * block_size(arguments))


OF_BLOCKS = {"q": PAGED["q"], "kv_cache": PAGED["kv_cache"], "weights": PAGED["weights"], "candidate_blocks": BLOCKS,
             **PAGED}  # fmt: skip
SPECS = (
    OperationSpec(
        select_candidate_blocks, "candidates", {"logits": Array(FLOAT32), **COLUMNS}, (Variant("", select),),
        checks.select_candidate_blocks, results=select_results, bounds=(EQUAL,), outputs=("out",),
        scratch=select_scratch, plan=None,
    ),
    OperationSpec(
        apply_candidate_mask, "candidates", {"logits": Array(FLOAT32, "in out"), "candidate_blocks": BLOCKS, **COLUMNS},
        (Variant("", mask),), checks.apply_candidate_mask,
    ),
    OperationSpec(
        candidate_logits, "candidates", OF_BLOCKS,
        tuple(Variant(x.name, functools.partial(logits, layout=x)) for x in (INDEXER_FP8, INDEXER_MXFP4)),
        checks.candidate_logits, results=logits_results, bounds=(SCORES,), outputs=("out",),
    ),
    OperationSpec(
        candidate_topk, "candidates", OF_BLOCKS, (Variant("", choice),), checks.candidate_logits,
        results=choice_results, bounds=(EQUAL,), outputs=("out",), scratch=choice_scratch, plan=None,
    ),
)  # fmt: skip
