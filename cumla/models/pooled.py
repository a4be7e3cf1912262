"""Compressed rows: pooled from a step's tokens and from earlier ones, whose states are saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..layout import CacheLayout
from ..ops.compressor import compress_and_insert
from ..ops.latents import compress_latents
from ..ops.norm_rope import norm_rope_and_insert
from .context import LayerContext, StepContext
from .layer_spec import LATENT
from .weights import WeightReader


@dataclass(frozen=True)
class Compressor:
    """The weights of a compressor without its projections, and the columns of its projections."""

    position_bias: Any
    norm_weight: Any
    columns: int


class Compressors:
    """V4's compressor of rows, and a compressor of the indexer's keys; states are in pages.

    Their products with the hidden states are float32, and independent of the layer's other work.
    """

    is_independent = True

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        prefixes = ("compressor.", "indexer.compressor.")[: 2 if layer.spec.keys == "compressor" else 1]
        self.wide = tuple(f"{prefix}{name}" for prefix in prefixes for name in ("wkv", "wgate"))
        self.parts: list[Compressor] = []
        for prefix in prefixes:
            bias, norm = get.vector(f"{prefix}ape"), get.vector(f"{prefix}norm.weight")
            self.parts.append(Compressor(bias, norm, 2 * bias.shape[1]))

    def run(self, step: StepContext, wide: Any) -> None:
        """Pool with both compressors in one launch, unless rows and keys have different slots, as on ranks."""
        own, *rest = self.parts
        caches, layouts, slots = step.caches, step.layer.layouts, step.rows.slot_mapping
        indexer: dict[str, Any] = {}
        for keys in rest:
            scores = wide[:, own.columns : own.columns + keys.columns]
            if slots is not step.row_slots:
                self.insert(step, scores, keys, caches.indexer_state, caches.indexer, slots, layouts.indexer)
                continue
            indexer = {
                "index_kv_score": scores, "index_position_bias": keys.position_bias,
                "index_norm_weight": keys.norm_weight, "index_state_cache": caches.indexer_state,
                "index_k_cache": caches.indexer,
            }  # fmt: skip
        scores = wide[:, : own.columns]
        self.insert(step, scores, own, caches.state, caches.compressed, step.row_slots, layouts.compressed, **indexer)

    def insert(
        self, step: StepContext, kv_score: Any, compressor: Compressor, states: Any, cache: Any, slots: Any,
        layout: CacheLayout, **indexer: Any,
    ) -> None:  # fmt: skip
        layer, rows, tokens = step.layer, step.rows, step.metadata.tokens
        compress_and_insert(
            kv_score, compressor.position_bias, compressor.norm_weight, states, rows.state_slot_mapping,
            rows.state_block_table, cache, slots, tokens.positions, tokens.token_to_req_indices, tokens.query_start_loc,
            layer.cos_sin, compress_ratio=layer.spec.ratio, eps=layer.spec.row_eps, layout=layout, **indexer,
            backend=layer.backend,
        )  # fmt: skip


class Latents:
    """V4.1's compressor: one or two positions become a latent row, of which index keys are projected, too."""

    is_independent = False

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.wide = tuple(f"compressor.{name}" for name in ("wkv", "wgate")[: layer.spec.ratio])
        self.norm = get.vector("compressor.norm.weight")

    def run(self, step: StepContext, wide: Any) -> Any:
        """Insert this step's compressed rows. Returns their latents, 0 where no row was completed."""
        layer, spec, rows = step.layer, step.layer.spec, step.rows
        latents = step.array("latents", (len(wide), LATENT))
        latents.fill(0)
        ring: dict[str, Any] = {}
        if spec.states == "ring":
            caches = step.caches
            ring = {
                "positions": step.metadata.positions, "query_start_loc": step.metadata.tokens.query_start_loc,
                "state_cache": caches.ring, "restart_rows": caches.restart_rows,
                "restart_positions": caches.restart_positions,
            }  # fmt: skip
        compress_latents(
            wide[:, : spec.ratio * LATENT], self.norm, step.metadata.ring_slot_mapping if ring else rows.slot_mapping,
            latents, compress_ratio=spec.ratio, **ring, eps=spec.row_eps, round_pooled=spec.round_pooled,
            backend=layer.backend,
        )  # fmt: skip
        norm_rope_and_insert(
            latents, step.caches.compressed, step.row_slots, rows.row_positions, layer.cos_sin,
            round_rows=spec.round_rows, layout=layer.layouts.compressed, backend=layer.backend,
        )  # fmt: skip
        return latents
