"""Replays whose layers of models are compared with float64 from hidden states on (tests/oracles).

A replay itself compares the attention of a sampled token: the queries that the layer computed, over the rows that its
caches hold. Here the same tokens' outputs, rows, index keys, index queries and selections are compared, too.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

import oracles
from cumla.arrays.memory import to_host
from cumla.replay.blocks import BLOCK_TOKENS
from cumla.replay.engine import Engine
from cumla.replay.models import random_weights
from cumla.replay.options import MODEL_OF
from cumla.replay.verify import (
    FP4_COSINE_BOUND,
    FP4_MEAN_BOUND,
    FP4_RMS_BOUND,
    FP8_COSINE_BOUND,
    FP8_MEAN_BOUND,
    FP8_RMS_BOUND,
    cached_rows,
    cosine_distance,
)
from oracles.selection import best_of_blocks, gap, scores

from .models import relative_rms

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
# Relative root mean square error of a token's output, by the activations' type. From a hidden state to the output
# bfloat16 rounds seven times, each by 2^-9 / sqrt(3) in the mean square: 0.3% together, and the same again through the
# softmax weights. float32 sums of thousands of products are off by about 2^-20.
LAYER_BOUNDS = {"bfloat16": 2.0**-6, "float32": 2.0**-17}
# Root mean square error of rows, keys and queries due to rounding to their format.
ROUNDING = {"e4m3": FP8_MEAN_BOUND, "e2m1": FP4_MEAN_BOUND}
# A selection is compared with exact scores of the layer's queries and keys. cumla.bounds.SCORES allows a
# cosine distance of 5e-6, so errors of 2^-8.3 of the scores in the mean square. A wrong row is off by 1 and more.
CHOICE_BOUND = 2.0**-7


class Check(NamedTuple):
    """One comparison of a sampled token.

    Attributes:
        what: "window rows", "rows" (compressed or latent), "cost" of their format and its "direction", "output",
            "queries", "keys" and "selection" of an indexer
    """

    step: int
    layer: str
    position: int
    what: str
    error: float
    bound: float

    @property
    def failure(self):
        return None if self.error <= self.bound else f"{self}"


class ReplayOracle:
    """A layer of a replay in float64."""

    def __init__(self, layer, longest):
        self.layer, self.longest = layer, longest
        weights = random_weights(layer.config, layer.number, layer.seed + layer.index)
        if layer.attention.activations == BF16:
            weights = {
                name: weight.astype(BF16) if weight.ndim == 2 and not name.endswith("ape") else weight
                for name, weight in weights.items()
            }
        self.exact = oracles.layer_of(layer.config, layer.number, weights, longest)
        self.owner = self if layer.owner is layer else ReplayOracle(layer.owner, longest)

    def hidden(self, sequence, end):
        """Hidden states of a request's tokens before position `end`, float64."""
        return to_host(self.layer.hidden(sequence.token_keys[:end])).astype(np.float64)

    def compressed(self, sequence, end):
        """Rows of V4 and V4.1 and their index keys, for positions before `end`; None if a layer has none."""
        owner, x = self.owner.exact, self.owner.hidden(sequence, end)
        if self.layer.model == "v41":
            latents = owner.latents(x)
            return owner.compressed_rows(latents), owner.index_keys(latents)
        return owner.pooled(x), owner.pooled(x, "indexer.") if self.layer.ratio == 4 else None

    def selects(self):
        return self.layer.attention.spec.selects

    def checks(self, batch, hidden, out, token):
        """Yields (what, error, bound) for a token of a step that has run."""
        layer, exact = self.layer, self.exact
        scheduled, position = batch.at(token)
        sequence, end, rows = scheduled.sequence, position + 1, layer.rows_of(token, position)
        x, cached = self.hidden(sequence, end), layer.attended_rows(sequence, position, rows)
        mine = x[-1:]
        np.testing.assert_array_equal(mine[0], to_host(hidden[token]).astype(np.float64))
        keys = None
        spec = layer.attention.spec
        if spec.rows == "latent":
            computed = self.owner.exact.rows(self.owner.hidden(sequence, end)[rows], rows)
            keys = exact.cached(exact.index_keys(x)) if spec.selects else None
            yield "rows", relative_rms(cached, computed), ROUNDING["e4m3"]
        else:
            window = np.arange(max(end - layer.config.sliding_window, 0), end)
            computed = exact.rows(x[window], window)
            yield "window rows", relative_rms(cached[: len(window)], computed), ROUNDING["e4m3"]
            if len(rows):
                compressed, keys = self.compressed(sequence, end)
                bound = ROUNDING[layer.layouts[1].value_type]
                yield "rows", relative_rms(cached[len(window) :], compressed[rows]), bound
                computed = np.concatenate([computed, compressed[rows]])
        q = exact.queries(mine, np.array([position]))[0]
        o = exact.attend(q, cached)
        is_fp4 = len(rows) > 0 and layer.model == "v41" and layer.layouts[1].value_type == "e2m1"
        before = exact.attend(q, computed)
        yield "cost", relative_rms(o, before), FP4_RMS_BOUND if is_fp4 else FP8_RMS_BOUND
        yield "direction", cosine_distance(o, before), FP4_COSINE_BOUND if is_fp4 else FP8_COSINE_BOUND
        want, got = exact.output(o[None], np.array([position]), mine)[0], to_host(out[token]).astype(np.float64)
        yield "output", relative_rms(got, want), LAYER_BOUNDS[layer.attention.activations.name]
        if self.selects() and len(rows):
            yield from self.selection(batch, token, sequence, rows, keys, mine, position)

    def selection(self, batch, token, sequence, rows, keys, x, position):
        layer, layout, heads = self.layer, self.layer.attention.layouts.indexer, self.layer.config.index_n_heads
        q = to_host(layer.scratch("indexed_q", (batch.num_tokens, heads, 128), np.uint8)[token])
        weights = to_host(layer.scratch("indexed_weights", (batch.num_tokens, heads), np.float32)[token])
        q, weights = E4M3_VALUES[q], weights.astype(np.float64)
        want, of_heads = self.exact.index_queries(x, np.array([position]))
        bound, pool = ROUNDING[layout.value_type], layer.attention.spec.pool
        if pool > 1:
            want, rows = self.exact.cached(want), rows[rows < len(keys) * pool][::pool] // pool
        yield "queries", relative_rms(q * weights[:, None], want[0] * of_heads[0][:, None]), bound
        if not len(keys):  # no pool is complete
            return
        slots = sequence.slots(np.arange(len(keys)), BLOCK_TOKENS // layer.ratio // pool)
        cached = cached_rows(layer.caches.indexer, slots, layer.xp, layout)
        yield "keys", relative_rms(cached, keys), bound
        yield "selection", self.gap(scores(q[None], weights[None], cached)[0], rows, token), CHOICE_BOUND

    def gap(self, row, rows, token):
        """`gap` of the selected rows, or of candidate blocks if the layer selects them and their gap is larger."""
        layer, config = self.layer, self.layer.config
        chooses = layer.model == "v41" and layer.number == config.candidate_source_layer_id
        if not chooses and not (layer.model == "v41" and config.reads_candidates(layer.number)):
            return gap(row, rows, config.index_topk // self.layer.attention.spec.pool)
        size, count = config.candidate_block_size, config.candidate_topk_blocks
        blocks = to_host(layer.selection.candidate_blocks[token]).astype(np.int64)
        blocks = blocks[blocks >= 0]
        if chooses:
            best = best_of_blocks(row, size)
            best[-1] = best[np.isfinite(best)].max(initial=0.0)  # always a candidate, with any score
            return max(gap(row, rows, config.index_topk), gap(best, blocks, count))
        allowed = (blocks[:, None] * size + np.arange(size)).ravel()
        allowed = allowed[allowed < len(row)]
        if not np.isin(rows, allowed).all():
            return float("inf")
        return gap(row[allowed], np.searchsorted(allowed, rows), config.index_topk)


def watched(engine):
    """The checks of a replay's layers of models: a list that grows while the engine runs."""
    found = []
    longest = max(sequence.request.total_length for sequence in engine.scheduler._arrivals)
    for layer in engine.layers:
        if layer.name in MODEL_OF:
            watch(layer, ReplayOracle(layer, longest), found)
    return found


def watch(layer, oracle, found):
    check = layer.check

    def checked(step, batch, hidden, out, kind, token):
        position = batch.at(token)[1]
        found.extend(Check(step, layer.name, position, *x) for x in oracle.checks(batch, hidden, out, token))
        return check(step, batch, hidden, out, kind, token)

    layer.check = checked


def run(options, requests, change=lambda engine: None):
    """A replay: its engine, its steps, and the checks."""
    engine = Engine(options, requests)
    found = watched(engine)
    change(engine)
    return engine, list(engine.steps()), found


def failures(records, found):
    """Failures of the replay's samples and of the checks."""
    samples = [sample.failure for record in records for sample in record.samples]
    return [failure for failure in (*samples, *(check.failure for check in found)) if failure is not None]
