"""Layers over latent rows of V3.2, GLM, Mistral Large 4 and Hy4 in float64.

The indexer, or the layer's source, selects rows.
"""

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
            index_rope={"halves": spec.index_pairs == "halves", "first": spec.index_part == "first"}, eps=spec.row_eps,
        )  # fmt: skip
        super().__init__(config, number, weights, longest)

    def table(self, longest):
        alpha = self.weights["lerope.alpha"].astype(np.float32) if self.spec.learned_rope else None
        return self.spec.cos_sin_table(longest, alpha)

    @property
    def scale(self):
        return self.spec.softmax_scale

    def rotate(self, x, positions, **options):
        """Attention's RoPE without options, else the indexer's."""
        if (self.spec.index_pairs if options else self.spec.rope_pairs) == "none":
            return x
        return super().rotate(x, positions, **(options or {"halves": self.spec.rope_pairs == "halves"}))

    @property
    def nope_dim(self):
        return self.spec.nope_dim

    def low_rank(self, x):
        """The input of the projection of index queries, and of attention's queries if these have a latent."""
        if self.spec.q_rank:
            return super().low_rank(x)
        weight, bias = (self.weights[f"indexer.q_input_norm.{name}"] for name in ("weight", "bias"))
        return layer_norm(x, self.spec.key_eps, weight, bias)

    def heads(self, x, positions):
        if self.spec.q_rank:
            found = super().heads(x, positions)
        else:
            found = self.project(x, "wq").reshape(len(x), self.spec.heads, -1)
        return self.scaled(found, positions)

    def index_heads(self, x, positions):
        return self.scaled(super().index_heads(x, positions), positions, "indexer.")

    def scaled(self, heads, positions, prefix=""):
        """Heads [T, h, D] by SSMax's factors of their positions."""
        if not self.spec.position_scale:
            return heads
        scale, bias = (self.weights[f"{prefix}ssmax_scaling.{name}"] for name in "sb")
        return heads * (np.log(positions + 1)[:, None] * scale + bias)[..., None]

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
        """For each token the positions that it selects: of complete pools, and of the last one."""
        found, pool = scores(*self.index_queries(x, np.arange(len(x))), self.index_keys(x)), self.spec.pool
        picked = []
        for t, row in enumerate(found):
            complete = (t + 1) // pool
            tokens = best(row[:complete], self.spec.selected_keys)[:, None] * pool + np.arange(pool)
            picked.append(np.concatenate([tokens.ravel(), np.arange(complete * pool, t + 1)]))
        return picked

    def __call__(self, x, chosen=None, rows=None):
        """A request's output [T, hidden_size].

        Args:
            chosen: positions that each token selects; None: by the layer's indexer
            rows: [T, D], another layer's; None: the layer's own
        """
        rows = self.rows(x, np.arange(len(x))) if rows is None else rows
        return self.outputs(x, [rows[places] for places in (self.chosen(x) if chosen is None else chosen)])
