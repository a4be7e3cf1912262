"""An attention layer in float64, with its model's rules."""

from dataclasses import dataclass

import numpy as np

from .basics import attended, rms_norm, rotated

LATENT = 512


@dataclass(frozen=True)
class Rules:
    """Differences between models' attention layers. Weights have their published names within the attention module.

    Attributes:
        row: the projection of a token's row
        is_latent: whether a row is a latent, which wkv_b projects to keys and values of each head, with rotated values
            behind it, if any; a query head has nope_dim values that do not rotate. Otherwise the row's 512 values are
            key and value of all heads, and the last 64 rotate
        norms_heads: whether each head's query is normed
        has_sinks: whether each head has a sink
        index_rope: options of `rotated` for the indexer's queries and keys
        eps: epsilon of the norms; None: the configuration's rms_norm_eps
    """

    row: str
    is_latent: bool
    norms_heads: bool
    has_sinks: bool
    index_rope: dict
    eps: float | None


class Layer:
    """Parts of a layer, as functions of hidden states x [T, hidden_size] and positions [T].

    A token's output is the result of `attend` for its query, over the window of `rows` and over its selected rows.
    """

    rules: Rules

    def __init__(self, config, number, weights, longest):
        self.config, self.number = config, number
        self.weights = {name: np.asarray(weight).astype(np.float64) for name, weight in weights.items()}
        self.cos_sin = self.table(longest).astype(np.float64)
        self.eps = config.rms_norm_eps if self.rules.eps is None else self.rules.eps

    def table(self, longest):
        """Cosines and sines [longest, 64] of positions."""
        return self.config.spec(self.number).cos_sin_table(longest)

    @property
    def scale(self):
        return LATENT**-0.5

    def project(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name):
        return rms_norm(x, self.eps, self.weights[f"{name}.weight"])

    def rotate(self, x, positions, **options):
        """x [T, D] or [T, heads, D]."""
        turns = self.cos_sin[positions]
        return rotated(x, turns[:, None] if x.ndim == 3 else turns, **options)

    def low_rank(self, x):
        """The input of the query projection, [T, q_lora_rank]."""
        return self.norm(self.project(x, "wq_a"), "q_norm")

    def heads(self, x, positions):
        """Query heads [T, heads, D] as projected."""
        return self.project(self.low_rank(x), "wq_b").reshape(len(x), self.config.num_attention_heads, -1)

    def index_heads(self, x, positions):
        """The indexer's query heads [T, heads, 128] as projected."""
        return self.project(self.low_rank(x), "indexer.wq_b").reshape(len(x), self.config.index_n_heads, -1)

    def queries(self, x, positions):
        """Queries [T, heads, D] in the space of rows."""
        q = self.heads(x, positions)
        if self.rules.norms_heads:
            q = rms_norm(q, self.eps)
        q = self.rotate(q, positions)
        if not self.rules.is_latent:
            return q
        nope = self.nope_dim
        latent = np.einsum("thp,hpl->thl", q[..., :nope], self.up[:, :nope])
        return np.concatenate([latent, q[..., nope:]], axis=-1)

    @property
    def up(self):
        """wkv_b [heads, nope + values, 512]."""
        return self.weights["wkv_b.weight"].reshape(self.config.num_attention_heads, -1, LATENT)

    def rows(self, x, positions):
        """The row that each token adds, [T, D]: a window row or a latent."""
        row = self.project(x, self.rules.row)
        latent = self.norm(row[:, :LATENT], "kv_norm")
        return self.rotate(np.concatenate([latent, row[:, LATENT:]], axis=1), positions)

    def attend(self, q, rows):
        """One token's output in the space of rows, [heads, 512]: q [heads, D], rows [n, D]."""
        return attended(q, rows, self.scale, self.weights["attn_sink"] if self.rules.has_sinks else None)

    def output(self, o, positions, x):
        """The layer's output [T, hidden_size] from o [T, heads, 512] and the hidden states."""
        groups = self.config.o_groups
        o = self.rotate(o, positions, inverse=True).reshape(len(o), groups, -1)
        first = np.einsum("tgd,grd->tgr", o, self.weights["wo_a.weight"].reshape(groups, self.config.o_lora_rank, -1))
        return self.project(first.reshape(len(o), -1), "wo_b")

    def index_queries(self, x, positions):
        """The indexer's queries [T, heads, 128] and the weights of their heads [T, heads]."""
        q = self.index_heads(x, positions)
        weights = self.project(x, "indexer.weights_proj") * (q.shape[1] * q.shape[2]) ** -0.5
        return self.rotate(q, positions, **self.rules.index_rope), weights

    def outputs(self, x, selected):
        """A request's output [T, hidden_size]. selected: for each token the rows that it selects, [n, D]."""
        positions = np.arange(len(x))
        q, o, window = self.queries(x, positions), [], getattr(self.config, "sliding_window", 0)
        own = self.rows(x, positions) if window else None
        for t, chosen in enumerate(selected):
            rows = np.concatenate([own[max(0, t - window + 1) : t + 1], chosen]) if window else chosen
            o.append(self.attend(q[t], rows))
        return self.output(np.stack(o), positions, x)
