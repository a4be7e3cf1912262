"""Error bounds of results against the reference: for attention, the bounds of FlashMLA's own tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Bound(NamedTuple):
    """The error allowed for each value, absolute + relative * |value|, and the cosine distance of the whole result."""

    absolute: float | np.ndarray = 0.0
    relative: float = 0.0
    cosine: float = np.inf

    def of_values(self, largest: Any) -> Bound:
        """The bound for sums of values of magnitude up to `largest`, weighted by bfloat16 weights.

        A weight is rounded by up to 2^-9 of itself, so the error scales with the values: `largest` is the largest |V|
        of the rows that each query lists. The Hopper prefills of cumla and of FlashMLA round weights so. On the data
        of FlashMLA's tests the unscaled bounds hold.
        """
        return self._replace(absolute=self.absolute * largest)


EQUAL = Bound()
DECODE_OUT, DECODE_LSE = Bound(1e-3, 2.01 / 128, 5e-6), Bound(1e-6, 8.01 / 65536)
# The absolute bound is for values up to 1, as in FlashMLA's tests. Kernels round weights to float16, each with at most
# this relative error, so a result's error is at most this times its sum of |weight x value|: less than the bound.
FLOAT16_WEIGHTS = 2.0**-11
PREFILL_OUT, PREFILL_LSE = Bound(8e-4, 3.01 / 128, 7e-6), Bound(1e-6, 2.01 / 65536)  # lse and max_logits
# With precision="fp8", queries, rows and weights are rounded to e4m3: each by 2^-4 at most, by 2.6% on average (root
# mean square). `out` has its bound in units of values, logits (max_logits and lse) in units of softmax_scale |q| |k|.
# Both bounds are for data whose errors are independent, not for the worst case.
PREFILL_FP8_OUT, PREFILL_FP8_LOGITS = Bound(0.08, 0.0, 8e-3), Bound(0.012, 2.01 / 65536)
MERGE = Bound(1e-6, 1e-5)  # merges are computed in float32
ROUNDED = Bound(1e-5, 1.01 / 128, 5e-6)  # float32 arithmetic rounded once to bfloat16: a unit in the last place
SUMS = Bound(1e-4, 1e-5, 1e-9)  # float32 sums of some hundred products of magnitudes up to tens
SCORES = Bound(1e-2, 1e-4, 5e-6)  # the indexer's scores: sums with magnitudes of hundreds


def compare(got: np.ndarray, want: np.ndarray, bound: Bound) -> tuple[bool, float]:
    """Whether `got` is within its bound, and its largest error. Infinities and NaN must match."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if got.shape != want.shape or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return False, np.inf
    got, want = got[finite], want[finite]
    error = np.abs(got - want)
    within = bool((error <= bound.absolute + bound.relative * np.abs(want)).all())
    norm = float((got * got).sum() + (want * want).sum())
    if norm:
        within = within and 1 - 2 * float((got * want).sum()) / norm <= bound.cosine
    return within, float(np.max(error, initial=0.0))


def allowed(got: np.ndarray, want: np.ndarray, bound: Bound) -> float:
    """The error that `bound` allows where the error of `got` is largest; 0 if there is no finite error."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if got.shape != want.shape or not finite.any():
        return 0.0
    got, want = got[finite], want[finite]
    return float(bound.absolute + bound.relative * abs(want[np.argmax(np.abs(got - want))]))
