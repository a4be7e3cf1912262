"""Index keys: of tokens, of pools of tokens, or of the latents of compressed rows."""

from __future__ import annotations

from typing import Any

from ..arrays import dlpack
from ..ops.key_pools import indexer_kpool_and_insert
from ..ops.norm_rope import apply_rope, indexer_knorm_rope_and_insert
from ..ops.sparse_cache import indexer_k_quant_and_cache
from .context import LayerContext, StepContext
from .layer_spec import INDEX_DIM
from .products import multiply
from .weights import WeightReader


class TokenKeys:
    """A key a token: a LayerNorm of a projection of its hidden state, rotated."""

    low = ("indexer.wk",)

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.norm, self.bias = get.vector("indexer.k_norm.weight"), get.vector("indexer.k_norm.bias")

    def insert(self, step: StepContext, low: dict[str, Any], latents: Any, qr: Any) -> None:
        layer, spec = step.layer, step.layer.spec
        slots = dlpack.borrow(step.rows.slot_mapping, "slot_mapping")
        with step.observe("insert"):
            indexer_knorm_rope_and_insert(
                low["indexer.wk"], self.norm, self.bias, step.caches.indexer, slots, step.metadata.positions,
                layer.index_cos_sin, eps=layer.spec.key_eps, rope_first=spec.index_part == "first",
                is_neox=spec.index_pairs == "halves", layout=layer.layouts.indexer, backend=layer.backend,
            )  # fmt: skip


class PooledKeys:
    """A key for several tokens: a mean of their normed keys, weighted by gates. A ring has earlier steps' tokens."""

    low = ("indexer.wk", "indexer.kpool_gate")

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.norm, self.bias = get.vector("indexer.k_norm.weight"), get.vector("indexer.k_norm.bias")
        self.ape = get.vector("indexer.kpool_ape")

    def insert(self, step: StepContext, low: dict[str, Any], latents: Any, qr: Any) -> None:
        layer, caches, tokens = step.layer, step.caches, step.metadata.tokens
        k, gate = (low[name] for name in self.low)
        assert step.rows.indexer is not None
        with step.observe("insert"):
            indexer_kpool_and_insert(
                k, gate, self.norm, self.bias, self.ape, caches.ring, step.metadata.ring_slot_mapping, caches.indexer,
                step.rows.indexer.slot_mapping, tokens.positions, tokens.query_start_loc,
                restart_rows=caches.restart_rows, restart_positions=caches.restart_positions,
                eps=layer.spec.key_eps, layout=layer.layouts.indexer, backend=layer.backend,
            )  # fmt: skip


class LatentKeys:
    """A key a compressed row: an RMSNorm of a projection of its latent, rotated."""

    low = ()

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.k, self.norm = layer.matrix(get, "indexer.wk"), get.vector("indexer.k_norm.weight")

    def insert(self, step: StepContext, low: dict[str, Any], latents: Any, qr: Any) -> None:
        """One launch norms the queries' latent and the keys."""
        layer, rows = step.layer, step.rows
        with step.observe("compress"):
            keys = step.array("index_k", (len(latents), INDEX_DIM))
            multiply(latents, self.k, keys, layer.backend, layer.blocks)
            step.norm(qr, keys, self.norm)
            heads = keys[:, None]
            apply_rope(heads, rows.row_positions, layer.cos_sin, out=heads, backend=layer.backend)
            tile = layer.layouts.indexer.scale_tile or INDEX_DIM
            indexer_k_quant_and_cache(keys, step.caches.indexer, rows.slot_mapping, tile, backend=layer.backend)
