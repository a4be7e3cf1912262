"""Whole layers of a replay against float64: a sampled token, from its hidden state to the layer's output.

Two comparisons for each token. The attention's output is compared with attention in float64 of the queries that the
layer made, over the rows that the caches hold; this has the bounds of the attention kernels. The layer's output is
compared with the whole layer in float64, from the hidden state through the layer's weights; its bound covers the
roundings of the activations' type. Both read the rows that the indexer selected. Rows of windows and of V3.2 are also
computed again from hidden states, which gives the cost of FP8; compressed rows are read from the caches alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.memory import to_host
from ..kernels.reference.rows import read_tokens
from ..kernels.reference.sparse_attention import attend
from ..kernels.types.segments import Pages
from ..layout import CacheLayout
from ..models.deepseek_v32 import LATENT, LATENT_NORM_EPS
from .activations import token_rows
from .blocks import BLOCK_TOKENS
from .options import WHOLE_RATIOS
from .scheduler import Sequence
from .step_batch import StepBatch
from .verify import Sample, measured
from .whole import V32, WholeLayer

# Relative root mean square error of a token's output, by the activations' type. On the way from a hidden state
# bfloat16 rounds seven times, each by 2^-9 / sqrt(3) in the mean square: 0.3% together, and again as much through the
# softmax weights. float32 sums of thousands of products are off by
# about 2^-20.
LAYER_BOUNDS = {"bfloat16": 2.0**-6, "float32": 2.0**-17}


class Recorded(NamedTuple):
    """What one step's layer computed on the way, host arrays of one token.

    token  its place in the step
    kind   "decode" or "prefill": the kernel that attended
    q      [h, d], queries as attended
    o      [h, 512], what attention gave, before any inverse rotation
    rows   rows that the indexer selected, counted within the request; None where a layer has no indexer
    """

    token: int
    kind: str
    q: np.ndarray
    o: np.ndarray
    rows: np.ndarray | None


class Recorder:
    """Copies of the sampled tokens, taken between a layer's attention and its output's projection.

    The copies are queued before the time of the output begins, and read after the step.
    """

    def __init__(self, layer: WholeLayer, batch: StepBatch, picked: list[tuple[str, int]]) -> None:
        self._layer, self._batch, self._picked = layer, batch, picked
        self._copies: list[tuple[Any, Any, Any]] = []

    def observed(self, observe: Any) -> Any:
        """`observe` of the layer's parts, which also records."""

        def recording(part: str) -> Any:
            if part == "output" and self._picked:
                self._copy()
            return observe(part)

        return recording

    def _copy(self) -> None:
        layer, attention = self._layer, self._layer.attention
        tokens, heads = self._batch.num_tokens, attention.config.num_attention_heads
        width = 576 if layer.name == V32 else 512

        def array(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            return attention.scratch.shaped(name, shape, dtype, attention.cos_sin)

        q = array("q", (tokens, heads, width), attention.activations)
        o = array("o", (tokens, heads, 512), attention.activations)
        rows = None
        if layer.selects:
            rows = array("topk_indices", (tokens, attention.config.index_topk), np.int32)
        for _, token in self._picked:
            self._copies.append((q[token].copy(), o[token].copy(), None if rows is None else rows[token].copy()))

    def records(self) -> list[Recorded]:
        made = []
        for (kind, token), (q, o, rows) in zip(self._picked, self._copies, strict=True):
            chosen = None if rows is None else to_host(rows).astype(np.int64)
            q, o = (to_host(x).astype(np.float64) for x in (q, o))
            made.append(Recorded(token, kind, q, o, None if chosen is None else chosen[chosen >= 0]))
        return made


def check(step: int, layer: WholeLayer, batch: StepBatch, hidden: Any, out: Any, recorded: Recorded) -> Sample:
    """One token of a step that has run; hidden and out are the step's, [num_tokens, hidden_size]."""
    token = recorded.token
    scheduled = batch.scheduled[int(np.searchsorted(batch.starts, token, side="right")) - 1]
    sequence, position = scheduled.sequence, int(batch.positions[token])
    exact = (V32Exact if layer.name == V32 else V4Exact)(layer, sequence, position, recorded.rows)
    cached, before = exact.cached_rows(), exact.computed_rows()
    attention = exact.attention(recorded.q, cached)
    # V3.2's prompts are attended to by the decode kernel.
    kind = "decode" if layer.attends_alike else recorded.kind
    largest = float(np.abs(cached).max(initial=1.0)) if kind == "prefill" else 1.0
    sample = measured(
        step, layer.name, sequence.index, position, kind, recorded.o, attention, exact.attention(recorded.q, before),
        largest,
    )  # fmt: skip
    want = exact.output(exact.attention(exact.queries(hidden[token]), cached))
    got = to_host(out[token]).astype(np.float64)
    error = float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))
    return replace(sample, layer_rms=error, layer_bound=LAYER_BOUNDS[layer.attention.activations.name])


