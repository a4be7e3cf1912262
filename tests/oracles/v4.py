"""DeepSeek V4 in float64: a window, and rows that a compressor pools from 4 or 128 positions."""

import numpy as np

from cumla.models.rope import cos_sin_table

from .layer import LATENT, Layer, Rules
from .selection import best, scores


def window_table(config, has_compressed, longest):
    """Cosines and sines of a layer with a window; with compressed rows, its base and scaling are others."""
    if has_compressed:
        return cos_sin_table(64, config.compress_rope_theta, longest, config.rope_scaling)
    return cos_sin_table(64, config.rope_theta, longest)


class V4(Layer):
    """A layer. Rows of ratio 4 overlap: they pool their positions and the previous row's positions."""

    rules = Rules(row="wkv", is_latent=False, norms_heads=True, has_sinks=True, index_rope={}, eps=None)

    @property
    def ratio(self):
        return self.config.compress_ratios[self.number]

    def table(self, longest):
        return window_table(self.config, self.ratio > 1, longest)

    def pooled(self, x, prefix=""):
        """The complete rows of a request, [T // ratio, 512]; the indexer's keys, [T // ratio, 128], by "indexer."."""
        count, bias = len(x) // self.ratio, self.weights[f"{prefix}compressor.ape"]
        kv, score = (
            self.project(x[: count * self.ratio], f"{prefix}compressor.{name}").reshape(count, *bias.shape)
            for name in ("wkv", "wgate")
        )
        score = score + bias
        if self.ratio == 4:
            kv, score = overlapping(kv, 0.0), overlapping(score, -np.inf)
        weights = np.exp(score - score.max(axis=1, keepdims=True, initial=-np.inf))
        rows = (weights * kv).sum(axis=1) / weights.sum(axis=1)
        return self.rotate(self.norm(rows, f"{prefix}compressor.norm"), np.arange(count) * self.ratio)

    def chosen(self, x):
        """For each token the compressed rows that it attends to: selected rows at ratio 4, all rows at 128."""
        visible = (np.arange(len(x)) + 1) // self.ratio
        if self.ratio == 128:
            return [np.arange(count) for count in visible]
        found = scores(*self.index_queries(x, np.arange(len(x))), self.pooled(x, "indexer."))
        return [best(row[:count], self.config.index_topk) for row, count in zip(found, visible, strict=True)]

    def __call__(self, x, chosen=None):
        """A request's output [T, hidden_size]."""
        if self.ratio == 1:
            return self.outputs(x, [np.empty((0, LATENT))] * len(x))
        rows = self.pooled(x)
        return self.outputs(x, [rows[places] for places in (self.chosen(x) if chosen is None else chosen)])


def overlapping(part, absent):
    """[rows, 8, D] from [rows, 4, 2 D]: the first half of the previous positions, the second half of the row's.

    Args:
        absent: values for the first row, which has no previous positions
    """
    dim = part.shape[2] // 2
    before = np.concatenate([np.full_like(part[:1, :, :dim], absent), part[:-1, :, :dim]])
    return np.concatenate([before, part[:, :, dim:]], axis=1)
