"""How close results must be to the reference's: for attention, the bounds of FlashMLA's own tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Bound(NamedTuple):
    """How far a result may be off: absolute + relative * |value|, and the cosine distance of all of it."""

    absolute: float | np.ndarray = 0.0
    relative: float = 0.0
    cosine: float = np.inf

    def of_values(self, largest: Any) -> Bound:
        """The bound of what is mixed by bfloat16 weights out of values of a magnitude up to `largest`.

        Half a unit in a weight's last place is 2^-9 of it, so the error is in units of the values: for each query the
        largest |V| of the rows that it lists. Hopper's prefill has such weights, as FlashMLA's has. On the data of
        FlashMLA's tests its bounds hold as they are.
        """
        return self._replace(absolute=self.absolute * largest)


EQUAL = Bound()
DECODE_OUT, DECODE_LSE = Bound(1e-3, 2.01 / 128, 5e-6), Bound(1e-6, 8.01 / 65536)
# The absolute part is for values up to 1, as FlashMLA has them. Kernels round weights to float16: each may be off by
# this times itself, so a result by this times its sum of |weight x value|, which is less than that for such values.
FLOAT16_WEIGHTS = 2.0**-11
PREFILL_OUT, PREFILL_LSE = Bound(8e-4, 3.01 / 128, 7e-6), Bound(1e-6, 2.01 / 65536)  # lse and max_logits
MERGE = Bound(1e-6, 1e-5)  # in float32
ROUNDED = Bound(1e-5, 1.01 / 128, 5e-6)  # float32 arithmetic rounded once to bfloat16: a unit in the last place
SCORES = Bound(1e-2, 1e-4, 5e-6)  # of the indexer: sums of hundreds


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
    """What `bound` allows where the error of `got` is largest; 0 where nothing is off by a number."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if got.shape != want.shape or not finite.any():
        return 0.0
    limits = np.broadcast_to(bound.absolute + bound.relative * np.abs(want), want.shape)[finite]
    return float(limits[np.argmax(np.abs(got[finite] - want[finite]))])
