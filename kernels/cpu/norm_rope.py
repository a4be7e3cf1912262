"""RMSNorm and RoPE before and after sparse attention, one token per loop step, parallel over the cores, in float32."""

from typing import Any

import ml_dtypes
import numpy as np

from ..numba_common.compiled import compiled
from ..numba_common.numbers import e4m3_byte, float32_bits, power_of_two, scale_exponent
from ..types.segments import HeadFactors, Insertion, RopeKind
from .rows import GROUPS, float32_of_bfloat16, geometry_of, group_of, round_to_bfloat16, write_row
from .threads import parallel_for

GROUP = 128
MIN_AMAX = np.float32(1e-10)
NO_TABLE, NO_FACTORS = np.empty((0, 0), np.float32), HeadFactors(np.empty(0, np.float32), np.empty(0, np.float32))
HADAMARD_SCALE = np.float32(128**-0.5)

# Approximate nanoseconds per value.
TO_NORM, TO_ROTATE, TO_QUANTIZE = 1, 1, 4


def fused_q_kv_rmsnorm(
    qr: np.ndarray,
    kv: np.ndarray,
    q_weight: np.ndarray,
    kv_weight: np.ndarray,
    eps: float,
    q_out: np.ndarray,
    kv_out: np.ndarray,
) -> None:
    for x, weight, out in ((qr, q_weight, q_out), (kv, kv_weight, kv_out)):
        rows = float32(x)
        parallel_for(len(rows), rows.shape[1] * TO_NORM, _rmsnorm, rows, weight.astype(np.float32), eps)
        out[...] = rows


@compiled(nogil=True)
def _rmsnorm(first, end, rows, weight, eps):
    for token in range(first, end):
        scale_by_rms(rows[token], eps)
        for i in range(len(weight)):
            rows[token, i] *= weight[i]


def qnorm_rope_and_insert(q: np.ndarray, kv: np.ndarray, into: Insertion, q_out: np.ndarray) -> None:
    queries, nanoseconds = float32(q), q[0].size * (TO_NORM + TO_ROTATE)
    parallel_for(len(q), nanoseconds, _norm_and_rotate, queries, into.positions, into.cos_sin, into.eps)
    q_out[...] = queries
    norm_rope_and_insert(kv, None, into)


def norm_rope_and_insert(kv: np.ndarray, weight: np.ndarray | None, into: Insertion) -> None:
    rows = float32(kv[: len(into.slots)])
    if weight is not None:
        parallel_for(len(rows), rows.shape[1] * TO_NORM, _rmsnorm, rows, weight.astype(np.float32), into.eps)
    nanoseconds = rows.size * (TO_ROTATE + TO_QUANTIZE) // GROUPS
    parallel_for(
        GROUPS, nanoseconds, _rotate_and_insert, rows, *_place(into), row_bits(rows.shape[1]), into.round_rows
    )  # fmt: skip


def _place(into: Insertion) -> tuple[Any, ...]:
    """Cache, slots and rotation in the types that compiled functions take."""
    slots = np.asarray(into.slots, np.int64)
    return into.pages.bytes, geometry_of(into.pages), slots, into.positions, into.cos_sin


@compiled(nogil=True)
def _norm_and_rotate(first, end, q, positions, cos_sin, eps):
    for token in range(first, end):
        rotation = cos_sin[nearest(positions[token], len(cos_sin))]
        for head in range(q.shape[1]):
            scale_by_rms(q[token, head], eps)
            rotate(q[token, head], rotation, np.float32(1))


@compiled(nogil=True)
def _rotate_and_insert(first_group, end_group, rows, pages, g, slots, positions, cos_sin, bits, round_rows):
    for token in range(len(slots)):
        slot = slots[token]
        if 0 <= slot < pages.shape[0] * g.block_size and first_group <= group_of(slot) < end_group:
            rotate(rows[token], cos_sin[nearest(positions[token], len(cos_sin))], np.float32(1))
            insert_row(pages, slot, rows[token], bits[first_group], g, round_rows)


