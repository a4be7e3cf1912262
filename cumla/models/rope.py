"""Tables of cosines and sines, as checkpoints' configurations describe them, made in float32 as their authors' are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

FLOAT32 = np.float32


def cos_sin_table(dim: int, theta: float, max_position: int, scaling: Mapping[str, Any] | None = None) -> np.ndarray:
    """float32 [max_position, dim]: cosines of the dim / 2 pairs, then sines.

    theta    base of the frequencies
    scaling  None, or YaRN's numbers: factor, original_max_position_embeddings, beta_fast (32), beta_slow (1),
             attention_factor (of cosines and sines; from mscale and mscale_all_dim, or else from factor)

    Raises ValueError for a kind of scaling other than YaRN.
    """
    wavelengths = FLOAT32(theta) ** (np.arange(0, dim, 2, dtype=FLOAT32) / FLOAT32(dim))
    frequencies = FLOAT32(1) / wavelengths
    scale = 1.0
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is not None and kind != "default":
        if kind != "yarn":
            raise ValueError(f"rope_type: got {kind!r}, expected 'default' or 'yarn'")
        stretched = FLOAT32(1) / (FLOAT32(scaling["factor"]) * wavelengths)
        kept = FLOAT32(1) - _ramp(dim, theta, scaling)
        frequencies = stretched * (FLOAT32(1) - kept) + frequencies * kept
        scale = attention_factor(scaling)
    angles = np.arange(max_position, dtype=FLOAT32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * FLOAT32(scale)


def _ramp(dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """How far each pair's frequency is stretched, 0 to 1: those that turn often in the original context are not."""
    original = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1.0))), dim - 1)
    width = high - low if high > low else 0.001
    return np.clip((np.arange(dim // 2, dtype=FLOAT32) - FLOAT32(low)) / FLOAT32(width), 0, 1)


def attention_factor(scaling: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines by."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = scaling["factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(factor, scaling["mscale"]) / mscale(factor, scaling["mscale_all_dim"])
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature of a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
