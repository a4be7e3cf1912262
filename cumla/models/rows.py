"""The rows that a layer writes: latent rows, or rows of its window."""

from __future__ import annotations

from typing import Any

from ..layout import V32_FP8, V32_NOPE_FP8
from ..ops.dense_cache import concat_and_cache_mla
from ..ops.norm_rope import apply_rope, norm_rope_and_insert, qnorm_rope_and_insert
from ..ops.sparse_cache import quantize_and_insert_k_cache
from .context import LayerContext, StepContext
from .layer_spec import LATENT
from .weights import WeightReader


class LatentRows:
    """Rows of a normed latent of 512 values, and of rotated values behind it unless the layer has no RoPE."""

    low = ("wkv_a",)

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.norm = get.vector("kv_norm.weight")
        self.cache_dtype = "fp8_ds_mla" if layer.layouts.rows is V32_FP8 else "auto"

    def finish(self, step: StepContext, q: Any, kv: Any) -> None:
        """Insert rows [T, 512 + rope_dim], which are normed. Queries are rotated already."""
        layer, rows = step.layer, kv[:, None]
        with step.observe("insert"):
            if not layer.spec.rope_dim:
                self.insert_unrotated(step, kv)
                return
            apply_rope(
                rows, step.metadata.positions, layer.cos_sin, is_neox=layer.spec.rope_pairs == "halves", out=rows,
                backend=layer.backend,
            )  # fmt: skip
            concat_and_cache_mla(
                kv[:, :LATENT], kv[:, LATENT:], step.caches.rows, step.row_slots, self.cache_dtype,
                backend=layer.backend,
            )  # fmt: skip

    def insert_unrotated(self, step: StepContext, kv: Any) -> None:
        layer, cache, slots = step.layer, step.caches.rows, step.row_slots
        if layer.layouts.rows is V32_NOPE_FP8:
            quantize_and_insert_k_cache(kv, cache, slots, layout=V32_NOPE_FP8, backend=layer.backend)
            return
        norm_rope_and_insert(  # cos_sin rotates by 0
            kv, cache, slots, step.metadata.positions, layer.cos_sin, layout=layer.layouts.rows, backend=layer.backend
        )


class NoRows:
    """A layer that reads another layer's latent rows."""

    low: tuple[str, ...] = ()
    norm = None

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        pass

    def finish(self, step: StepContext, q: Any, kv: None) -> None:
        pass


class WindowRows:
    """Rows of 512 values of the window, the last 64 rotated, which all heads share as key and value."""

    low = ("wkv",)

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.norm = get.vector("kv_norm.weight")

    def finish(self, step: StepContext, q: Any, kv: Any) -> None:
        """Rotate queries in place, and insert rows [T, 512]. One launch does both where heads have a norm."""
        layer, spec, tokens = step.layer, step.layer.spec, step.metadata.tokens
        with step.observe("insert"):
            if spec.norm_heads:
                qnorm_rope_and_insert(
                    q, kv, step.caches.window, tokens.slot_mapping, tokens.positions, layer.cos_sin, eps=spec.q_eps,
                    layout=layer.layouts.rows, out=q, backend=layer.backend,
                )  # fmt: skip
                return
            apply_rope(q, tokens.positions, layer.cos_sin, out=q, backend=layer.backend)
            self.insert(step, kv, normed=not layer.norms_with_keys)

    def insert(self, step: StepContext, kv: Any, normed: bool) -> None:
        """Insert rows without queries; the insert norms them if they are not normed."""
        layer, spec, tokens = step.layer, step.layer.spec, step.metadata.tokens
        norm_rope_and_insert(
            kv, step.caches.window, tokens.slot_mapping, tokens.positions, layer.cos_sin,
            weight=None if normed else self.norm, eps=spec.row_eps, round_rows=spec.round_rows,
            layout=layer.layouts.rows, backend=layer.backend,
        )  # fmt: skip
