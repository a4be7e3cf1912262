"""What a compressor is made of, beside the arrays of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

from .segments import Pages


class CompressorRows(NamedTuple):
    """What one of the compressors of a layer reads and writes.

    kv_score       float32 or bfloat16 [T, 2 * coff * D]
    position_bias  float32 [ratio, coff * D]
    norm_weight    float32 or bfloat16 [D]
    state          float32 [num_blocks, state_block_size, 2 * coff * D]
    pages          of the rows that it makes
    """

    kv_score: Any
    position_bias: Any
    norm_weight: Any
    state: Any
    pages: Pages


class Compression(NamedTuple):
    """What the compressors of a layer share.

    cos_sin         float32 [max_position, rope_dim]: cosines, then sines; neighbours at the end of a row are pairs
    compress_ratio  positions of a row
    eps             of the RMSNorm
    """

    cos_sin: Any
    compress_ratio: int
    eps: float
