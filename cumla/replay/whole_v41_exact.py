"""V4.1's layers of a replay in float64, for one token, and what the token chose.

Compressed rows and their index keys are also computed again from their owner's hidden states.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..arrays.memory import to_host
from ..kernels.reference.rows import E2M1_VALUES
from ..layout import CacheLayout
from .blocks import BLOCK_TOKENS
from .verify import FP4_MEAN_BOUND, FP8_MEAN_BOUND
from .whole_exact import WindowExact, double, rms_norm

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


class V41Exact(WindowExact):
    """Compressed rows are also computed, by their owner's weights from its hidden states."""

    @property
    def window_layout(self) -> CacheLayout:
        return self.weights.layouts.window

    @property
    def fp4(self) -> bool:
        return self.rows is not None and self.weights.layouts.compressed.value_type == "e2m1"

    def queries(self, hidden: Any) -> np.ndarray:
        weights, config = self.weights, self.config
        qr = rms_norm(self.low_rank(hidden[None])[0], config.rms_norm_eps, weights.q_norm)
        return self.rotated(self.product(weights.q_b, qr).reshape(config.num_attention_heads, 512), self.position)

    def cached_compressed(self) -> np.ndarray:
        if self.rows is None:
            return np.empty((0, 512))
        slots = self.sequence.slots(self.rows, BLOCK_TOKENS // self.weights.ratio)
        return self.cached(self.layer.caches.compressed, self.weights.layouts.compressed, slots)

    def computed_compressed(self) -> np.ndarray:
        if self.rows is None:
            return np.empty((0, 512))
        return self.rotated(self.latents(), self.rows * self.weights.ratio)

    def latents(self) -> np.ndarray:
        """The selected rows before RoPE, pooled by their owner from its hidden states."""
        assert self.rows is not None
        owner, ratio = V41Exact(self.layer.owner, self.sequence, self.position, None), self.weights.ratio
        hidden = owner.hidden((self.rows[:, None] * ratio + np.arange(ratio)).ravel())
        given = owner.product(owner.weights.wide[: ratio * 512], to_host(double(hidden)))
        if ratio == 2:
            kv, score = (given[:, some].reshape(-1, 2, 512) for some in (slice(0, 512), slice(512, 1024)))
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            given = (kv * weight).sum(axis=1) / weight.sum(axis=1)
        return rms_norm(given, self.config.rms_norm_eps, owner.weights.latent_norm)

    @property
    def chooses(self) -> bool:
        """Whether the layer selects rows, and the token has some."""
        return self.weights.mode in ("full", "reindex") and self.rows is not None and len(self.rows) > 0

    @property
    def index_bound(self) -> float:
        return FP4_MEAN_BOUND if self.weights.layouts.indexer.value_type == "e2m1" else FP8_MEAN_BOUND

    def choice_gap(self, q: np.ndarray, of_heads: np.ndarray, token: int) -> float:
        """The gap of the selected rows; in the layer that chooses candidate blocks, of these if it is larger.

        q, of_heads  the token's index queries, e4m3 [heads, 128], and weights [heads]
        """
        assert self.rows is not None
        config, size = self.config, self.config.candidate_block_size
        visible = (self.position + 1) // self.weights.ratio
        scores = self.scores(E4M3_VALUES[q], of_heads.astype(np.float64), visible)
        if not self.layer.chooses_candidates and self.weights.mode == "full":
            return gap(scores, self.rows, config.index_topk)
        blocks = to_host(self.layer.shared.selection.candidate_blocks[token]).astype(np.int64)
        blocks = blocks[blocks >= 0]
        if self.layer.chooses_candidates:
            padded = np.full(-(-visible // size) * size, -np.inf)
            padded[:visible] = scores
            best = padded.reshape(-1, size).max(axis=1)
            best[-1] = best.max()  # the newest block is always a candidate
            return max(gap(scores, self.rows, config.index_topk), gap(best, blocks, config.candidate_topk_blocks))
        rows = (blocks[:, None] * size + np.arange(size)).ravel()
        rows = rows[rows < visible]
        if not np.isin(self.rows, rows).all():
            return float("inf")
        return gap(scores[rows], np.searchsorted(rows, self.rows), config.index_topk)

    def scores(self, q: np.ndarray, of_heads: np.ndarray, visible: int) -> np.ndarray:
        """The first rows' scores, by the keys that the cache holds."""
        keys = self.cached_keys(self.sequence.blocks[: -(-visible // self.layer.caches.indexer.shape[1])])[:visible]
        dots = self.xp.maximum(keys @ self.xp.asarray(q).T, 0)
        return to_host(dots @ self.xp.asarray(of_heads))

    def query_rms(self, hidden: Any, got: np.ndarray, of_heads: np.ndarray) -> float:
        """The error of each head's query times its weight, as the layer made them: e4m3 [heads, 128] and [heads]."""
        weights, config = self.weights, self.config
        heads, dim = config.index_n_heads, config.index_head_dim
        qr = rms_norm(self.low_rank(hidden[None])[0], config.rms_norm_eps, weights.q_norm)
        q = self.rotated(self.product(weights.index_q_b, qr).reshape(heads, dim), self.position)
        weight = self.product(weights.wide[-heads:], to_host(double(hidden))[None])[0]
        want = q * weight[:, None] * (heads * dim) ** -0.5
        error = E4M3_VALUES[got] * of_heads.astype(np.float64)[:, None] - want
        return float(np.sqrt(np.square(error).mean() / np.square(want).mean()))

    def key_rms(self) -> float:
        assert self.rows is not None
        owner, ratio = self.layer.owner.attention, self.weights.ratio
        projected = rms_norm(self.product(owner.index_k, self.latents()), self.config.rms_norm_eps, owner.index_k_norm)
        want = self.rotated(projected, self.rows * ratio)
        last = int(self.rows[-1])
        got = to_host(
            self.cached_keys(self.sequence.blocks[: last // self.layer.caches.indexer.shape[1] + 1])[
                self.xp.asarray(self.rows)
            ]
        )
        return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))

    def cached_keys(self, pages: list[int]) -> Any:
        """The keys of a request's first pages, float64 [n, 128], where the cache is."""
        xp, layout, cache = self.xp, self.weights.layouts.indexer, self.layer.caches.indexer
        values, scales, _ = layout.parts(cache[xp.asarray(np.array(pages))])
        if layout.value_type == "e2m1":
            codes = xp.stack([values & 0x0F, values >> 4], axis=-1)
            tiles = xp.asarray(E2M1_VALUES)[codes].reshape(-1, layout.num_scales, layout.scale_tile)
            tiles *= xp.exp2(xp.ascontiguousarray(scales).reshape(-1, layout.num_scales, 1).astype(np.float64) - 127)
            return tiles.reshape(-1, layout.head_dim)
        keys = xp.asarray(E4M3_VALUES)[values].reshape(-1, layout.head_dim)
        keys *= xp.ascontiguousarray(scales).view(np.float32).reshape(-1, 1)
        return keys


def gap(scores: np.ndarray, chosen: np.ndarray, count: int) -> float:
    """How far the lowest chosen score is below the highest other one, in standard deviations of the scores.

    Infinity unless as many as there are, at most `count`, are chosen, each once and in ascending order.
    """
    if len(chosen) != min(count, len(scores)) or not np.all(np.diff(chosen) > 0) or not np.all(chosen < len(scores)):
        return float("inf")
    others = np.delete(scores, chosen)
    below = float(others.max() - scores[chosen].min()) if len(others) else 0.0
    return below / float(scores.std()) if below > 0 else 0.0
