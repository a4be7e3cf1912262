"""RMSNorm and RoPE before and after sparse attention, in float64."""

import numpy as np

from ..types.segments import HeadFactors, Insertion, Pages, RopeKind
from .rows import E4M3_MAX, PLAIN_TYPES, scale_exponent, to_e4m3, write_tokens

GROUP = 128
MIN_AMAX = np.float32(1e-10)


def fused_q_kv_rmsnorm(
    qr: np.ndarray,
    kv: np.ndarray,
    q_weight: np.ndarray,
    kv_weight: np.ndarray,
    eps: float,
    q_out: np.ndarray,
    kv_out: np.ndarray,
) -> None:
    q_out[...] = normed(qr.astype(np.float64), eps) * q_weight.astype(np.float64)
    kv_out[...] = normed(kv.astype(np.float64), eps) * kv_weight.astype(np.float64)


def qnorm_rope_and_insert(q: np.ndarray, kv: np.ndarray, into: Insertion, q_out: np.ndarray) -> None:
    rotation = at_positions(into.cos_sin, into.positions)
    q_out[...] = rotated(normed(q.astype(np.float64), into.eps), rotation[:, None])
    norm_rope_and_insert(kv, None, into)


def norm_rope_and_insert(kv: np.ndarray, weight: np.ndarray | None, into: Insertion) -> None:
    rows = kv.astype(np.float64)
    if weight is not None:
        rows = normed(rows, into.eps) * weight.astype(np.float64)
    insert_rows(into, rotated(rows, at_positions(into.cos_sin, into.positions)))


def indexer_knorm_rope_and_insert(
    k: np.ndarray, weight: np.ndarray, bias: np.ndarray, into: Insertion, kind: RopeKind, hadamard: bool
) -> None:
    rows = layer_normed(k, weight, bias, into.eps)
    if into.cos_sin is not None:
        rows = rotated_by(kind, rows, at_positions(into.cos_sin, into.positions))
    insert_rows(into, hadamard_rotated(rounded_to(into.pages, rows)) if hadamard else rows)


def apply_rope(
    x: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray | None,
    inverse: bool,
    kind: RopeKind,
    ssmax: HeadFactors | None,
    out: np.ndarray,
) -> None:
    rows = x.astype(np.float64)
    if ssmax is not None:
        rows = rows * head_factors(ssmax, positions)[:, :, None]
    if cos_sin is not None:
        rows = rotated_by(kind, rows, at_positions(cos_sin, positions)[:, None], inverse)
    out[...] = rows


def inverse_rope_and_quantize(
    o: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray,
    powers_of_two: bool,
    values: np.ndarray,
    scales: np.ndarray,
) -> None:
    back = rotated(o.astype(np.float64), at_positions(cos_sin, positions)[:, None], inverse=True)
    groups, tokens, width = values.shape
    rounded = back.astype(o.dtype).astype(np.float32).reshape(tokens, groups, width // GROUP, GROUP)
    magnitude = np.where(np.isfinite(rounded), np.abs(rounded), 0).max(axis=-1)
    amax = np.maximum(magnitude, MIN_AMAX)
    if powers_of_two:
        scale = np.ldexp(np.float32(1), scale_exponent(amax, -126)).astype(np.float32)
    else:
        scale = amax / np.float32(E4M3_MAX)
    quantized = to_e4m3(rounded / scale[..., None])
    values[...] = quantized.reshape(tokens, groups, width).transpose(1, 0, 2).view(values.dtype)
    scales[...] = scale.transpose(1, 0, 2)


def normed(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    scaled: np.ndarray = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return scaled


def layer_normed(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """LayerNorm over the last axis."""
    centred = x.astype(np.float64) - x.astype(np.float64).mean(axis=-1, keepdims=True)
    scaled: np.ndarray = normed(centred, eps) * weight.astype(np.float64) + bias.astype(np.float64)
    return scaled


def hadamard_rotated(x: np.ndarray) -> np.ndarray:
    """The orthonormal Hadamard transform of the last axis, a power of two long, in Sylvester's order."""
    width = x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rows: np.ndarray = x @ matrix * width**-0.5
    return rows


def at_positions(cos_sin: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The table's rows at positions [T], which are clamped to the table, float64 [T, rope_dim]."""
    rows: np.ndarray = cos_sin[np.clip(positions, 0, len(cos_sin) - 1)].astype(np.float64)
    return rows


def rotated(x: np.ndarray, rotation: np.ndarray, inverse: bool = False) -> np.ndarray:
    """x with the last values of its last axis rotated in pairs of neighbours; `rotation` has cosines, then sines."""
    rope_dim = rotation.shape[-1]
    cos, sin = rotation[..., : rope_dim // 2], rotation[..., rope_dim // 2 :]
    if inverse:
        sin = -sin
    result = x.copy()
    first, second = x[..., -rope_dim::2], x[..., x.shape[-1] - rope_dim + 1 :: 2]
    result[..., -rope_dim::2] = first * cos - second * sin
    result[..., x.shape[-1] - rope_dim + 1 :: 2] = second * cos + first * sin
    return result


def rotated_by(kind: RopeKind, x: np.ndarray, rotation: np.ndarray, inverse: bool = False) -> np.ndarray:
    """x with the values of its last axis that `kind` names rotated."""
    rope_dim = rotation.shape[-1]
    begin = 0 if kind.first else x.shape[-1] - rope_dim
    part, result = x[..., begin : begin + rope_dim], x.copy()
    if kind.halves:  # as neighbours
        part = np.stack(np.split(part, 2, axis=-1), axis=-1).reshape(part.shape)
    part = rotated(part, rotation, inverse)
    if kind.halves:
        part = np.concatenate([part[..., ::2], part[..., 1::2]], axis=-1)
    result[..., begin : begin + rope_dim] = part
    return result


def head_factors(ssmax: HeadFactors, positions: np.ndarray) -> np.ndarray:
    """The factor of each token's head, float64 [T, h]."""
    logarithms = np.log(np.maximum(positions, 0).astype(np.float64) + 1)
    factors: np.ndarray = ssmax.scale.astype(np.float64) * logarithms[:, None] + ssmax.bias
    return factors


def rounded_to(pages: Pages, rows: np.ndarray) -> np.ndarray:
    """Rows in the type that a cache stores before quantisation, float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        stored = rows.astype(np.float32).astype(PLAIN_TYPES[pages.layout.value_type])
        values: np.ndarray = stored.astype(np.float64)
    return values


def insert_rows(into: Insertion, rows: np.ndarray) -> None:
    """Write row t into slots[t], if the cache has that slot."""
    tokens = np.flatnonzero((into.slots >= 0) & (into.slots < into.pages.num_slots))
    write_rows(into.pages, into.slots[tokens].astype(np.int64), rows[tokens], into.round_rows)


def write_rows(pages: Pages, slots: np.ndarray, rows: np.ndarray, rounded: bool = True) -> None:
    """Write float64 rows [n, d] into slots, through bfloat16 unless the cache holds float32.

    Args:
        rounded: also the values that the cache quantises
    """
    with np.errstate(over="ignore", invalid="ignore"):  # values beyond bfloat16 become infinite; signalling NaN
        stored = rows.astype(np.float32).astype(PLAIN_TYPES[pages.layout.value_type])
        values, rope = np.split(stored, [pages.layout.quantized_dim], axis=1)
        if not rounded:
            values = rows[:, : values.shape[1]]
        write_tokens(pages, slots, values.astype(np.float32), rope, power_of_two=True)
