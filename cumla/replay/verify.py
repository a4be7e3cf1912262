"""Checks a sample of each step's tokens against attention in float64.

Exactness is the error of the kernels, over the rows in the cache. The cost of FP8 or FP4 is the error over the rows
before quantisation, which are recomputed from their tokens; layers of models have no such check. The rows that a token
attends to come from the scheduler, not from the metadata under test, and the rows that it selected from the layer.
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
# bfloat16: its bound then scales with the largest value that a token attends to, if that is above 1.
EXACT_BOUNDS = {"decode": DECODE_OUT, "prefill": PREFILL_OUT}
# FP8 cost, as an error relative to the root mean square of a token's out. Rounding to e4m3 (3 mantissa bits) changes
# a value by at most 2^-4 of itself, by about 2^-5.3 RMS, and the weights through the logits. So the mean over tokens
# stays below 2^-4; a single token whose weights depend on two close logits may lose more. A wrong row, scale or weight
# costs about 1.
FP8_MEAN_BOUND = 2.0**-4
FP8_RMS_BOUND = 2.0**-2
FP8_COSINE_BOUND = FP8_RMS_BOUND**2 / 2
# With FP4 rows: e2m1 has 2 mantissa bits fewer, and changes a value by about 2^-3.2 RMS.
FP4_MEAN_BOUND = 2.0**-2
FP4_RMS_BOUND = 2.0**-1
FP4_COSINE_BOUND = FP4_RMS_BOUND**2 / 2
SINGLE_HEADS = 32  # tokens of a single head whose outs are taken as one array for the cosine bound
# If ranks merge results, each part and its weights are rounded to bfloat16, by 2^-9 each; the values may cancel.
ROUNDED_PARTS = 2 * 2.0**-9


@dataclass(frozen=True)
class Sample:
    """One checked token in one layer.

    Attributes:
        kind: "decode" or "prefill": the kernel that computed it
        max_error: exactness: largest error of a value
        bound_share: largest ratio of a value's error to its bound
        heads: of the out
        product, norms: got x exact and got x got + exact x exact, from which cosine distances are computed
        merged: whether results of several ranks were merged: rounded twice, so the cosine bound doubles
        fp8_rms: relative root mean square error of FP8 or FP4; None if the cache is not quantised
        fp8_cosine: cosine distance of FP8 or FP4
        fp4: whether the layer's compressed rows are FP4
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
        """The error that is beyond its bound, or None. NaN is beyond every bound. (Cosines: `directions_of`.)"""
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
        others = f" and {len(self.samples) - 1} more" if len(self.samples) > 1 else ""
        return (
            f"step {first.step}, request {first.request}, position {first.position}{others}, layer {first.layer} "
            f"({self.kind}): cosine distance is {self.cosine:.3g}, expected at most {bound:.3g}"
        )


def directions_of(samples: Iterable[Sample]) -> list[Direction]:
    """The arrays to which the bound of cosine distances applies: outs of several heads.

    The rounding of a head's query changes all values of its out in the same direction. Over several heads these errors
    average out, and the bound assumes that. So each token of several heads is one array. Tokens of a single head are
    combined, SINGLE_HEADS at a time, with the remainder in the last array; fewer tokens are checked only by value.
    """
    directions = []
    single: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.heads > 1:
            directions.append(Direction((sample,), True))
        else:
            single.setdefault((sample.layer, sample.kind), []).append(sample)
    for group in single.values():
        ends = list(range(SINGLE_HEADS, len(group) - SINGLE_HEADS + 1, SINGLE_HEADS))
        groups = zip([0, *ends], [*ends, len(group)], strict=True)
        directions += [Direction(tuple(group[i:j]), j - i >= SINGLE_HEADS) for i, j in groups]
    return directions


class Verifier:
    """Picks one decode token and one prefill token of a step to check, if the step has them.

    On the host every layer is checked. A device's steps take less time than the checks, so its layers take turns. Ranks
    that share a context also take turns, because all have the same results.
    """

    def __init__(self, options: ReplayOptions, comm: Communicator | None = None) -> None:
        self.seed, self.comm = options.seed, comm
        self._turns = len(options.layers) if takes_device_arrays(options.backend) else 1

    def pick(self, step: int, layer_index: int, batch: StepBatch) -> list[tuple[str, int]]:
        """Kind and index of the tokens to check in a layer; none if it is another layer's turn."""
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
    """The sample of a token's out [h, d], from the exact results over the cached rows and over the rows before.

    Args:
        before: result over the rows before quantisation; None if the cache is not quantised
        largest: largest value that it attends to, see Bound.of_values
        parted: [h, d], additional error allowed for merged results of several ranks
        fp4: whether some of the rows are FP4
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
    """A cache's rows at these slots, float64 [n, 512]; only their pages are copied."""
    block_size = cache.shape[1]
    pages, which = np.unique(slots // block_size, return_inverse=True)
    copied = to_host(cache[xp.asarray(pages)]).reshape(len(pages), block_size * cache.shape[2])
    return read_tokens(Pages(copied, block_size, layout), which * block_size + slots % block_size)


def quantised(rows: np.ndarray, layout: CacheLayout) -> np.ndarray:
    """Rows of bfloat16 values after quantisation in a cache, float64 [n, 512]."""
    cache = layout.allocate(max(1, -(-len(rows) // SWA_BLOCK)), SWA_BLOCK)
    slots = np.arange(len(rows))
    quantize_and_insert_k_cache(rows.astype(BFLOAT16), cache, slots, layout=layout, backend="cpu")
    return cached_rows(cache, slots, np, layout)


def mean_sizes(query: np.ndarray, keys: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """The weighted mean of |V| for each value of an out, [h, d]: query [h, d], keys [n, d], float64."""
    scores = HEAD_DIM**-0.5 * (query @ keys.T)
    top = np.maximum(scores.max(axis=1), sink)
    weights = np.exp(scores - top[:, None])
    sizes: np.ndarray = weights @ np.abs(keys) / (weights.sum(axis=1) + np.exp(sink - top))[:, None]
    return sizes


def cosine_distance(x: np.ndarray, y: np.ndarray) -> float:
    """1 - 2 x.y / (x.x + y.y): 0 for equal arrays, and sensitive to scale as well as direction."""
    norm = float((x * x).sum() + (y * y).sum())
    return 1 - 2 * float((x * y).sum()) / norm if norm else 0.0
