"""Softmax weights without subnormal numbers, whose products are a hundred times slower.

A weight below 2^-126 of the largest becomes 0. That is negligible unless its value is 2^100 or more
(sparse_attention.py computes such tokens in float64).
"""

from typing import Any

import numpy as np

from ..numba_common.compiled import compiled

# Just above the logarithm of the smallest normal number.
LEAST_FLOAT32, LEAST_FLOAT64 = np.float32(-87.33654), np.float64(-708.39641)


def exponentials(differences: np.ndarray) -> np.ndarray:
    """The weights of float32 scores minus their maximum, in place.

    NumPy's exponential is also slow where it underflows; such inputs are masked.
    """
    is_normal = differences >= LEAST_FLOAT32
    np.maximum(differences, LEAST_FLOAT32, out=differences)
    np.exp(differences, out=differences)
    differences *= is_normal  # NaN stays
    return differences


@compiled
def exponential(difference: Any, least: Any) -> Any:
    """The weight of one score minus the maximum.

    Args:
        least: LEAST_FLOAT32 or LEAST_FLOAT64, by the score's type
    """
    too_small = difference < least
    weight = np.exp(least if too_small else difference)  # always: a branch would be mispredicted half of the time
    return weight - weight if too_small else weight
