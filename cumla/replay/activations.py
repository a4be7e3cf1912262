"""Synthetic rows in place of a model's activations.

A row depends only on (seed, layer, kind, token): integers are hashed to uniform numbers, which become normal numbers
(Box-Muller). So any row can be recomputed at any time, and equal tokens have equal rows.

Like real activations, and unlike plain noise, rows have heavy tails (each value is a normal times a log-normal) and a
few hot channels per layer, whose values are far from 0 and have the same sign.

K is [n, 512]. Head h of Q is a row of the token times a pattern of the head. RoPE rotates the last 64 values.
A compressed row is the mean of the rows of its group before RoPE, rotated at the group's first position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8

HEAD_DIM, ROPE_DIM = DSV4_FP8.head_dim, DSV4_FP8.rope_dim
NOPE_DIM = HEAD_DIM - ROPE_DIM
ROPE_BASE = 10000.0

TAIL = 0.5  # sigma of the log-normal: kurtosis 8 instead of a normal's 3
K_STD, Q_STD = 0.25, 2.5  # logits then spread by about 1.5
NUM_HOT = 6
HOT_GAIN = (8.0, 24.0)  # relative to the standard deviation of other channels
HOT_SPREAD = 0.25  # relative to the channel's own mean
HEAD_SPREAD = 0.5

K, Q = 0, 1
UINT64_MASK = 2**64 - 1


class Activations:
    """Rows of one layer, computed in the memory of `xp` (numpy or cupy)."""

    def __init__(self, seed: int, layer: int, heads: int, xp: Any) -> None:
        self.xp = xp
        self._streams = [_mix_number((seed << 16) + (layer << 1) + kind) for kind in (K, Q)]
        self._channels = [_channels(seed, layer, kind, std, xp) for kind, std in ((K, K_STD), (Q, Q_STD))]
        self._salt = xp.asarray(np.arange(HEAD_DIM, dtype=np.uint32) * np.uint32(0x9E3779B9))
        self._pattern = xp.asarray(_head_patterns(seed, layer, heads))
        rng = np.random.default_rng([seed, layer, 2])
        # Some heads give the sink almost no weight, others most of it.
        self.attn_sink = xp.asarray((4 + 2 * rng.standard_normal(heads)).astype(np.float32))
        # On the CPU, rows that fit in a core's cache.
        self._rows_at_once = 128 if xp is np else 16384

    def k_rows(self, token_keys: np.ndarray) -> Any:
        """K before RoPE, [n, 512] float32, of tokens with these keys, host uint64 [n]."""
        return self._rows(token_keys, K)

    def q_rows(self, token_keys: np.ndarray) -> Any:
        """Rows before RoPE, [n, 512] float32, from which `queries` computes the heads of Q."""
        return self._rows(token_keys, Q)

    def queries(self, rotated: Any, out: Any) -> None:
        """Write Q [n, h, 512] bfloat16 for rotated q_rows [n, 512] float32."""
        heads = len(self._pattern)
        step = max(1, self._rows_at_once * 8 // heads)
        for first in range(0, len(rotated), step):
            part = slice(first, first + step)
            # A pattern is equal for both values of a RoPE pair, so it may be applied after the rotation.
            out[part] = (rotated[part, None] * self._pattern).astype(BFLOAT16)

    def _rows(self, token_keys: np.ndarray, kind: int) -> Any:
        xp = self.xp
        mixed = _mix(token_keys + np.uint64(self._streams[kind]))
        low = xp.asarray((mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        high = xp.asarray((mixed >> np.uint64(32)).astype(np.uint32))
        gain, offset = self._channels[kind]
        rows = xp.empty((len(token_keys), HEAD_DIM), np.float32)
        for first in range(0, len(rows), self._rows_at_once):
            part = slice(first, first + self._rows_at_once)
            rows[part] = _heavy_tailed(low[part], high[part], self._salt, xp) * gain + offset
        return rows


HIDDEN = 2  # a kind of rows


def token_rows(token_keys: np.ndarray, seed: int, layer: int, width: int, xp: Any) -> Any:
    """Hidden states of tokens with these keys, [n, width] float32 of variance 1 and heavy tails."""
    mixed = _mix(token_keys + np.uint64(_mix_number((seed << 16) + (layer << 2) + HIDDEN)))
    low = xp.asarray((mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    high = xp.asarray((mixed >> np.uint64(32)).astype(np.uint32))
    salt = xp.asarray(np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9))
    return _heavy_tailed(low, high, salt, xp)


def apply_rope(rows: Any, positions: Any, xp: Any) -> Any:
    """Rows [n, 512] float32 with their last 64 values rotated, in neighbouring pairs, by their positions [n]."""
    frequencies = ROPE_BASE ** (-np.arange(0, ROPE_DIM, 2) / ROPE_DIM)
    angles = xp.asarray(positions).astype(np.float64)[:, None] * xp.asarray(frequencies)
    cos, sin = xp.cos(angles).astype(np.float32), xp.sin(angles).astype(np.float32)
    even, odd = rows[:, NOPE_DIM::2], rows[:, NOPE_DIM + 1 :: 2]
    rotated = rows.copy()
    rotated[:, NOPE_DIM::2] = even * cos - odd * sin
    rotated[:, NOPE_DIM + 1 :: 2] = odd * cos + even * sin
    return rotated


def _heavy_tailed(low: Any, high: Any, salt: Any, xp: Any) -> Any:
    """[n, 512] float32 of variance 1: one normal of Box-Muller times exp of the other."""
    first = _mix32(low[:, None] + salt)
    second = _mix32(first ^ high[:, None])
    radius = (first >> np.uint32(8)).astype(np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2.0**-24)
    xp.log(radius, out=radius)
    radius *= np.float32(-2)
    xp.sqrt(radius, out=radius)
    angle = (second >> np.uint32(8)).astype(np.float32)
    angle *= np.float32(2 * np.pi * 2.0**-24)
    values = xp.cos(angle)
    values *= radius
    xp.sin(angle, out=angle)
    angle *= radius
    angle *= np.float32(TAIL)
    angle -= np.float32(TAIL**2)
    xp.exp(angle, out=angle)
    values *= angle
    return values


def _mix32(x: Any) -> Any:
    """MurmurHash3's finaliser, in place: every bit of a uint32 affects all bits."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on host uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_number(x: int) -> int:
    return int(_mix(np.array([(x * 0x9E3779B97F4A7C15) & UINT64_MASK], np.uint64))[0])


