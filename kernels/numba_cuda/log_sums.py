"""Sums of exponentials as logarithms: what goes with a part of attention, and puts parts together.

Inside the kernels -inf says that there was no key; in arrays for callers that is +inf.
"""

from __future__ import annotations

import numpy as np

from .intrinsics import exponential, logarithm
from .launch import device_function
from .numbers import INFINITY_BITS, float32_bits, float32_value

MINUS_INFINITY = np.float32(-np.inf)


@device_function
def larger(x, y):
    """Of two numbers; NaN if either is."""
    return x if x > y or x != x else y


@device_function
def summary(top, total):
    """Of a row of weights, exp(product - top), with this sum: their logarithm, and what outputs are multiplied by."""
    if top == MINUS_INFINITY:
        return top, np.float32(0)
    return top + logarithm(total), np.float32(1) / total


@device_function
def rest_of_sink(attn_sink, head, log_sum):
    """What is left of an output where a sink takes some of the weight; of one without keys there is nothing to take."""
    if not len(attn_sink) or log_sum == MINUS_INFINITY:
        return np.float32(1)
    return np.float32(1) / (np.float32(1) + exponential(float32_value(attn_sink[head]) - log_sum))


@device_function
def joined(first, second):
    """Of two logarithms: that of the sum, and the share that each has in it."""
    top = larger(first, second)
    shift = np.float32(0) if top == MINUS_INFINITY else top
    first, second = exponential(first - shift), exponential(second - shift)
    log_sum, share = summary(top, first + second)
    return log_sum, first * share, second * share


@device_function
def log_sum_of(bits):
    """From the array of a caller."""
    return MINUS_INFINITY if bits == INFINITY_BITS else float32_value(bits)


@device_function
def bits_of_log_sum(log_sum):
    """For the array of a caller."""
    return float32_bits(-log_sum if log_sum == MINUS_INFINITY else log_sum)
