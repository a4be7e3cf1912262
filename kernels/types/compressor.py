"""What a compressor is made of, beside the arrays of a step."""

from __future__ import annotations

from typing import Any, NamedTuple


class Compression(NamedTuple):
    """The weights of a compressor.

    position_bias   float32 [ratio, coff * D]
    norm_weight     float32 or bfloat16 [D]
    cos_sin         float32 [max_position, rope_dim]: cosines, then sines; neighbours at the end of a row are pairs
    compress_ratio  positions of a row
    eps             of the RMSNorm
    """

    position_bias: Any
    norm_weight: Any
    cos_sin: Any
    compress_ratio: int
    eps: float
