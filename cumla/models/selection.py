"""Selects rows for each token from the indexer's projected queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layers.selection import Candidates, IndexerInputs, select_rows
from ..layout import INDEXER_MXFP4, CacheLayout
from ..metadata.indexer import DeepseekV32IndexerMetadata
from ..ops.indexer import fused_indexer_q_rope_quant
from ..ops.indexer_topk import WORKSPACE_BYTES
from .caches import PLAIN_DTYPES
from .layer_spec import LayerSpec
from .scratch import Scratch

FLOAT32 = np.dtype(np.float32)


class Indexer:
    """The indexer of a layer, without its projections.

    Args:
        spec: of the layer
        layout: of the cache of keys: INDEXER_FP8, INDEXER_MXFP4, INDEXER_BF16 or INDEXER_F32. Queries are e4m3 for the
            first two, for MXFP4 keys with values rounded to MXFP4; otherwise they have the keys' type
        factors: SSMax's arguments of fused_indexer_q_rope_quant; empty without SSMax
    """

    def __init__(
        self, spec: LayerSpec, layout: CacheLayout, scratch: Scratch, backend: str | None, factors: dict[str, Any]
    ) -> None:
        self.factors = factors
        self.layout, self.scratch, self.backend = layout, scratch, backend
        self.rope_first, self.is_neox = spec.index_part == "first", spec.index_pairs == "halves"
        self.pool, self.hadamard = spec.pool, spec.keys == "pools"
        # Keys of compressed rows: contexts of a million positions.
        self.most_score_bytes = WORKSPACE_BYTES if spec.keys == "latents" else None

    def select(
        self,
        q: Any,
        weights: Any,
        k_cache: Any,
        metadata: DeepseekV32IndexerMetadata,
        positions: Any,
        token_to_req: Any,
        block_table: Any,
        slots: tuple[Any, Any] | None,
        is_valid_token: Any,
        out: Any,
        candidates: Candidates | None = None,
    ) -> Any:
        """Write and return out, int32 [T, topk]: rows counted within each token's request, in ascending order, then -1.
        With pooled keys [T, topk / pool], pools.

        Args:
            q, weights: of `queries`
            k_cache: of `layout`, with the rows that the step's tokens may see
            positions: [T] int32 or int64; token_to_req [T] int32
            block_table: [num_reqs, B] int32, of k_cache
            slots, is_valid_token, candidates: of `select_rows`
        """

        def memory(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            return self.scratch.shaped(name, shape, dtype, q)

        inputs = IndexerInputs(q, weights, k_cache, metadata, layout=self.layout)
        select_rows(
            inputs, positions, token_to_req, block_table, out, memory, self.backend, slots, is_valid_token, candidates,
            self.most_score_bytes, self.pool,
        )  # fmt: skip
        return out

    def queries(self, q: Any, weights: Any, positions: Any, cos_sin: Any) -> tuple[Any, Any]:
        """Rotated queries in the layout's type, and their weights with the scales folded in.

        Args:
            q: [T, heads, 128], as projected
            weights: [T, heads] float32, as projected
            cos_sin: float32 [max_position, 64]; None: no RoPE
        """
        quantized = self.layout.num_scales > 0
        dtype = np.dtype(np.uint8) if quantized else PLAIN_DTYPES[self.layout.value_type]
        out = (
            self.scratch.shaped("indexed_q", q.shape, dtype, q),
            self.scratch.shaped("indexed_weights", weights.shape, FLOAT32, q),
        )
        fused_indexer_q_rope_quant(
            positions, q, cos_sin, weights, rope_first=self.rope_first, is_neox=self.is_neox, quantize=quantized,
            q_format="mxfp4" if self.layout is INDEXER_MXFP4 else "fp8", hadamard=self.hadamard, **self.factors,
            out=out, backend=self.backend,
        )  # fmt: skip
        return out
