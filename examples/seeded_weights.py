"""Random weights determined by a seed and their names, for tiny checkpoints and cumla's golden data."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def seeded_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """float32 arrays of these shapes.

    One generator draws the standard normals n of all weights, in the order of their names. A weight is then
    1 + 0.1 n for a norm or SSMax's bias, 0.2 n for SSMax's scale, 0.1 n for another bias or an exponent of RoPE's
    factors, 0.5 n for a bias of positions, n for another vector, n / sqrt(columns) for a matrix.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    weights: dict[str, np.ndarray] = {}
    for name in sorted(shapes):
        n = generator.standard_normal(shapes[name], dtype=np.float32)
        if ("norm" in name and name.endswith("weight")) or name.endswith("softmax_scaling.bias"):
            weights[name] = 1 + np.float32(0.1) * n
        elif name.endswith("softmax_scaling.scale"):
            weights[name] = np.float32(0.2) * n
        elif name.endswith(("rotary_emb.alpha", "bias")) and "position" not in name:
            weights[name] = np.float32(0.1) * n
        elif "position_bias" in name or name.endswith("compress_ape"):
            weights[name] = np.float32(0.5) * n
        else:
            weights[name] = n if n.ndim == 1 else n / np.float32(math.sqrt(n.shape[-1]))
    return weights
