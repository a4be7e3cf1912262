"""DeepSeek V4.1 in float64: a window, and rows, index keys and selections that layers share."""

from dataclasses import dataclass

import numpy as np

from .layer import LATENT, Layer, Rules
from .selection import best, best_of_blocks, margin, scores
from .v4 import window_table


@dataclass
class Shared:
    """Values that the layers of one request share with later layers.

    Attributes:
        rows, keys: rows and keys of the last owner: [n, 512] and [n, 128]
        chosen: for each token the rows that the last layer with an indexer selected
        candidates: for each token the blocks that the candidate source selected
        margin: the smallest margin of a selection
    """

    rows: np.ndarray | None = None
    keys: np.ndarray | None = None
    chosen: list | None = None
    candidates: list | None = None
    margin: float = np.inf


class V41(Layer):
    """A layer."""

    rules = Rules(row="wkv", is_latent=False, norms_heads=False, has_sinks=True, index_rope={}, eps=None)

    def __init__(self, config, number, *arguments):
        self.ratio, self.mode = config.ratio(number), config.spec(number).mode
        super().__init__(config, number, *arguments)

    def table(self, longest):
        return window_table(self.config, self.ratio > 0, longest)

    def pooled_input(self, x):
        """The compressor's projections: [T, 1024] at ratio 2, [T, 512] at ratio 1."""
        return np.concatenate([self.project(x, f"compressor.{name}") for name in ("wkv", "wgate")[: self.ratio]], 1)

    def latents(self, x):
        """The complete rows of a request before RoPE, [T // ratio, 512]."""
        return self.norm(pooled(self.pooled_input(x), self.ratio), "compressor.norm")

    def compressed_rows(self, latents):
        return self.rotate(latents, np.arange(len(latents)) * self.ratio)

    def index_keys(self, latents):
        keys = self.norm(self.project(latents, "indexer.wk"), "indexer.k_norm")
        return self.rotate(keys, np.arange(len(keys)) * self.ratio)

    def select(self, x, shared):
        """Write the rows that each token selects, and candidate blocks if the layer selects them."""
        config, size = self.config, self.config.candidate_block_size
        found, chosen, candidates = scores(*self.index_queries(x, np.arange(len(x))), shared.keys), [], []
        for t, row in enumerate(found):
            row = row[: (t + 1) // self.ratio]
            allowed = np.arange(len(row))
            if self.number == config.candidate_source_layer_id:
                blocks = best_of_blocks(row, size)
                candidates.append(best(blocks, config.candidate_topk_blocks))
                shared.margin = min(shared.margin, margin(blocks, config.candidate_topk_blocks))
            elif config.reads_candidates(self.number):
                allowed = allowed[np.isin(allowed // size, shared.candidates[t])]
            chosen.append(allowed[best(row[allowed], config.index_topk)])
            shared.margin = min(shared.margin, margin(row[allowed], config.index_topk))
        shared.chosen, shared.candidates = chosen, candidates or shared.candidates

    def __call__(self, x, shared):
        """A request's output [T, hidden_size]."""
        if self.mode == "full":
            latents = self.latents(x)
            shared.rows, shared.keys = self.compressed_rows(latents), self.index_keys(latents)
        if self.mode in ("full", "reindex"):
            self.select(x, shared)
        none = np.empty((0, LATENT))
        return self.outputs(x, [shared.rows[chosen] for chosen in shared.chosen] if self.ratio else [none] * len(x))

    def block(self, x, main):
        """A draft block's output [T, hidden_size]; its tokens see the window before it and the whole block.

        Args:
            main: [n, hidden_size], hidden states of the positions before it
        """
        positions = len(main) + np.arange(len(x))
        before = self.rows(main, np.arange(len(main)))[-self.config.sliding_window :]
        rows = np.concatenate([before, self.rows(x, positions)])
        return self.output(np.stack([self.attend(q, rows) for q in self.queries(x, positions)]), positions, x)


def pooled(given, ratio):
    """Rows [T, 512 or 1024] pooled, [T // ratio, 512]: two neighbours weighted by the softmax of their scores."""
    if ratio == 1:
        return given
    pairs = given[: len(given) // 2 * 2].reshape(-1, 2, 2, LATENT)
    kv, score = pairs[:, :, 0], pairs[:, :, 1]
    weights = np.exp(score - score.max(axis=1, keepdims=True))
    return (kv * weights).sum(axis=1) / weights.sum(axis=1)