class Exact:
    """A layer in float64 for one token of a request.

    rows  rows that the indexer selected, or None
    """

    def __init__(self, layer: WholeLayer, sequence: Sequence, position: int, rows: np.ndarray | None) -> None:
        self.layer, self.weights, self.xp = layer, layer.attention, layer.xp
        self.config = layer.attention.config
        self.sequence, self.position, self.rows = sequence, position, rows

    def product(self, weight: Any, x: np.ndarray) -> np.ndarray:
        """x [..., K] weight^T in float64, on the device where the weight is there."""
        return to_host(self.xp.asarray(x) @ double(weight).swapaxes(-1, -2))

    def low_rank(self, hidden: Any) -> tuple[np.ndarray, np.ndarray]:
        """Queries' and rows' part of the first projection, [n, q_lora_rank] and [n, 512 or 576]."""
        low = self.product(self.weights.low_rank, to_host(double(hidden)))
        return low[:, : self.config.q_lora_rank], low[:, self.config.q_lora_rank :]

    def hidden(self, positions: np.ndarray) -> Any:
        """Hidden states of the request's tokens, computed again from their keys."""
        layer, keys = self.layer, self.sequence.token_keys[positions]
        rows = token_rows(keys, layer.seed, layer.index, layer.hidden_size, self.xp)
        return rows.astype(self.weights.activations)

    def rotated(self, values: np.ndarray, positions: Any, inverse: bool = False) -> np.ndarray:
        """RoPE of the last 64 values in neighbouring pairs; values [n, d], positions [n] or one for all."""
        table = to_host(self.weights.cos_sin[self.xp.asarray(np.atleast_1d(positions))]).astype(np.float64)
        cos, sin = table[:, :32], table[:, 32:] * (-1 if inverse else 1)
        result = values.copy()
        even, odd = values[:, -64::2], values[:, -63::2]
        result[:, -64::2], result[:, -63::2] = even * cos - odd * sin, odd * cos + even * sin
        return result

    def cached(self, cache: Any, layout: CacheLayout, slots: np.ndarray) -> np.ndarray:
        """Rows that a cache holds at these slots, float64; only their pages are copied."""
        block_size = cache.shape[1]
        pages, which = np.unique(slots // block_size, return_inverse=True)
        copied = to_host(cache[self.xp.asarray(pages)]).reshape(len(pages), block_size * cache.shape[2])
        return read_tokens(Pages(copied, block_size, layout), which * block_size + slots % block_size)

    def queries(self, hidden: Any) -> np.ndarray:
        raise NotImplementedError

    def cached_rows(self) -> np.ndarray:
        raise NotImplementedError

    def computed_rows(self) -> np.ndarray:
        raise NotImplementedError

    def attention(self, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def output(self, o: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class V4Exact(Exact):
    """q, o and rows are [n, 512]."""

    def window(self) -> np.ndarray:
        return np.arange(max(self.position - self.config.sliding_window + 1, 0), self.position + 1)

    def queries(self, hidden: Any) -> np.ndarray:
        weights, config = self.weights, self.config
        qr = rms_norm(self.low_rank(hidden[None])[0], config.rms_norm_eps, weights.q_a_norm)
        q = self.product(weights.q_b, qr).reshape(config.num_attention_heads, 512)
        return self.rotated(rms_norm(q, config.rms_norm_eps), self.position)

    def cached_rows(self) -> np.ndarray:
        window = self.cached(self.layer.caches.window, self.weights.layouts.v4, self.sequence.slots(self.window()))
        return np.concatenate([window, self._compressed()])

    def computed_rows(self) -> np.ndarray:
        positions = self.window()
        kv = self.low_rank(self.hidden(positions))[1]
        window = self.rotated(rms_norm(kv, self.config.rms_norm_eps, self.weights.kv_norm), positions)
        return np.concatenate([window, self._compressed()])

    def _compressed(self) -> np.ndarray:
        ratio = WHOLE_RATIOS[self.layer.name]
        if ratio == 1:
            return np.empty((0, 512))
        rows = np.arange((self.position + 1) // ratio) if self.rows is None else self.rows
        slots = self.sequence.slots(rows, BLOCK_TOKENS // ratio)
        return self.cached(self.layer.caches.compressed, self.weights.layouts.v4, slots)

    def attention(self, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
        sinks = to_host(self.weights.sinks).astype(np.float64)
        return attend(q, rows, sinks, 512**-0.5)[0]

    def output(self, o: np.ndarray) -> np.ndarray:
        weights = self.weights
        by_group = self.rotated(o, self.position, inverse=True).reshape(self.config.o_groups, 1, -1)
        return self.product(weights.o_b, self.product(weights.o_a, by_group).reshape(1, -1))[0]


class V32Exact(Exact):
    """q and rows are [n, 576], o is [h, 512]."""

    def queries(self, hidden: Any) -> np.ndarray:
        weights, config = self.weights, self.config
        qr = rms_norm(self.low_rank(hidden[None])[0], LATENT_NORM_EPS, weights.q_a_norm)
        q = self.rotated(self.product(weights.q_b, qr).reshape(config.num_attention_heads, -1), self.position)
        latent = self.product(weights.latent, q[:, None, : config.qk_nope_head_dim])[:, 0]
        return np.concatenate([latent, q[:, config.qk_nope_head_dim :]], axis=1)

    def cached_rows(self) -> np.ndarray:
        return self.cached(self.layer.caches.rows, self.weights.layouts.v32, self.sequence.slots(self._selected()))

    def computed_rows(self) -> np.ndarray:
        positions = self._selected()
        kv = self.low_rank(self.hidden(positions))[1]
        latent = rms_norm(kv[:, :LATENT], LATENT_NORM_EPS, self.weights.kv_a_norm)
        return self.rotated(np.concatenate([latent, kv[:, LATENT:]], axis=1), positions)

    def _selected(self) -> np.ndarray:
        assert self.rows is not None
        return self.rows

    def attention(self, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return attend(q, rows, None, self.config.softmax_scale)[0]

    def output(self, o: np.ndarray) -> np.ndarray:
        values = self.product(self.weights.value, o[:, None])
        return self.product(self.weights.o, values.reshape(1, -1))[0]


def rms_norm(x: np.ndarray, eps: float, weight: Any = None) -> np.ndarray:
    """The norm of each row, in float64."""
    normed = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * to_host(weight).astype(np.float64)


def double(x: Any) -> Any:
    """In float64; by way of float32, as bfloat16 has no other on a device."""
    return x.astype(np.float32).astype(np.float64)
