"""A sample of each step's tokens against attention in float64, twice.

Over the rows as the cache holds them: what the kernels add of their own ("exactness"). Over the rows before
they were quantised: what FP8 or FP4 costs. Which rows a token attends to comes from the scheduler's view of its
request, not from the metadata under test, and the rows before quantisation are made again from their keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.memory import to_host
from ..bounds import DECODE_OUT, PREFILL_OUT
from ..dispatch.backends import takes_device_arrays
from ..dispatch.call import BFLOAT16
from ..kernels.reference.rows import read_tokens
from ..kernels.reference.sparse_attention import attend
from ..kernels.types.segments import Pages
from ..layout import DSV4_FP8, CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache
from ..parallel import Communicator
from .activations import HEAD_DIM, apply_rope
from .blocks import BLOCK_TOKENS
from .layers import TOPK_RATIO, Layer, LayerInputs
from .options import ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, StepBatch

# Exactness: error of a value, and the cosine distance of a token's out. Prefill over gathered rows may have weights in
# bfloat16: its bound is that of the values that a token attends to, where they are more than 1.
EXACT_BOUNDS = {"decode": DECODE_OUT, "prefill": PREFILL_OUT}
# FP8 cost, as an error relative to the root mean square of a token's out. Rounding to e4m3 (3 mantissa bits) moves
# a value by at most 2^-4 of itself, by about 2^-5.3 in the mean square, and through the logits the weights too. So
# the mean over tokens stays below 2^-4; a single token whose weights hang on two close logits may lose more. A wrong
# row, scale or weight costs about 1.
FP8_MEAN_BOUND = 2.0**-4
FP8_RMS_BOUND = 2.0**-2
FP8_COSINE_BOUND = FP8_RMS_BOUND**2 / 2
# With FP4 rows: e2m1 has 2 mantissa bits fewer, and moves a value by about 2^-3.2 in the mean square.
FP4_MEAN_BOUND = 2.0**-2
FP4_RMS_BOUND = 2.0**-1
FP4_COSINE_BOUND = FP4_RMS_BOUND**2 / 2
# A choice is compared with exact scores of the queries and keys that the layer has. cumla.bounds.SCORES allows a cosine
# distance of 5e-6, so errors of 2^-8.3 of the scores in the mean square. A wrong row is off by 1 and more.
CHOICE_BOUND = 2.0**-7
SINGLE_HEADS = 32  # tokens of a single head whose outs together have a direction that the cosine's bound is for
# Where ranks merge results, each part and its weights are rounded to bfloat16: by 2^-9 each, of values that may cancel.
ROUNDED_PARTS = 2 * 2.0**-9
REMEMBERED_ROWS = 1 << 16  # compressed rows kept to be compared again, 64 MiB


@dataclass(frozen=True)
class Sample:
    """One checked token in one layer.

    kind          "decode" or "prefill": which kernel it went through
    max_error     largest error of a value, exactness
    bound_share   largest share of its bound that a value's error takes; 1 is the bound
    heads         of the out
    product, norms  got x exact and got x got + exact x exact, of which cosine distances are made
    merged        whether results of several ranks were merged: twice rounded, it may turn twice as far
    fp8_rms       relative root mean square error that FP8 or FP4 costs; None where the cache is not quantised
    fp8_cosine    its cosine distance
    fp4           whether the layer's compressed rows are FP4
    layer_rms     relative root mean square error of a whole layer's output; None for other layers
    layer_bound   of layer_rms
    choice_gap    how far the lowest score of a selected row is below the highest of a row that was not selected, in
                  standard deviations of the scores; None for a layer that does not select
    key_rms       relative root mean square error of the selected rows' index keys, as the cache has them; None likewise
    query_rms     the same of the token's index queries, as they were scored
    index_bound   of these two, by the format of keys and queries
    """

    step: int
    layer: str
    request: int
    position: int
    kind: str
    max_error: float
    bound_share: float
    heads: int
    product: float
    norms: float
    merged: bool = False
    fp8_rms: float | None = None
    fp8_cosine: float | None = None
    fp4: bool = False
    layer_rms: float | None = None
    layer_bound: float = 0.0
    choice_gap: float | None = None
    key_rms: float | None = None
    query_rms: float | None = None
    index_bound: float = 0.0

    @property
    def failure(self) -> str | None:
        """What is beyond its bound, or None. NaN is beyond every bound. (Directions: `directions_of`.)"""
        rms, cosine = (FP4_RMS_BOUND, FP4_COSINE_BOUND) if self.fp4 else (FP8_RMS_BOUND, FP8_COSINE_BOUND)
        through = "FP4" if self.fp4 else "FP8"
        for what, got, bound in (
            (f"error {self.max_error:.3g} takes {self.bound_share:.3g} of its bound, which", self.bound_share, 1.0),
            (f"relative rms error through {through}", self.fp8_rms, rms),
            (f"cosine distance through {through}", self.fp8_cosine, cosine),
            ("relative rms error of the layer's output", self.layer_rms, self.layer_bound),
            ("gap of the selected rows' scores", self.choice_gap, CHOICE_BOUND),
            ("relative rms error of the selected rows' keys", self.key_rms, self.index_bound),
            ("relative rms error of the index queries", self.query_rms, self.index_bound),
        ):
            if got is not None and not got <= bound:
                return (
                    f"step {self.step}, request {self.request}, position {self.position}, layer {self.layer} "
                    f"({self.kind}): {what} is {got:.3g}, expected at most {bound:.3g}"
                )
        return None


@dataclass(frozen=True)
class Direction:
    """The cosine distance of samples of a layer and kind, taken as one array."""

    samples: tuple[Sample, ...]
    is_checked: bool

    @property
    def kind(self) -> str:
        return self.samples[0].kind

    @property
    def bound(self) -> float:
        first = self.samples[0]
        return float(EXACT_BOUNDS[first.kind][2]) * (2 if first.merged else 1)

    @property
    def cosine(self) -> float:
        norms = sum(sample.norms for sample in self.samples)
        return 1 - 2 * sum(sample.product for sample in self.samples) / norms if norms else 0.0

    @property
    def failure(self) -> str | None:
        bound, first = self.bound, self.samples[0]
        if not self.is_checked or self.cosine <= bound:
            return None
        more = f" and {len(self.samples) - 1} more" if len(self.samples) > 1 else ""
        return (
            f"step {first.step}, request {first.request}, position {first.position}{more}, layer {first.layer} "
            f"({self.kind}): cosine distance is {self.cosine:.3g}, expected at most {bound:.3g}"
        )


def directions_of(samples: Iterable[Sample]) -> list[Direction]:
    """What the bound of cosine distances is for: outs of several heads.

    A head's query is rounded once, which turns all values of its out together; among heads these errors average out,
    and the bound is that of such arrays. So a token of several heads is one, and the tokens of a single head are taken
    together, SINGLE_HEADS at a time; what is left over joins the last. Fewer in all are not checked but value by value.
    """
    directions = []
    single: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.heads > 1:
            directions.append(Direction((sample,), True))
        else:
            single.setdefault((sample.layer, sample.kind), []).append(sample)
    for some in single.values():
        ends = list(range(SINGLE_HEADS, len(some) - SINGLE_HEADS + 1, SINGLE_HEADS))
        groups = zip([0, *ends], [*ends, len(some)], strict=True)
        directions += [Direction(tuple(some[i:j]), j - i >= SINGLE_HEADS) for i, j in groups]
    return directions


class Verifier:
    """Checks one decode token and one prefill token of a step, as far as it has them.

    On the host in every layer; a device's steps take less time than the checks, so there layers take turns. Ranks that
    share a context take turns too: all have the same results. What they do not have is made again.
    """

    def __init__(self, options: ReplayOptions, comm: Communicator | None = None) -> None:
        self.options, self.comm = options, comm
        self._turns = len(options.layers) if takes_device_arrays(options.backend) else 1
        self._remembered: dict[tuple[int, int, int], np.ndarray] = {}

    def check(self, step: int, layer: Layer, batch: StepBatch, inputs: LayerInputs, q: Any, out: Any) -> list[Sample]:
        """Samples of a layer's step that has run.

        q    [num_tokens, h, 512] bfloat16
        out  [num_tokens, h, 512] bfloat16
        """
        picked = self.pick(step, layer.index, batch)
        return [self._check_token(step, layer, batch, inputs, q, out, kind, token) for kind, token in picked]

    def pick(self, step: int, layer_index: int, batch: StepBatch) -> list[tuple[str, int]]:
        """Kind and place of the tokens to check in a layer, none if it is another layer's turn."""
        if (step - layer_index) % self._turns:
            return []
        if self.comm is not None and step // self._turns % self.comm.size != self.comm.rank:
            return []
        rng = np.random.default_rng([self.options.seed, step])
        kinds = (("decode", 0, batch.num_decodes), ("prefill", batch.num_decodes, batch.num_tokens))
        return [(kind, int(rng.integers(first, end))) for kind, first, end in kinds if first < end]

    def _check_token(
        self,
        step: int,
        layer: Layer,
        batch: StepBatch,
        inputs: LayerInputs,
        q: Any,
        out: Any,
        kind: str,
        token: int,
    ) -> Sample:
        scheduled = batch.scheduled[int(np.searchsorted(batch.starts, token, side="right")) - 1]
        sequence, position = scheduled.sequence, int(batch.positions[token])
        window = np.arange(max(position - self.options.window + 1, 0), position + 1)
        first, second = self.options.formats
        cached = [cached_rows(layer.swa_cache, sequence.slots(window), layer.xp, first)]
        original = [self._window_rows(layer, sequence, window)]
        if inputs.compressed is not None:
            rows = np.arange((position + 1) // layer.ratio)
            if layer.ratio == TOPK_RATIO:
                rows = to_host(inputs.compressed.topk_indices[token]).astype(np.int64)
                rows = rows[rows >= 0]
            original.append(self._compressed_rows(layer, sequence, rows))
            if self.comm is None:
                slots = sequence.slots(rows, BLOCK_TOKENS // layer.ratio)
                cached.append(cached_rows(layer.compressed_cache, slots, layer.xp, second))
            else:
                cached.append(quantised(original[-1], second))
        query, got = (to_host(array[token]).astype(np.float64) for array in (q, out))
        sink = to_host(layer.activations.attn_sink)
        exact, _, _ = attend(query, np.concatenate(cached), sink, HEAD_DIM**-0.5)
        unquantised, _, _ = attend(query, np.concatenate(original), sink, HEAD_DIM**-0.5)
        largest = max(float(np.abs(rows).max(initial=1.0)) for rows in cached) if kind == "prefill" else 1.0
        parted = 0.0 if self.comm is None else ROUNDED_PARTS * mean_sizes(query, np.concatenate(cached), sink)
        fp4 = inputs.compressed is not None and second.value_type == "e2m1"
        return measured(step, layer.name, sequence.index, position, kind, got, exact, unquantised, largest, parted, fp4)

    def _window_rows(self, layer: Layer, sequence: Sequence, positions: np.ndarray) -> np.ndarray:
        rows = layer.activations.k_rows(sequence.token_keys[positions])
        return to_host(apply_rope(rows, positions, layer.xp).astype(BFLOAT16)).astype(np.float64)

    def _compressed_rows(self, layer: Layer, sequence: Sequence, rows: np.ndarray) -> np.ndarray:
        """Compressed rows before quantisation, float64 [n, 512]. A row is known by its last token and its place."""
        ratio, known = layer.ratio, self._remembered
        last_keys = sequence.token_keys[rows * ratio + ratio - 1]
        names = [(layer.index, int(key), int(row)) for key, row in zip(last_keys, rows, strict=True)]
        missing = [i for i, name in enumerate(names) if name not in known]
        if len(known) > REMEMBERED_ROWS:
            known.clear()
            missing = list(range(len(names)))
        if missing:
            first = rows[missing] * ratio
            members = first[:, None] + np.arange(ratio)
            made = layer.activations.k_rows(sequence.token_keys[members.ravel()])
            means = made.reshape(-1, ratio, HEAD_DIM).mean(axis=1)
            rotated = to_host(apply_rope(means, first, layer.xp).astype(BFLOAT16))
            known.update((names[i], row) for i, row in zip(missing, rotated, strict=True))
        values = np.array([known[name] for name in names], dtype=BFLOAT16)
        return values.reshape(-1, HEAD_DIM).astype(np.float64)


def measured(
    step: int,
    layer: str,
    request: int,
    position: int,
    kind: str,
    got: np.ndarray,
    exact: np.ndarray,
    before: np.ndarray | None,
    largest: float = 1.0,
    parted: float | np.ndarray = 0.0,
    fp4: bool = False,
) -> Sample:
    """The sample of a token's out [h, d], given what it is over the rows in the cache and over the rows before.

    before   None where the cache is not quantised
    largest  value that it attends to, see Bound.of_values
    parted   [h, d], what is allowed beside it where results of several ranks were merged
    fp4      whether some of the rows are FP4
    """
    absolute, relative, _ = EXACT_BOUNDS[kind].of_values(largest)
    error = np.abs(got - exact)
    return Sample(
        step=step,
        layer=layer,
        request=request,
        position=position,
        kind=kind,
        max_error=float(error.max()),
        bound_share=float((error / (absolute + parted + relative * np.abs(exact))).max()),
        heads=len(got),
        product=float((got * exact).sum()),
        norms=float((got * got).sum() + (exact * exact).sum()),
        merged=bool(np.any(parted)),
        fp8_rms=None if before is None else float(np.sqrt(((got - before) ** 2).mean() / (before**2).mean())),
        fp8_cosine=None if before is None else cosine_distance(got, before),
        fp4=fp4,
    )


def cached_rows(cache: Any, slots: np.ndarray, xp: Any, layout: CacheLayout = DSV4_FP8) -> np.ndarray:
    """The rows that a cache holds at these slots, float64 [n, 512]; only their pages are copied."""
    block_size = cache.shape[1]
    pages, which = np.unique(slots // block_size, return_inverse=True)
    copied = to_host(cache[xp.asarray(pages)]).reshape(len(pages), block_size * cache.shape[2])
    return read_tokens(Pages(copied, block_size, layout), which * block_size + slots % block_size)


def quantised(rows: np.ndarray, layout: CacheLayout) -> np.ndarray:
    """What a cache makes of rows of bfloat16 values, float64 [n, 512]."""
    cache = layout.allocate(max(1, -(-len(rows) // SWA_BLOCK)), SWA_BLOCK)
    slots = np.arange(len(rows))
    quantize_and_insert_k_cache(rows.astype(BFLOAT16), cache, slots, layout=layout, backend="cpu")
    return cached_rows(cache, slots, np, layout)


def mean_sizes(query: np.ndarray, keys: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """The mean size of what each value of an out is made of, [h, d]: query [h, d], keys [n, d], float64."""
    scores = HEAD_DIM**-0.5 * (query @ keys.T)
    top = np.maximum(scores.max(axis=1), sink)
    weights = np.exp(scores - top[:, None])
    sizes: np.ndarray = weights @ np.abs(keys) / (weights.sum(axis=1) + np.exp(sink - top))[:, None]
    return sizes


def cosine_distance(x: np.ndarray, y: np.ndarray) -> float:
    """1 - 2 x.y / (x.x + y.y): 0 for equal arrays, and sensitive to scale as well as direction."""
    norm = float((x * x).sum() + (y * y).sum())
    return 1 - 2 * float((x * y).sum()) / norm if norm else 0.0
