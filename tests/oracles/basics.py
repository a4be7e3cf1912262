"""Norms, RoPE and attention in float64."""

import numpy as np

ROPE_DIM = 64


def rms_norm(x, eps, weight=1.0):
    """x / sqrt(mean(x^2) + eps) over the last axis, times the weight."""
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x, eps, weight, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(centred, eps, weight) + bias


def rotated(x, cos_sin, inverse=False, halves=False, first=False):
    """RoPE of 64 values of x [..., D].

    Args:
        cos_sin: [..., 64] that broadcasts to x: cosines of 32 pairs, then sines
        halves: pairs are values i and i + 32, otherwise neighbours
        first: the first 64 values rotate, otherwise the last 64
    """
    x, cos_sin = np.asarray(x, np.float64), np.asarray(cos_sin, np.float64)
    begin = 0 if first else x.shape[-1] - ROPE_DIM
    pairs = (slice(0, 32), slice(32, 64)) if halves else (slice(0, 64, 2), slice(1, 64, 2))
    part, out = x[..., begin : begin + ROPE_DIM], x.copy()
    spun = (part[..., pairs[0]] + 1j * part[..., pairs[1]]) * (
        cos_sin[..., :32] + (-1j if inverse else 1j) * cos_sin[..., 32:]
    )
    turned = out[..., begin : begin + ROPE_DIM]
    turned[..., pairs[0]], turned[..., pairs[1]] = spun.real, spun.imag
    return out


def attended(q, rows, scale, sinks=None, width=512):
    """Attention of one token, [heads, width]: q [heads, D] over rows [n, D]; a row's first values are its value.

    Args:
        sinks: [heads], logits with weight but without a row
    """
    scores = q @ rows.T * scale
    largest = scores.max(axis=1, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    weights = np.exp(scores - largest[:, None])
    total = weights.sum(axis=1) + (0.0 if sinks is None else np.exp(sinks - largest))
    return weights @ rows[:, :width] / total[:, None]