def _channels(seed: int, layer: int, kind: int, std: float, xp: Any) -> tuple[Any, Any]:
    """Gain and offset [512] float32 of each channel; hot channels are none that RoPE rotates."""
    rng = np.random.default_rng([seed, layer, kind])
    gain, offset = np.full(HEAD_DIM, std), np.zeros(HEAD_DIM)
    hot = rng.choice(NOPE_DIM, NUM_HOT, replace=False)
    mean = std * rng.uniform(*HOT_GAIN, NUM_HOT)
    gain[hot] = HOT_SPREAD * mean
    offset[hot] = mean * rng.choice([-1, 1], NUM_HOT)
    return xp.asarray(gain.astype(np.float32)), xp.asarray(offset.astype(np.float32))


def _head_patterns(seed: int, layer: int, heads: int) -> np.ndarray:
    """[h, 512] float32 of mean square 1, equal for the two values of a RoPE pair."""
    rng = np.random.default_rng([seed, layer, 3])
    sign = rng.choice([-1, 1], (heads, HEAD_DIM))
    pattern = sign * np.exp(HEAD_SPREAD * rng.standard_normal((heads, HEAD_DIM)) - HEAD_SPREAD**2)
    pattern[:, NOPE_DIM + 1 :: 2] = pattern[:, NOPE_DIM::2]
    return pattern.astype(np.float32)
