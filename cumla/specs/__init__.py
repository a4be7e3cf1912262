"""One spec an operation, a file a family: its arrays, results, inputs by size, bounds and kernels."""

from __future__ import annotations

from typing import Any

from . import (
    advance,
    blocks,
    candidates,
    compressor,
    dense_attention,
    dense_cache,
    indexer,
    indexer_topk,
    indices,
    key_pools,
    latents,
    linear,
    norm_rope,
    prefill_rows,
    residency,
    shards,
    spans,
    sparse_attention,
    sparse_cache,
)
from .spec import OperationSpec

FAMILIES: tuple[Any, ...] = (
    sparse_cache, prefill_rows, norm_rope, latents, key_pools, compressor, linear, dense_cache, blocks, spans,
    residency, advance, indices, indexer, indexer_topk, candidates, sparse_attention, dense_attention, shards,
)  # fmt: skip
SPECS: dict[str, OperationSpec] = {spec.name: spec for family in FAMILIES for spec in family.SPECS}
