"""The bytes of tokens: conversion of values to rows and scales, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ...layout import LARGEST, SCALE_BYTES, CacheLayout, ScaleType
from ..types.segments import Pages

E4M3_MAX = LARGEST["e4m3"]
# Stored type of values without a scale, by the layout's value_type.
PLAIN_TYPES = {
    "e4m3": ml_dtypes.bfloat16,
    "e2m1": ml_dtypes.bfloat16,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by code


def flush_subnormals(x: Any) -> Any:
    """float32 with subnormal numbers set to 0: CUDA's kernels are compiled with -ftz=true."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def scale_exponent(amax: Any, min_exponent: int, largest: float = E4M3_MAX) -> Any:
    """Smallest e >= `min_exponent` with amax <= largest * 2^e. Exact: 448 is 0.875 * 2^9, and 6 is 0.75 * 2^3."""
    fraction, exponent = np.frexp(amax)
    most, bound_exponent = np.frexp(largest)
    return np.where(amax == 0, min_exponent, np.maximum(exponent - bound_exponent + (fraction > most), min_exponent))


def quantize_tiles(values: np.ndarray, layout: CacheLayout, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """float32 [..., n] -> bytes of the rows [..., n or n / 2] and a scale for each, float32 [...].

    The finite values determine the scale; an infinity saturates. A NaN becomes e4m3's NaN. e2m1 has no NaN: the
    tile's scale becomes NaN.
    """
    amax = np.where(np.isfinite(values), np.abs(values), np.float32(0)).max(axis=-1, initial=0)
    largest = np.float32(LARGEST[layout.value_type])
    if layout.scale_type == "e4m3":
        wanted = np.clip(amax / largest, np.float32(layout.min_scale), np.float32(E4M3_MAX))
        scale = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif power_of_two:
        scale = np.ldexp(1.0, scale_exponent(amax, layout.min_exponent, float(largest))).astype(np.float32)
    else:
        scale = np.maximum(amax / largest, np.float32(layout.min_scale))
    with np.errstate(invalid="ignore"):  # signalling NaN
        scaled = values / scale[..., None]
        if layout.value_type == "e4m3":
            return to_e4m3(scaled), scale
        invalid = np.isnan(values).any(axis=-1)
        codes = to_e2m1(np.where(invalid[..., None], np.float32(0), scaled))
        return codes, np.where(invalid, np.float32(np.nan), scale)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 to e4m3 bytes, to nearest even; beyond 448 saturates, NaN becomes 0x7F."""
    saturated = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), saturated)


def to_e2m1(values: np.ndarray) -> np.ndarray:
    """float32 [..., n] to bytes [..., n / 2] of two e2m1 codes, to nearest even; beyond 6 saturates. No NaN."""
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0x0F
    return codes[..., 0::2] | codes[..., 1::2] << 4


def scale_bytes(scales: np.ndarray, scale_type: ScaleType) -> np.ndarray:
    """float32 scales as bytes of a cache. A scale of 0, unused in a row, is byte 0: UE8M0 reads it as 2^-127."""
    if scale_type == "ue8m0":
        exponents = np.where(scales > 0, np.frexp(scales)[1] + 126, 0)
        return np.where(np.isnan(scales), 255, exponents).astype(np.uint8)
    if scale_type == "e4m3":
        return to_e4m3(scales)
    return scales.view(np.uint8)


def scales_of(stored: np.ndarray, scale_type: ScaleType) -> np.ndarray:
    """Bytes of a cache [n, ...] as scales, float64."""
    if scale_type == "ue8m0":
        exponents = stored.astype(np.int64)
        return np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
    if scale_type == "e4m3":
        return E4M3_VALUES[stored].astype(np.float64)
    return np.ascontiguousarray(stored).view(np.float32).astype(np.float64)


def write_tokens(pages: Pages, slots: np.ndarray, values: np.ndarray, rope: np.ndarray, power_of_two: bool) -> None:
    """Quantise `values`, float32 [n, quantized_dim], into the rows and scales of `slots`, and copy `rope`.

    If several tokens have one slot, the last of them is stored.
    """
    layout = pages.layout
    at = np.divmod(slots, pages.block_size)
    if layout.num_scales:
        of_tiles = values.reshape(len(values), layout.num_scales, layout.scale_tile)
        tiles, tile_scales = quantize_tiles(of_tiles, layout, power_of_two)
        rows = tiles.reshape(len(values), layout.quantized_bytes)
        bytes_of_tokens(pages, 0, layout.row_bytes, layout.quantized_bytes)[at] = rows
        scales = np.zeros((len(values), layout.scale_bytes // SCALE_BYTES[layout.scale_type]), np.float32)
        scales[:, : layout.num_scales] = tile_scales
        start = layout.scale_start(pages.block_size)
        stored = bytes_of_tokens(pages, start, layout.scale_stride, layout.scale_bytes)
        stored[at] = scale_bytes(scales, layout.scale_type)
    rope_bytes = layout.row_bytes - layout.rope_offset
    bytes_of_tokens(pages, layout.rope_offset, layout.row_bytes, rope_bytes)[at] = rope.view(np.uint8)


def bytes_of_tokens(pages: Pages, start: int, stride: int, count: int) -> np.ndarray:
    """A view [num_pages, block_size, count]: `count` bytes of each token of a page.

    The first token's bytes begin at byte `start` of the page, and tokens are `stride` bytes apart.
    """
    shape, strides = (len(pages.bytes), pages.block_size, count), (pages.bytes.strides[0], stride, 1)
    return np.lib.stride_tricks.as_strided(pages.bytes[:, start:], shape, strides)


@np.errstate(invalid="ignore")  # signalling NaN
def read_tokens(pages: Pages, slots: np.ndarray) -> np.ndarray:
    """The exact values of the rows in `slots`, float64 [n, head_dim]."""
    layout = pages.layout
    at = np.divmod(np.asarray(slots, np.int64), pages.block_size)
    data = bytes_of_tokens(pages, 0, layout.row_bytes, layout.row_bytes)[at]
    if not layout.quantized_dim:
        return data.view(PLAIN_TYPES[layout.value_type]).astype(np.float64)
    quantized = quantized_values(data[:, : layout.quantized_bytes], layout)
    start = layout.scale_start(pages.block_size)
    stored = bytes_of_tokens(pages, start, layout.scale_stride, layout.scale_bytes)[at]
    scales = scales_of(stored[:, : layout.num_scales * SCALE_BYTES[layout.scale_type]], layout.scale_type)
    rope = data[:, layout.rope_offset :].view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([quantized * np.repeat(scales, layout.scale_tile, axis=1), rope], axis=1)


def quantized_values(data: np.ndarray, layout: CacheLayout) -> np.ndarray:
    """Bytes [n, quantized_bytes] as values without their scales, float64 [n, quantized_dim]."""
    if layout.value_type == "e4m3":
        return E4M3_VALUES[data].astype(np.float64)
    return E2M1_VALUES[np.stack([data & 0x0F, data >> 4], axis=-1)].reshape(len(data), layout.quantized_dim)


def rope_bits(pages: Pages, slots: np.ndarray) -> np.ndarray:
    """Bits of the 16-bit values, which are not quantised, of rows in `slots`: uint16 [n, head_dim - quantized_dim]."""
    layout = pages.layout
    values = bytes_of_tokens(pages, layout.rope_offset, layout.row_bytes, layout.row_bytes - layout.rope_offset)
    return values[np.divmod(slots, pages.block_size)].view(np.uint16)


def lookup_slot(block_table: np.ndarray, row: int, position: int, block_size: int) -> int:
    """The slot of a position of request `row`, or -1 if the table has no such entry or no such block."""
    if not (0 <= row < block_table.shape[0] and 0 <= position < block_table.shape[1] * block_size):
        return -1
    block = int(block_table[row, position // block_size])
    slot = block * block_size + position % block_size
    return slot if block >= 0 and slot < 2**31 else -1


def gathered_rows(
    cu_seq_lens: np.ndarray, seq_starts: np.ndarray | None, num_rows: int
) -> Iterator[tuple[int, int, int]]:
    """(request, row, position) of each row of a gather: request r has rows [cu_seq_lens[r], cu_seq_lens[r + 1])."""
    for request in range(len(cu_seq_lens) - 1):
        first, end = int(cu_seq_lens[request]), int(cu_seq_lens[request + 1])
        start = 0 if seq_starts is None else int(seq_starts[request])
        for row in range(max(first, 0), min(end, num_rows)):
            yield request, row, start + row - first
