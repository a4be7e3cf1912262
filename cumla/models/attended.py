"""Attention over the rows that a layer's tokens select: one list of rows, or the window and a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..layers.selected_attention import Chosen, SelectedAttention
from ..layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from .context import LayerContext, StepContext
from .weights import WeightReader

FLOAT32 = np.dtype(np.float32)


class OneList:
    """Attention over the selected latent rows, with a sink if the layer has one."""

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        self.sink = get.vector("attn_sink") if layer.spec.sink else None

    def run(self, step: StepContext, q: Any, chosen: Chosen, o: Any, join: Callable[[], None]) -> None:
        layer = step.layer
        attention = SelectedAttention(
            step.caches.rows, layer.layouts.rows, layer.spec.softmax_scale, backend=layer.backend,
            observe=step.observe, attn_sink=self.sink, batch_invariant=layer.batch_invariant,
        )  # fmt: skip
        lse = step.array("lse", (len(q), q.shape[1], 1), FLOAT32)
        join()
        attention.attend(q, step.metadata.tokens, chosen, o, lse)


class WindowAndList:
    """Attention over the window's rows and the selected compressed rows, with a sink."""

    def __init__(self, layer: LayerContext, get: WeightReader) -> None:
        spec, layouts = layer.spec, layer.layouts
        self.sink = get.vector("attn_sink")
        self.sparse = SparseMLALayer(
            spec.ratio, max(spec.topk, 1), self.sink, layout=layouts.rows,
            extra_layout=layouts.compressed if spec.ratio else None, batch_invariant=layer.batch_invariant,
        )  # fmt: skip

    def run(self, step: StepContext, q: Any, chosen: Chosen, o: Any, join: Callable[[], None]) -> None:
        layer, compressed = step.layer, None
        workspace = LayerWorkspace(step.array("lse", (len(q), q.shape[1], 1), FLOAT32))
        if layer.spec.ratio:
            compressed = CompressedCache(
                step.caches.compressed, step.rows.block_table, topk_indices=chosen.topk_indices
            )
            if chosen.mapped:
                # Other layers read a shared selection: prefills do not write slots behind the decodes'.
                end = None if step.selection is None else chosen.mapped
                compressed = replace(compressed, decode_slots=chosen.slots[:end], decode_lens=chosen.lens[:end])
            elif chosen.slots is not None:
                workspace = replace(workspace, topk_indices=chosen.slots, topk_lens=chosen.lens)
        self.sparse.step(
            q, None, step.caches.window, step.metadata.tokens, compressed, out=o, workspace=workspace, join=join,
            backend=layer.backend, observe=step.observe,
        )  # fmt: skip
