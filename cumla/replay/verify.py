"""Checks of a sample of each step's tokens against attention in float64.

Exactness is the error of the kernels, over the rows as the cache holds them. The cost of FP8 or FP4 is the error over
the rows before quantisation, which are computed again from their tokens; layers of models have no such check. The
scheduler's view of a request, not the metadata under test, says which rows a token attends to, and a layer with an
indexer which of them it selected.
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
from ..kernels.types.segments import Pages
from ..layout import DSV4_FP8, CacheLayout
from ..ops.sparse_cache import quantize_and_insert_k_cache
from ..parallel import Communicator
from .activations import HEAD_DIM
from .options import ReplayOptions
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
SINGLE_HEADS = 32  # tokens of a single head whose outs together have a direction that the cosine's bound is for
# Where ranks merge results, each part and its weights are rounded to bfloat16: by 2^-9 each, of values that may cancel.
ROUNDED_PARTS = 2 * 2.0**-9


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

    @property
    def failure(self) -> str | None:
        """What is beyond its bound, or None. NaN is beyond every bound. (Directions: `directions_of`.)"""
        rms, cosine = (FP4_RMS_BOUND, FP4_COSINE_BOUND) if self.fp4 else (FP8_RMS_BOUND, FP8_COSINE_BOUND)
        through = "FP4" if self.fp4 else "FP8"
        for what, got, bound in (
            (f"error {self.max_error:.3g} takes {self.bound_share:.3g} of its bound, which", self.bound_share, 1.0),
            (f"relative rms error through {through}", self.fp8_rms, rms),
            (f"cosine distance through {through}", self.fp8_cosine, cosine),
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
    """Picks one decode token and one prefill token of a step to check, as far as it has them.

    On the host in every layer; a device's steps take less time than the checks, so there layers take turns. Ranks that
    share a context take turns too: all have the same results.
    """

    def __init__(self, options: ReplayOptions, comm: Communicator | None = None) -> None:
        self.seed, self.comm = options.seed, comm
        self._turns = len(options.layers) if takes_device_arrays(options.backend) else 1

    def pick(self, step: int, layer_index: int, batch: StepBatch) -> list[tuple[str, int]]:
        """Kind and place of the tokens to check in a layer, none if it is another layer's turn."""
        if (step - layer_index) % self._turns:
            return []
        if self.comm is not None and step // self._turns % self.comm.size != self.comm.rank:
            return []
        rng = np.random.default_rng([self.seed, step])
        kinds = (("decode", 0, batch.num_decodes), ("prefill", batch.num_decodes, batch.num_tokens))
        return [(kind, int(rng.integers(first, end))) for kind, first, end in kinds if first < end]


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
