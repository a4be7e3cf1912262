"""Pooled index keys in float64."""

import numpy as np

from oracles.basics import layer_norm


def pooled_keys(k, gate, weight, bias, ape, eps, rounding=np.float64):
    """Keys of the complete pools of one sequence, [T // P, 128]; `rounding`: dtype of the tokens' keys and gates."""
    pool = len(ape)
    keys, gates = (
        x.astype(rounding).astype(np.float64)[: len(x) // pool * pool].reshape(-1, pool, x.shape[1])
        for x in (layer_norm(k.astype(np.float64), eps, weight.astype(np.float64), bias.astype(np.float64)), gate)
    )
    scores = gates + ape.astype(np.float64)
    with np.errstate(invalid="ignore"):  # gates that are not finite
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return (weights * keys).sum(axis=1) / weights.sum(axis=1)


def hadamard(x):
    """The orthonormal Hadamard transform of the last axis: entry (i, j) has the sign of the parity of i & j."""
    at = np.arange(x.shape[-1])
    parity = np.array([[bin(i & j).count("1") % 2 for j in at] for i in at])
    return x @ np.where(parity, -1.0, 1.0) / np.sqrt(x.shape[-1])
