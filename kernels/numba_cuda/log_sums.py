"""Log-sum-exp arithmetic: LSEs of partial results, and their combination.

Without keys an LSE is -inf inside the kernels and +inf in callers' arrays. Inside latent attention's kernels products
and LSEs are divided by a power of two, `scale`: they may be too large for float32 (latent_attention.scaled_queries).
"""

import numpy as np

from ..numba_common.numbers import INFINITY_BITS, float32_bits, float32_value
from .intrinsics import exponential, logarithm
from .launch import device_function

MINUS_INFINITY = np.float32(-np.inf)
ONE = np.float32(1)


@device_function
def larger(x, y):
    """The larger of two numbers; NaN if either is."""
    return x if x > y or x != x else y


@device_function
def summary(top, total, scale):
    """LSE of a row of weights exp((product - top) * scale), whose sum is `total`, and the factor 1/l of its output."""
    if top == MINUS_INFINITY:
        return top, np.float32(0)
    return top + logarithm(total) / scale, np.float32(1) / total


@device_function
def rest_of_sink(attn_sink, head, log_sum, scale):
    """Factor of a head's output due to its attention sink; 1 without keys, as the output is then 0."""
    if not len(attn_sink) or log_sum == MINUS_INFINITY:
        return np.float32(1)
    sink = float32_value(attn_sink[head])
    if sink == MINUS_INFINITY:
        return np.float32(1)
    return np.float32(1) / (np.float32(1) + exponential(sink - log_sum * scale))


@device_function
def joined(first, second):
    """The LSE of two LSEs, and the fraction of each in the sum."""
    top = larger(first, second)
    shift = np.float32(0) if top == MINUS_INFINITY else top
    first, second = exponential(first - shift), exponential(second - shift)
    log_sum, inv_sum = summary(top, first + second, ONE)
    return log_sum, first * inv_sum, second * inv_sum


@device_function
def log_sum_of(bits):
    """LSE from a caller's array."""
    return MINUS_INFINITY if bits == INFINITY_BITS else float32_value(bits)


@device_function
def bits_of_log_sum(log_sum, scale):
    """LSE for a caller's array."""
    return float32_bits(-log_sum if log_sum == MINUS_INFINITY else log_sum * scale)
