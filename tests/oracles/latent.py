"""Layers over latent rows of V3.2, GLM and Hy4 in float64: the indexer, or the layer's source, selects rows."""

import numpy as np

from .basics import layer_norm
from .key_pools import hadamard, pooled_keys
from .layer import Layer, Rules
from .selection import best, scores


class LatentLayer(Layer):
    """A layer. A token's index key is a norm of its projection, a pool's key the weighted sum of its tokens' keys."""

    def __init__(self, config, number, weights, longest):
        self.spec = spec = config.spec(number)
        self.rules = Rules(
            row="wkv_a", is_latent=True, norms_heads=False, has_sinks=spec.sink,
            index_rope={"halves": spec.index_pairs == "halves", "first": spec.index_part == "first"}, eps=spec.q_eps,
        )  # fmt: skip
        super().__init__(config, number, weights, longest)

    def table(self, longest):
        return self.spec.cos_sin_table(longest)

    @property
    def scale(self):
        return self.spec.softmax_scale

    def rotate(self, x, positions, **options):
        """Attention's RoPE without options, else the indexer's."""
        if (self.spec.index_pairs if options else self.spec.rope_pairs) == "none":
            return x
        return super().rotate(x, positions, **(options or {"halves": self.spec.rope_pairs == "halves"}))

    def index_keys(self, x):
        """A request's index keys [T, 128], or of its complete pools [T // pool, 128]."""
        weight, bias = (self.weights[f"indexer.k_norm.{name}"] for name in ("weight", "bias"))
        keys = self.project(x, "indexer.wk")
        if self.spec.pool > 1:
            gate = x @ self.weights["indexer.kpool_gate.weight"].T
            return pooled_keys(keys, gate, weight, bias, self.weights["indexer.kpool_ape"], self.spec.key_eps)
        keys = layer_norm(keys, self.spec.key_eps, weight, bias)
        return self.rotate(keys, np.arange(len(x)), **self.rules.index_rope)

    def cached(self, x):
        """Index queries or keys as the cache has them."""
        return hadamard(x) if self.spec.pool > 1 else x

    def output(self, o, positions, x):
        values = np.einsum("thl,hvl->thv", o, self.up[:, self.spec.nope_dim :]).reshape(len(o), -1)
        if self.spec.gate:
            values = values / (1 + np.exp(-self.project(x, "linear_gate")))
        return self.project(values, "wo")

    def chosen(self, x):
        """For each token the positions that it selects, with a key a token."""
        found = scores(*self.index_queries(x, np.arange(len(x))), self.index_keys(x))
        return [best(row[: t + 1], self.config.index_topk) for t, row in enumerate(found)]

    def __call__(self, x, chosen=None):
        """A request's output [T, hidden_size]."""
        rows = self.rows(x, np.arange(len(x)))
        return self.outputs(x, [rows[places] for places in (self.chosen(x) if chosen is None else chosen)])