def indexer_knorm_rope_and_insert(
    k: np.ndarray, weight: np.ndarray, bias: np.ndarray, into: Insertion, kind: RopeKind, hadamard: bool
) -> None:
    rows = float32(k[: len(into.slots)])
    nanoseconds = rows.size * (TO_NORM + TO_ROTATE + TO_QUANTIZE) // GROUPS
    if into.cos_sin is None:
        into = into._replace(cos_sin=NO_TABLE)
    parallel_for(
        GROUPS, nanoseconds, _norm_rotate_and_insert,
        rows, weight.astype(np.float32), bias.astype(np.float32), into.eps, *_place(into), row_bits(rows.shape[1]),
        *kind, hadamard,
    )  # fmt: skip


@compiled(nogil=True)
def _norm_rotate_and_insert(
    first_group, end_group, rows, weight, bias, eps, pages, g, slots, positions, cos_sin, bits, rope_first, halves,
    rotates,
):  # fmt: skip
    for token in range(len(slots)):
        slot, row = slots[token], rows[token]
        if not (0 <= slot < pages.shape[0] * g.block_size and first_group <= group_of(slot) < end_group):
            continue
        layer_norm(row, weight, bias, eps)
        if len(cos_sin) > 0:
            rotation = cos_sin[nearest(positions[token], len(cos_sin))]
            rotate_kind(row, rotation, np.float32(1), rope_first, halves)
        if rotates:
            hadamard(row, not g.float32_values)
        insert_row(pages, slot, row, bits[first_group], g, True)


def apply_rope(
    x: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray | None,
    inverse: bool,
    kind: RopeKind,
    ssmax: HeadFactors | None,
    out: np.ndarray,
) -> None:
    rotated = float32(x)
    direction = np.float32(-1 if inverse else 1)
    table, factors = NO_TABLE if cos_sin is None else cos_sin, NO_FACTORS if ssmax is None else ssmax
    parallel_for(len(x), x[0].size * TO_ROTATE, _rotate_heads, rotated, positions, table, direction, *kind, *factors)
    out[...] = rotated


@compiled(nogil=True)
def _rotate_heads(first, end, x, positions, cos_sin, direction, rope_first, halves, scales, biases):
    for token in range(first, end):
        for head in range(x.shape[1] if len(scales) > 0 else 0):
            factor = head_factor(scales[head], biases[head], positions[token])
            for i in range(x.shape[2]):
                x[token, head, i] *= factor
        if len(cos_sin) > 0:
            rotation = cos_sin[nearest(positions[token], len(cos_sin))]
            for head in range(x.shape[1]):
                rotate_kind(x[token, head], rotation, direction, rope_first, halves)


def inverse_rope_and_quantize(
    o: np.ndarray,
    positions: np.ndarray,
    cos_sin: np.ndarray,
    powers_of_two: bool,
    values: np.ndarray,
    scales: np.ndarray,
) -> None:
    back, kind = float32(o), (*RopeKind(), *NO_FACTORS)
    parallel_for(len(o), o[0].size * TO_ROTATE, _rotate_heads, back, positions, cos_sin, np.float32(-1), *kind)
    groups, tokens, width = values.shape
    if o.dtype == ml_dtypes.bfloat16:
        back = float32(back.astype(o.dtype))
    by_group = back.reshape(tokens, groups, width)
    parallel_for(tokens, o[0].size * TO_QUANTIZE, _quantize, by_group, powers_of_two, values.view(np.uint8), scales)


