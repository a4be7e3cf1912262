"""Tables of cosines and sines for a checkpoint's configuration, computed in float32 as in the authors' code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dispatch.values import check_choice, check_flags, check_kind, finite, shown

FLOAT32 = np.float32
REQUIRED = ("factor", "original_max_position_embeddings")
LIMITS = {  # limits of YaRN's parameters, within which no formula overflows float32
    "factor": (1, 1e6),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0, 1e6),
    "mscale_all_dim": (0, 1e6),
}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
WITHOUT_TYPE = {"rope_theta", "partial_rotary_factor"}  # the parameters of plain RoPE
KNOWN = {*WITHOUT_TYPE, *LIMITS, "rope_type", "type", "truncate", "finetuned"}
COMPUTED = {"extrapolation_factor": 1, "attn_factor": 1}  # other parameters: the only value that is supported


def cos_sin_table(
    dim: int, theta: float, max_position: int, scaling: Mapping[str, Any] | None = None, alpha: Any | None = None
) -> np.ndarray:
    """float32 [max_position, dim]: cosines of the dim / 2 pairs, then sines.

    Args:
        theta: base of the frequencies
        scaling: None, or YaRN's parameters: factor, original_max_position_embeddings, beta_fast (32), beta_slow (1),
            attention_factor (of cosines and sines; from mscale and mscale_all_dim, or else from factor), truncate
            (True: the first and last pair of the ramp are rounded); a parameter that is None counts as absent
        alpha: [dim / 2] numbers, the radians' learned factors exp(alpha) (LeRoPE of Mistral Large 4); None: 1

    Raises ValueError for a kind of scaling other than YaRN, and for alpha of another shape.
    """
    frequencies = radians(dim, theta, scaling, alpha)
    scaling = checked_scaling(scaling)
    scale = 1.0 if scaling is None else attention_factor(scaling)
    angles = np.arange(max_position, dtype=FLOAT32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * FLOAT32(scale)


def radians(dim: int, theta: float, scaling: Mapping[str, Any] | None = None, alpha: Any | None = None) -> np.ndarray:
    """float32 [dim / 2]: radians of a position of each pair; arguments as in cos_sin_table."""
    scaling = checked_scaling(scaling)
    wavelengths = FLOAT32(theta) ** (np.arange(0, dim, 2, dtype=FLOAT32) / FLOAT32(dim))
    frequencies = FLOAT32(1) / wavelengths
    if scaling is not None:
        stretched = FLOAT32(1) / (FLOAT32(scaling["factor"]) * wavelengths)
        unscaled = FLOAT32(1) - _ramp(dim, theta, scaling)
        frequencies = stretched * (FLOAT32(1) - unscaled) + frequencies * unscaled
    if alpha is not None:
        factors = np.asarray(alpha, FLOAT32)
        if factors.shape != frequencies.shape:
            raise ValueError(f"alpha: got shape {factors.shape}, expected {frequencies.shape}, one factor a pair")
        frequencies = frequencies * np.exp(factors)
    return frequencies


def checked_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The given parameters of YaRN; None for plain RoPE.

    Raises TypeError or ValueError for another kind of scaling, and for a parameter that is missing or not a number.
    """
    if scaling is None:
        return None
    check_kind(Mapping, rope_scaling=scaling)
    entries = {name: value for name, value in scaling.items() if value is not None}
    kind = entries.get("rope_type", entries.get("type"))
    if kind is None:
        for name, value in entries.items():
            if name not in WITHOUT_TYPE:
                raise ValueError(f"rope_scaling.{name}: got {shown(value)} without a rope_type, expected one with it")
        return None
    check_choice(("default", "yarn"), rope_type=kind)
    if kind == "default":
        return None
    for name in REQUIRED:
        if name not in entries:
            raise ValueError(f"rope_scaling: got {sorted(entries)}, expected {name} among YaRN's parameters")
    for name in entries.keys() - KNOWN:
        if name not in COMPUTED or entries[name] != COMPUTED[name]:
            raise ValueError(f"rope_scaling.{name}: got {shown(entries[name])}, expected {COMPUTED.get(name, 'none')}")
    for name in entries.keys() & LIMITS.keys():
        least, most = LIMITS[name]
        if not least <= finite(f"rope_scaling.{name}", entries[name]) <= most:
            raise ValueError(f"rope_scaling.{name}: got {shown(entries[name])}, expected {least} to {most}")
    check_flags(**{"rope_scaling.truncate": entries.get("truncate", True)})
    fast, slow = ({**BETAS, **entries}[name] for name in BETAS)
    if fast < slow:
        raise ValueError(f"rope_scaling.beta_fast: got {fast}, expected at least beta_slow = {slow}")
    return entries


def _ramp(dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """How far each pair's wavelength is stretched, 0 to 1: 0 for pairs that rotate often in the original context."""
    original = scaling["original_max_position_embeddings"]

    def pair_of_rotations(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_of_rotations(scaling.get(name, times)) for name, times in BETAS.items())
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    return np.clip((np.arange(dim // 2, dtype=FLOAT32) - FLOAT32(low)) / FLOAT32(width), 0, 1)


def attention_factor(scaling: Mapping[str, Any]) -> float:
    """YaRN's factor on cosines and sines."""
    explicit = scaling.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    factor = scaling["factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(factor, scaling["mscale"]) / mscale(factor, scaling["mscale_all_dim"])
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature of a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
