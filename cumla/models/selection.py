"""Selects rows for each token from the indexer's projected queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layers.selected_attention import Chosen
from ..layers.selection import IndexerInputs, select_rows
from ..layout import INDEXER_MXFP4
from ..ops.indexer import fused_indexer_q_rope_quant
from ..ops.indexer_topk import WORKSPACE_BYTES
from .attended import FLOAT32
from .caches import PLAIN_DTYPES
from .context import LayerContext, StepContext
from .queries import head_factors
from .weights import WeightReader


class Indexer:
    """The indexer of a layer, without its projections.

    Queries are e4m3 for INDEXER_FP8 and INDEXER_MXFP4 keys, for MXFP4 with values rounded to MXFP4; otherwise they have
    the keys' type.
    """

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.factors = head_factors(get, "indexer.") if layer.spec.position_scale else {}
        # Keys of compressed rows: contexts of a million positions.
        self.most_score_bytes = WORKSPACE_BYTES if layer.spec.keys == "latents" else None

    def queries(self, step: StepContext, q: Any, weights: Any) -> tuple[Any, Any]:
        """Rotated queries, and their weights with the scales folded in.

        Args:
            q: [T, heads, 128], as projected
            weights: [T, heads] float32, as projected
        """
        layer, spec, layout = step.layer, step.layer.spec, step.layer.layouts.indexer
        quantized = layout.num_scales > 0
        dtype = np.dtype(np.uint8) if quantized else PLAIN_DTYPES[layout.value_type]
        out = step.array("indexed_q", q.shape, dtype), step.array("indexed_weights", weights.shape, FLOAT32)
        fused_indexer_q_rope_quant(
            step.metadata.positions, q, layer.index_cos_sin, weights, rope_first=spec.index_part == "first",
            is_neox=spec.index_pairs == "halves", quantize=quantized,
            q_format="mxfp4" if layout is INDEXER_MXFP4 else "fp8", hadamard=spec.keys == "pools", **self.factors,
            out=out, backend=layer.backend,
        )  # fmt: skip
        return out

    def select(self, step: StepContext, q: Any, weights: Any, chosen: Chosen) -> Any:
        """Write and return the rows or pools of `chosen`, in ascending order, and the slots of its mapped tokens.

        Args:
            q, weights: of `queries`
        """
        layer, tokens, rows, shared = step.layer, step.metadata.tokens, step.rows, step.selection
        assert rows.indexer is not None
        inputs = IndexerInputs(q, weights, step.caches.indexer, rows.indexer, layout=layer.layouts.indexer)
        select_rows(
            inputs, tokens.positions, tokens.token_to_req_indices, rows.block_table, chosen.topk_indices, step.array,
            layer.backend, (chosen.slots[: chosen.mapped], chosen.lens[: chosen.mapped]) if chosen.mapped else None,
            tokens.is_valid_token, None if shared is None else shared.candidates(layer.spec), self.most_score_bytes,
            layer.spec.pool,
        )  # fmt: skip
        return chosen.topk_indices
