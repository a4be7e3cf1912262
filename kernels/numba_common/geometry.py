"""A layout as plain numbers, for compiled Numba code."""

from typing import NamedTuple

from ..types.segments import Pages


class Geometry(NamedTuple):
    """A `CacheLayout` and a block size as plain numbers."""

    block_size: int
    head_dim: int
    quantized_dim: int
    quantized_bytes: int
    row_bytes: int
    rope_offset: int
    scale_tile: int
    scale_bytes: int
    scale_start: int
    scale_stride: int
    ue8m0: bool
    e4m3_scales: bool
    e2m1_values: bool
    float16_values: bool
    float32_values: bool
    min_exponent: int
    min_scale: float


def geometry_of(pages: Pages) -> Geometry:
    layout = pages.layout
    return Geometry(
        pages.block_size,
        layout.head_dim,
        layout.quantized_dim,
        layout.quantized_bytes,
        layout.row_bytes,
        layout.rope_offset if layout.quantized_dim else 0,
        layout.scale_tile or 1,
        layout.scale_bytes,
        layout.scale_start(pages.block_size),
        layout.scale_stride,
        layout.scale_type == "ue8m0",
        layout.scale_type == "e4m3",
        layout.value_type == "e2m1",
        layout.value_type == "float16",
        layout.value_type == "float32",
        layout.min_exponent,
        layout.min_scale,
    )
