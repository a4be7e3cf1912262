"""Whole layers of a replay against float64: a sampled token, from its hidden state to the layer's output.

Two comparisons for each token. The attention's output is compared with attention in float64 of the queries that the
layer made, over the rows that the caches hold; this has the bounds of the attention kernels. The layer's output is
compared with the whole layer in float64, from the hidden state through the layer's weights; its bound covers the
roundings of the activations' type. Both read the rows that the indexer selected; V4.1's layers that select have their
choice checked, too: the index queries that they made and the keys that the caches hold against float64 ones, and the
choice by exact scores of these queries and keys. Rows computed again from hidden states give the cost of FP8 or FP4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.memory import to_host
from .step_batch import StepBatch
from .verify import Sample, measured
from .whole import V32, WholeLayer
from .whole_exact import Exact, V4Exact, V32Exact
from .whole_v41 import V41
from .whole_v41_exact import V41Exact

EXACT: dict[str, type[Exact]] = {"v4": V4Exact, V32: V32Exact, V41: V41Exact}
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
    index_queries  of V4.1's layers that select: e4m3 [heads, 128], and float32 [heads], weights with their scales
    """

    token: int
    kind: str
    q: np.ndarray
    o: np.ndarray
    rows: np.ndarray | None
    index_queries: tuple[np.ndarray, np.ndarray] | None


class Recorder:
    """Copies of the sampled tokens, taken between a layer's attention and its output's projection.

    The copies are queued before the time of the output begins, and read after the step.
    """

    def __init__(self, layer: WholeLayer, batch: StepBatch, picked: list[tuple[str, int]]) -> None:
        self._layer, self._batch, self._picked = layer, batch, picked
        self._copies: list[tuple[Any, ...]] = []

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
        rows, index = layer.selected(tokens), None
        if layer.makes_index_queries:
            shape = tokens, attention.config.index_n_heads
            index = (
                array("indexed_q", (*shape, attention.config.index_head_dim), np.dtype(np.uint8)),
                array("indexed_weights", shape, np.dtype(np.float32)),
            )
        for _, token in self._picked:
            chosen = None if rows is None else rows[token].copy()
            queries = None if index is None else tuple(x[token].copy() for x in index)
            self._copies.append((q[token].copy(), o[token].copy(), chosen, queries))

    def records(self) -> list[Recorded]:
        made = []
        for (kind, token), (q, o, rows, index) in zip(self._picked, self._copies, strict=True):
            chosen = None if rows is None else to_host(rows).astype(np.int64)
            q, o = (to_host(x).astype(np.float64) for x in (q, o))
            queries = None if index is None else (to_host(index[0]), to_host(index[1]))
            made.append(Recorded(token, kind, q, o, None if chosen is None else chosen[chosen >= 0], queries))
        return made


def check(step: int, layer: WholeLayer, batch: StepBatch, hidden: Any, out: Any, recorded: Recorded) -> Sample:
    """One token of a step that has run; hidden and out are the step's, [num_tokens, hidden_size]."""
    token = recorded.token
    scheduled = batch.scheduled[int(np.searchsorted(batch.starts, token, side="right")) - 1]
    sequence, position = scheduled.sequence, int(batch.positions[token])
    exact = EXACT[layer.model](layer, sequence, position, recorded.rows)
    cached, before = exact.cached_rows(), exact.computed_rows()
    attention = exact.attention(recorded.q, cached)
    # V3.2's prompts are attended to by the decode kernel.
    kind = "decode" if layer.attends_alike else recorded.kind
    largest = float(np.abs(cached).max(initial=1.0)) if kind == "prefill" else 1.0
    sample = measured(
        step, layer.name, sequence.index, position, kind, recorded.o, attention, exact.attention(recorded.q, before),
        largest, fp4=exact.fp4,
    )  # fmt: skip
    want = exact.output(exact.attention(exact.queries(hidden[token]), cached))
    got = to_host(out[token]).astype(np.float64)
    error = float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))
    sample = replace(sample, layer_rms=error, layer_bound=LAYER_BOUNDS[layer.attention.activations.name])
    if not isinstance(exact, V41Exact) or not exact.chooses:
        return sample
    assert recorded.index_queries is not None
    return replace(
        sample, choice_gap=exact.choice_gap(*recorded.index_queries, token), key_rms=exact.key_rms(),
        query_rms=exact.query_rms(hidden[token], *recorded.index_queries), index_bound=exact.index_bound,
    )  # fmt: skip
