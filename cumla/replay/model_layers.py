"""Attention layers of models in a replay, from hidden states to their output: one of each kind of a model.

Hidden states depend on the tokens, like the sparse layers' rows. A check compares the attention with float64: with the
queries that the layer computed, over the rows in its caches.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from ..arrays.memory import to_host
from ..dispatch.backends import array_module
from ..kernels.reference.sparse_attention import attend
from ..layers.sparse import Observer
from ..models import STATE_BLOCK_SIZES, LayerCaches, SharedSelection
from ..models.caches import CacheFormat
from ..timing import Stopwatch
from .activations import token_rows
from .blocks import BLOCK_TOKENS
from .models import attention_of, is_tiny, model_serving, reach_of, serving_config
from .options import MAX_RUNNING, MODEL_LAYERS, MODEL_OF, V4_RATIOS, V41_CACHE_FORMATS, V41_RATIOS, ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_PAGES, StepBatch
from .verify import Sample, cached_rows, measured

PARTS = {"project": "projections"}  # new names of parts whose names mean something else in other layers
CACHE_FORMAT: CacheFormat = "fp8"  # of models other than V4.1


class Recorded(NamedTuple):
    """A layer's results for one token of a step.

    Attributes:
        q: [h, d], queries
        o: [h, 512], attention's output, before any inverse rotation
        rows: rows that the token selected, counted within the request, -1 for none; None if the token takes all rows
    """

    q: Any
    o: Any
    rows: Any


class ModelLayer:
    """One layer with its caches.

    Attributes:
        ratio: of its compressed rows
        owner: the layer whose rows this one reads, possibly itself
        selection: that layers of the model share; None for a model without shared selections
        attends_alike: whether prefill tokens use the decode kernel
        recorded: results of the last step, by token
    """

    attends_alike, is_queued, is_checked = False, True, True
    ratio = 1
    selection: SharedSelection | None = None
    caches: Any
    owner: ModelLayer

    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any], rank: int = 0,
        **formats: Any,
    ) -> None:  # fmt: skip
        self.index, self.name, self.model, self.seed = index, name, MODEL_OF[name], options.seed
        self.xp, self.number = array_module(options.backend), MODEL_LAYERS[self.model].index(name)
        formats["batch_invariant"] = options.batch_invariant
        self.attention = attention_of(
            self.model, self.number, is_tiny(options), options.heads, options.topk, options.window,
            options.seed + index, options.backend, reach_of(options, longest), rank, tuple(formats.items()),
        )  # fmt: skip
        self.config = self.attention.config
        source = self.attention.spec.row_source
        self.owner = self if source in (None, self.number) else before[len(before) - self.number + source]
        self.recorded: dict[int, Recorded] = {}

    def inputs(self, batch: StepBatch, shared: Any, stopwatch: Stopwatch) -> Any:
        with stopwatch.measure((self.name, "activations")):
            return self.hidden(batch.token_keys)

    def hidden(self, token_keys: np.ndarray) -> Any:
        """Hidden states of tokens with these keys, [n, hidden_size] of the layer's activations."""
        rows = token_rows(token_keys, self.seed, self.index, self.config.hidden_size, self.xp)
        return rows.astype(self.attention.activations)

    def step(
        self, batch: StepBatch, hidden: Any, shared: dict[str, Any], observe: Observer, picked: SequenceOf[int] = ()
    ) -> Any:
        """Out [num_tokens, hidden_size].

        Args:
            picked: tokens to check: their copies are queued before the timing of the output begins
        """

        def observed(part: str) -> Any:
            if part == "output":
                self.recorded = {token: self._record(batch.num_tokens, token) for token in picked}
            return observe(PARTS.get(part, part))

        return self.run(batch, hidden, shared[self.model], observed)

    def run(self, batch: StepBatch, hidden: Any, metadata: Any, observe: Observer) -> Any:
        return self.attention.step(hidden, self.caches, metadata, self.selection, observe=observe)

    def _record(self, tokens: int, token: int) -> Recorded:
        heads = self.config.num_attention_heads
        q = self.scratch("q", (tokens, heads, self.attention.spec.row_dim), self.attention.activations)
        o = self.scratch("o", (tokens, heads, 512), self.attention.activations)
        rows = self.selected(tokens)
        return Recorded(q[token].copy(), o[token].copy(), None if rows is None else rows[token].copy())

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of the last step."""
        return self.attention.scratch.shaped(name, shape, np.dtype(dtype), self.attention.cos_sin)

    def selected(self, tokens: int) -> Any:
        """The rows that a step's tokens selected, [tokens, topk] int32; None for a layer without selection."""
        return None

    def moved(self, batch: StepBatch, hidden: Any, shared: Any) -> dict[str, int]:
        return {}

    def check(self, step: int, batch: StepBatch, hidden: Any, out: Any, kind: str, token: int) -> Sample:
        """Check the attention of one token of a finished step."""
        scheduled, position = batch.at(token)
        rows = self.attended_rows(scheduled.sequence, position, self.rows_of(token, position))
        q, o = (to_host(x).astype(np.float64) for x in self.recorded[token][:2])
        sinks = getattr(self.attention, "sinks", None)
        scale = self.attention.spec.softmax_scale
        exact, _, _ = attend(q, rows, None if sinks is None else to_host(sinks), scale)
        kind = "decode" if self.attends_alike else kind
        largest = float(np.abs(rows).max(initial=1.0)) if kind == "prefill" else 1.0
        return measured(step, self.name, scheduled.sequence.index, position, kind, o, exact, None, largest)

    def rows_of(self, token: int, position: int) -> np.ndarray:
        """The rows, counted within the request, that a recorded token attends to in addition to its window."""
        rows = self.recorded[token].rows
        if rows is None:
            return np.arange((position + 1) // self.ratio if self.ratio > 1 else 0)
        rows = to_host(rows).astype(np.int64)
        return rows[rows >= 0]

    def attended_rows(self, sequence: Sequence, position: int, rows: np.ndarray) -> np.ndarray:
        """The caches' rows of the window and these rows, float64 [n, row_width]."""
        window = np.arange(max(position - self.config.sliding_window + 1, 0), position + 1)
        window_layout, layout = self.layouts
        found = cached_rows(self.caches.window, sequence.slots(window), self.xp, window_layout)
        if not len(rows):
            return found
        slots = sequence.slots(rows, BLOCK_TOKENS // self.ratio)
        return np.concatenate([found, cached_rows(self.caches.compressed, slots, self.xp, layout)])

    @property
    def layouts(self) -> tuple[Any, Any]:
        """Formats of the window's cache and of the compressed rows."""
        return self.attention.layouts.rows, self.attention.layouts.compressed

    @property
    def cache_bytes(self) -> int:
        """Bytes of the paged caches and states that the layer owns, including the padding of pages."""
        others = [] if self.owner is self else [id(cache) for cache in vars(self.owner.caches).values()]
        owned = [cache for cache in vars(self.caches).values() if cache is not None and id(cache) not in others]
        return sum(map(cache_bytes, owned))


def cache_bytes(cache: Any) -> int:
    """Bytes of a paged cache, including the padding of pages."""
    return int(cache.shape[0] * cache.strides[0])


class V4Layer(ModelLayer):
    """One layer of V4."""

    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any] = (), rank: int = 0
    ) -> None:
        super().__init__(index, name, options, longest, before, rank, cache_format=CACHE_FORMAT)
        self.ratio, blocks = V4_RATIOS[name], options.num_blocks
        states = {
            f"states{ratio}": blocks * (BLOCK_TOKENS // size)
            for ratio, size in STATE_BLOCK_SIZES.items()
        }  # fmt: skip
        self.caches = LayerCaches.allocate(
            self.attention.spec, serving_config(options, (self.ratio,), longest),
            {"window": blocks * SWA_PAGES, "compressed": blocks, **states}, cache_format=CACHE_FORMAT, xp=self.xp,
        )  # fmt: skip

    def selected(self, tokens: int) -> Any:
        return self.scratch("topk_indices", (tokens, self.config.index_topk), np.int32) if self.ratio == 4 else None


class LatentLayer(ModelLayer):
    """One layer of V3.2, GLM, Mistral Large 4 or Hy4, which attends to selected latent rows."""

    attends_alike = True

    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any] = (), rank: int = 0
    ) -> None:
        super().__init__(index, name, options, longest, before, rank, cache_format=CACHE_FORMAT)
        serving = model_serving(self.config, options, longest)
        if self.number:
            self.selection = before[-1].selection
        elif len(MODEL_LAYERS[self.model]) > 1:
            self.selection = SharedSelection(self.config.specs(), serving, self.xp)
        self.caches = LayerCaches.allocate(
            self.attention.spec, serving, {"rows": options.num_blocks * SWA_PAGES, "rings": MAX_RUNNING},
            owner=None if self.owner is self else self.owner.caches, cache_format=CACHE_FORMAT, xp=self.xp,
        )  # fmt: skip

    def selected(self, tokens: int) -> Any:
        if self.selection is not None:
            return self.selection.topk_indices[:tokens]
        return self.scratch("topk_indices", (tokens, self.attention.spec.selected_keys), np.int32)

    def rows_of(self, token: int, position: int) -> np.ndarray:
        found, pool = super().rows_of(token, position), self.attention.spec.pool
        if pool == 1:
            return found
        tokens = (found[:, None] * pool + np.arange(pool)).ravel()
        return np.concatenate([tokens, np.arange((position + 1) // pool * pool, position + 1)])

    def attended_rows(self, sequence: Sequence, position: int, rows: np.ndarray) -> np.ndarray:
        return cached_rows(self.caches.rows, sequence.slots(rows), self.xp, self.attention.layouts.rows)


class V41Layer(ModelLayer):
    """One layer of V4.1, with the caches that it owns and the caches of its rows' owner.

    Six layers represent the model's forty. Two own compressed rows, of ratios 2 and 1; the second owner also chooses
    candidate blocks, from which the layer after it selects.
    """

    def __init__(
        self, index: int, name: str, options: ReplayOptions, longest: int, before: SequenceOf[Any] = (), rank: int = 0
    ) -> None:
        formats: dict[str, Any] = {
            "cache_format": V41_CACHE_FORMATS[options.v41_layout], "key_format": options.index_keys
        }  # fmt: skip
        super().__init__(index, name, options, longest, before, rank, **formats)
        serving, blocks = model_serving(self.config, options, longest), options.num_blocks
        if self.number:
            self.selection = before[-1].selection
        else:
            self.selection = SharedSelection(self.config.specs(), serving, self.xp)
        self.ratio = V41_RATIOS[name]
        self.caches = LayerCaches.allocate(
            self.attention.spec, serving, {"window": blocks * SWA_PAGES, "compressed": blocks, "rings": MAX_RUNNING},
            owner=None if self.owner is self else self.owner.caches, xp=self.xp, **formats,
        )  # fmt: skip

    def selected(self, tokens: int) -> Any:
        assert self.selection is not None
        return self.selection.topk_indices[:tokens] if self.ratio else None
