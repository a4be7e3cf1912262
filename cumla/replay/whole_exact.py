"""Whole layers of a replay in float64, for one token: V4's and V3.2's (whole_v41_exact: V4.1's).

Rows of windows and of V3.2 are also computed again from hidden states; V4's compressed rows are read from the caches
alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.memory import to_host
from ..kernels.reference.rows import read_tokens
from ..kernels.reference.sparse_attention import attend
from ..kernels.types.segments import Pages
from ..layout import CacheLayout
from ..models.deepseek_v32 import INDEX_DIM, LATENT, LATENT_NORM_EPS
from .activations import token_rows
from .blocks import BLOCK_TOKENS
from .options import WHOLE_RATIOS
from .scheduler import Sequence


class Exact:
    """A layer in float64 for one token of a request.

    rows  rows that the indexer selected, or None
    """

    def __init__(self, layer: Any, sequence: Sequence, position: int, rows: np.ndarray | None) -> None:
        self.layer, self.weights, self.xp = layer, layer.attention, layer.xp
        self.config = layer.attention.config
        self.sequence, self.position, self.rows = sequence, position, rows

    @property
    def fp4(self) -> bool:
        """Whether the layer attends to FP4 rows."""
        return False

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


class WindowExact(Exact):
    """A layer of V4 or V4.1: q, o and rows are [n, 512]."""

    @property
    def window_layout(self) -> CacheLayout:
        raise NotImplementedError

    def cached_rows(self) -> np.ndarray:
        window = self.cached(self.layer.caches.window, self.window_layout, self.sequence.slots(self.window()))
        return np.concatenate([window, self.cached_compressed()])

    def computed_rows(self) -> np.ndarray:
        positions = self.window()
        kv = self.low_rank(self.hidden(positions))[1]
        window = self.rotated(rms_norm(kv, self.config.rms_norm_eps, self.weights.kv_norm), positions)
        return np.concatenate([window, self.computed_compressed()])

    def cached_compressed(self) -> np.ndarray:
        raise NotImplementedError

    def computed_compressed(self) -> np.ndarray:
        raise NotImplementedError

    def window(self) -> np.ndarray:
        return np.arange(max(self.position - self.config.sliding_window + 1, 0), self.position + 1)

    def attention(self, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
        sinks = to_host(self.weights.sinks).astype(np.float64)
        return attend(q, rows, sinks, 512**-0.5)[0]

    def output(self, o: np.ndarray) -> np.ndarray:
        weights = self.weights
        by_group = self.rotated(o, self.position, inverse=True).reshape(self.config.o_groups, 1, -1)
        return self.product(weights.o_b, self.product(weights.o_a, by_group).reshape(1, -1))[0]


class V4Exact(WindowExact):
    """Compressed rows are read from the cache alone."""

    @property
    def window_layout(self) -> CacheLayout:
        return self.weights.layouts.v4

    def queries(self, hidden: Any) -> np.ndarray:
        weights, config = self.weights, self.config
        qr = rms_norm(self.low_rank(hidden[None])[0], config.rms_norm_eps, weights.q_a_norm)
        q = self.product(weights.q_b, qr).reshape(config.num_attention_heads, 512)
        return self.rotated(rms_norm(q, config.rms_norm_eps), self.position)

    def cached_compressed(self) -> np.ndarray:
        ratio = WHOLE_RATIOS[self.layer.name]
        if ratio == 1:
            return np.empty((0, 512))
        rows = np.arange((self.position + 1) // ratio) if self.rows is None else self.rows
        slots = self.sequence.slots(rows, BLOCK_TOKENS // ratio)
        return self.cached(self.layer.caches.compressed, self.weights.layouts.v4, slots)

    def computed_compressed(self) -> np.ndarray:
        return self.cached_compressed()


class V32Exact(Exact):
    """q and rows are [n, 576], o is [h, 512]."""

    def queries(self, hidden: Any) -> np.ndarray:
        weights, config = self.weights, self.config
        qr = rms_norm(self.low_rank(hidden[None])[0], LATENT_NORM_EPS, weights.q_a_norm)
        q_b = weights.queries[: config.num_attention_heads * (config.qk_nope_head_dim + 64)]
        q = self.rotated(self.product(q_b, qr).reshape(config.num_attention_heads, -1), self.position)
        latent = self.product(weights.latent, q[:, None, : config.qk_nope_head_dim])[:, 0]
        return np.concatenate([latent, q[:, config.qk_nope_head_dim :]], axis=1)

    def cached_rows(self) -> np.ndarray:
        return self.cached(self.layer.caches.rows, self.weights.layouts.v32, self.sequence.slots(self._selected()))

    def computed_rows(self) -> np.ndarray:
        positions = self._selected()
        kv = self.low_rank(self.hidden(positions))[1][:, INDEX_DIM:]
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