@compiled(nogil=True, error_model="numpy")
def _quantize(first: int, end: int, x: np.ndarray, powers_of_two: bool, values: np.ndarray, scales: np.ndarray) -> None:
    for token in range(first, end):
        for group in range(x.shape[1]):
            for start in range(0, x.shape[2], GROUP):
                amax = MIN_AMAX
                for i in range(start, start + GROUP):
                    magnitude = np.abs(x[token, group, i])
                    if magnitude > amax and magnitude < np.inf:
                        amax = magnitude
                scale = power_of_two(scale_exponent(amax, -126)) if powers_of_two else amax / np.float32(448)
                scales[group, token, start // GROUP] = scale
                for i in range(start, start + GROUP):
                    values[group, token, i] = e4m3_byte(np.float32(x[token, group, i] / np.float32(scale)))


def row_bits(width: int) -> np.ndarray:
    """Memory for `insert_row`: one row for each group of slots, as groups run concurrently."""
    return np.empty((GROUPS, width), np.uint16)


def float32(x: np.ndarray) -> np.ndarray:
    """A copy in float32, which the caller may modify."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.array(x, np.float32, order="C")


@compiled
def nearest(position, count):
    return min(max(np.int64(position), 0), count - 1)


@compiled
def scale_by_rms(row, eps):
    """row /= sqrt(mean(row^2) + eps); the sum is float64, because a row's squares may overflow float32."""
    total = 0.0
    for i in range(len(row)):
        total += np.float64(row[i]) * np.float64(row[i])
    scale = np.float32(1.0 / np.sqrt(total / len(row) + eps))
    for i in range(len(row)):
        row[i] *= scale


@compiled
def layer_norm(row, weight, bias, eps):
    mean = 0.0
    for i in range(len(row)):
        mean += np.float64(row[i])
    mean /= len(row)
    for i in range(len(row)):
        row[i] = np.float32(np.float64(row[i]) - mean)
    scale_by_rms(row, eps)
    for i in range(len(row)):
        row[i] = row[i] * weight[i] + bias[i]


@compiled
def hadamard(row, rounded):
    """The orthonormal Hadamard transform, in Sylvester's order, of a row of 128 values.

    Args:
        rounded: round the row to bfloat16 first
    """
    if rounded:
        for i in range(len(row)):
            row[i] = float32_of_bfloat16(round_to_bfloat16(row[i]))
    step = 1
    while step < len(row):
        for first in range(0, len(row), 2 * step):
            for i in range(first, first + step):
                a, b = row[i], row[i + step]
                row[i], row[i + step] = a + b, a - b
        step *= 2
    for i in range(len(row)):
        row[i] *= HADAMARD_SCALE


@compiled
def rotate(row, rotation, direction):
    """Rotate the last values of float32 `row` in pairs of neighbours; `direction` -1 is inverse RoPE."""
    half = len(rotation) // 2
    first = len(row) - 2 * half
    for pair in range(half):
        cos, sin = rotation[pair], rotation[half + pair] * direction
        x, y = row[first + 2 * pair], row[first + 2 * pair + 1]
        row[first + 2 * pair] = x * cos - y * sin
        row[first + 2 * pair + 1] = y * cos + x * sin


@compiled
def rotate_kind(row, rotation, direction, first, halves):
    """`rotate` for any kind of RoPE: the first or last values, in neighbours or in halves."""
    half = len(rotation) // 2
    begin = 0 if first else len(row) - 2 * half
    for pair in range(half):
        low = begin + (pair if halves else 2 * pair)
        high = low + (half if halves else 1)
        cos, sin = rotation[pair], rotation[half + pair] * direction
        x, y = row[low], row[high]
        row[low] = x * cos - y * sin
        row[high] = y * cos + x * sin


@compiled
def head_factor(scale, bias, position):
    """SSMax's factor of a head at a position."""
    return scale * np.log(np.float32(max(np.int64(position), np.int64(0)) + np.int64(1))) + bias


@compiled
def insert_row(pages, slot, row, bits, g, rounded):
    """Write float32 values into a slot, through bfloat16 unless the cache holds float32. Also rounds `row`.

    Args:
        bits: [len(row)] uint16, scratch memory for the row in bfloat16
        rounded: also the values that the cache quantises
    """
    page, token = pages[slot // g.block_size], slot % g.block_size
    if g.float32_values:
        for i in range(len(row)):
            word = float32_bits(row[i])
            for byte in range(4):
                page[token * g.row_bytes + 4 * i + byte] = (word >> (8 * byte)) & 0xFF
        return
    for i in range(len(row)):
        bits[i] = round_to_bfloat16(row[i])
        if rounded:
            row[i] = float32_of_bfloat16(bits[i])
    write_row(page, token, row, bits[g.quantized_dim :], g, True)
