"""The attention layers of a replay: caches, and what a model would hand them in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..dispatch.backends import array_module
from ..dispatch.call import BFLOAT16
from ..layers.prefill_path import chunk_paths, first_tokens
from ..layers.sparse import CompressedCache, Observer, SparseMLALayer
from ..timing import Stopwatch
from .activations import Activations, apply_rope
from .blocks import BLOCK_TOKENS
from .indexer import Indexer
from .options import LAYER_RATIOS, ReplayOptions
from .step_batch import SWA_BLOCK, SWA_PAGES, Groups, StepBatch
from .traffic import bytes_moved

TOPK_RATIO = 4  # the ratio at which a token selects compressed rows; at 128 it takes all


@dataclass(frozen=True)
class LayerInputs:
    """What projections, compressor and indexer of a model make of a step's tokens. Q is in the caller's array.

    k           [num_tokens, 512] bfloat16, rotated
    compressed  cache, new rows and selection, or None for a window-only layer
    """

    k: Any
    compressed: CompressedCache | None


class Layer:
    """One attention layer.

    swa_cache         uint8 [num_blocks * 4, 64, 584 or 528], of the first of the run's formats
    compressed_cache  uint8 [num_blocks, 64 or 2, 584, 528 or 288], of the second; None for a window-only layer
    indexer           what selects compressed rows, with its cache of their keys; None but at ratio 4
    attends_alike     whether tokens of prompts go the way of decodes
    """

    attends_alike = False

    def __init__(self, index: int, name: str, options: ReplayOptions) -> None:
        self.name, self.index, self.ratio, self.topk = name, index, LAYER_RATIOS[name], options.topk
        self.xp = xp = array_module(options.backend)
        self.activations = Activations(options.seed, index, options.heads, xp)
        first, second = options.formats
        sink = self.activations.attn_sink
        self.attention = SparseMLALayer(self.ratio, options.topk, sink, layout=first, extra_layout=second)
        blocks, rows = options.num_blocks, BLOCK_TOKENS // self.ratio
        self.swa_cache = first.allocate(blocks * SWA_PAGES, SWA_BLOCK, xp)
        self.compressed_cache = self._allocate_compressed(blocks, rows) if self.ratio > 1 else None
        self.indexer = None
        if self.ratio == TOPK_RATIO:
            self.indexer = Indexer(options.seed, index, blocks, rows, options.topk, options.backend, xp)

    def _allocate_compressed(self, blocks: int, rows: int) -> Any:
        return self.attention.compressed_layout.allocate(blocks, rows, self.xp)

    def step(
        self, q: Any, inputs: LayerInputs, batch: StepBatch, metadata: Any, out: Any, options: ReplayOptions,
        observe: Observer,
    ) -> None:  # fmt: skip
        """Insert and attend: out [num_tokens, h, 512] bfloat16 written."""
        self.attention.step(
            q, inputs.k, self.swa_cache, metadata, inputs.compressed, out=out, prefill_path=options.prefill_path,
            backend=options.backend, observe=observe,
        )  # fmt: skip

    def moved(self, batch: StepBatch, metadata: Any, groups: Groups | None, options: ReplayOptions) -> dict[str, int]:
        """Bytes that each op of a step has to move."""
        topk = options.topk if self.ratio == TOPK_RATIO else None
        paths = list(chunk_paths(
            metadata, self.ratio, options.heads, topk, options.backend, self.attention.layout, options.prefill_path
        ))  # fmt: skip
        over_pages = [x.path == "pages" for x in paths for _ in range(x.prefills.start, x.prefills.stop)]
        return bytes_moved(
            batch, self.ratio, options.heads, options.window, options.topk, groups, over_pages, formats=options.formats,
            with_decodes=first_tokens(batch.num_decodes, self.ratio, paths) - batch.num_decodes,
        )  # fmt: skip

    @property
    def cache_bytes(self) -> int:
        """Bytes of the paged caches, padding of their pages included."""
        caches = [cache for cache in (self.swa_cache, self.compressed_cache) if cache is not None]
        return sum(cache.shape[0] * cache.strides[0] for cache in caches)

    def inputs(self, batch: StepBatch, groups: Groups | None, q: Any, stopwatch: Stopwatch) -> LayerInputs:
        """Make a step's rows.

        groups  the compressed rows that the step completes; None for a window-only layer
        q       [num_tokens, h, 512] bfloat16, written
        """
        xp, activations = self.xp, self.activations
        with stopwatch.measure((self.name, "activations")):
            rows = activations.k_rows(batch.token_keys)
            base = apply_rope(activations.q_rows(batch.token_keys), batch.positions, xp)
            activations.queries(base, q)
            k = apply_rope(rows, batch.positions, xp).astype(BFLOAT16)
            if groups is None:
                return LayerInputs(k, None)
            means = rows[:0]
            if len(groups.slots):
                rows = xp.concatenate([rows, activations.k_rows(groups.earlier_keys)])
                means = rows[xp.asarray(groups.members)].mean(axis=1)
            compressed_k = apply_rope(means, groups.positions, xp).astype(BFLOAT16)
            slots = xp.asarray(groups.slots)
        selected = None
        if self.indexer is not None:
            if len(means):
                with stopwatch.measure((self.name, "index k")):
                    self.indexer.insert(means, slots)
            visible = (batch.positions + 1) // self.ratio
            selected = self.indexer.select(batch, base, visible, stopwatch, self.name)
        return LayerInputs(k, CompressedCache(self.compressed_cache, batch.block_table, compressed_k, slots, selected))
