"""DeepSeek V3.2 in float64: the indexer selects latent rows."""

import numpy as np

from .basics import layer_norm
from .layer import Layer, Rules
from .selection import best, scores


class V32(Layer):
    """A layer; a token's index key is a norm of the token's projection."""

    rules = Rules(
        row="wkv_a", is_latent=True, norms_heads=False, has_sinks=False, is_grouped=False,
        index_rope={"halves": True, "first": True}, eps=1e-6,
    )  # fmt: skip

    @property
    def scale(self):
        return self.config.softmax_scale

    def index_keys(self, x):
        """A request's index keys [T, 128]."""
        weight, bias = (self.weights[f"indexer.k_norm.{name}"] for name in ("weight", "bias"))
        keys = layer_norm(self.project(x, "indexer.wk"), self.eps, weight, bias)
        return self.rotate(keys, np.arange(len(x)), **self.rules.index_rope)

    def chosen(self, x):
        """For each token the positions that it selects."""
        found = scores(*self.index_queries(x, np.arange(len(x))), self.index_keys(x))
        return [best(row[: t + 1], self.config.index_topk) for t, row in enumerate(found)]

    def __call__(self, x, chosen=None):
        """A request's output [T, hidden_size]."""
        rows = self.rows(x, np.arange(len(x)))
        return self.outputs(x, [rows[places] for places in (self.chosen(x) if chosen is None else chosen)])
