"""The fields of a cache format: their allowed values, and the rules between them.

Below `cumla.layout`, whose CacheLayout is the argument `x` of the checks.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np

ValueType = Literal["e4m3", "e2m1", "bfloat16", "float16", "float32"]
ScaleType = Literal["none", "ue8m0", "float32", "e4m3"]

MAX_BYTES = 2**63 - 1  # the largest array
VALUE_BITS: dict[ValueType, int] = {"e4m3": 8, "e2m1": 4, "bfloat16": 16, "float16": 16, "float32": 32}
SCALE_BYTES: dict[ScaleType, int] = {"none": 0, "ue8m0": 1, "float32": 4, "e4m3": 1}
LARGEST: dict[ValueType, float] = {"e4m3": 448.0, "e2m1": 6.0}
# The types of scales that quantised values may have.
SCALES_OF: dict[ValueType, tuple[ScaleType, ...]] = {"e4m3": ("none", "ue8m0", "float32"), "e2m1": ("ue8m0", "e4m3")}
LEAST_E4M3_SCALE = 2.0**-9  # above 0
CHOICES: dict[str, tuple[str, ...]] = {
    "value_type": tuple(VALUE_BITS), "scale_type": tuple(SCALE_BYTES), "scale_placement": ("in_row", "page_tail")
}  # fmt: skip

# Scale tiles that the kernels of all backends take, by the types of values and scales. Tiles of less than 64 values
# need rows without 16-bit values, a multiple of 64 values long.
KERNEL_TILES: dict[tuple[ValueType, ScaleType], tuple[int, ...]] = {
    ("e4m3", "float32"): (64, 128), ("e4m3", "ue8m0"): (16, 32, 64), ("e2m1", "ue8m0"): (16, 32),
    ("e2m1", "e4m3"): (16, 32),
}  # fmt: skip
FINE_TILE = 64  # tiles below it are fine
LEAST_DIM, MOST_SCALES = 136, 32
ACCESS_BYTES, WORD_BYTES = 16, 4  # widest reads of values and of scales


def integer(name: str, value: Any, least: int, most: int = MAX_BYTES) -> int:
    """A size as a Python integer, whose products cannot overflow as NumPy's can. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an integer")
    if value < least:
        raise ValueError(f"{name}: got {int(value)}, expected at least {least}")
    if value > most:
        raise ValueError(f"{name}: got {int(value)}, expected at most {most}")
    return int(value)


def check_fields(x: Any) -> None:
    """Raise TypeError or ValueError, naming the field, unless the fields describe rows and scales without overlap."""
    if not isinstance(x.name, str):
        raise TypeError(f"name: got {type(x.name).__name__}, expected a string")
    for name, known in CHOICES.items():
        if getattr(x, name) not in known:
            raise ValueError(f"{name}: got {getattr(x, name)!r}, expected one of {', '.join(known)}")
    for name in ("head_dim", "row_bytes", "page_alignment", "stride_multiple"):
        integer(name, getattr(x, name), 1)
    for name in ("rope_dim", "scale_tile", "scale_bytes"):
        integer(name, getattr(x, name), 0)
    integer("min_exponent", x.min_exponent, -126, 0)
    if isinstance(x.min_scale, bool) or not isinstance(x.min_scale, (int, float, np.floating)):
        raise TypeError(f"min_scale: got {type(x.min_scale).__name__}, expected a number")
    if not (math.isfinite(x.min_scale) and x.min_scale >= 0):
        raise ValueError(f"min_scale: got {x.min_scale}, expected a finite number of at least 0")
    if x.rope_dim > x.head_dim:
        raise ValueError(f"rope_dim: got {x.rope_dim}, expected at most head_dim, {x.head_dim}")
    _check_scales(x)
    row_bytes = (
        x.rope_offset + 2 * x.rope_dim if x.value_type in LARGEST else x.head_dim * VALUE_BITS[x.value_type] // 8
    )
    if x.row_bytes != row_bytes:
        of = "values and scales" if x.rope_offset > x.quantized_bytes else "values"
        raise ValueError(f"row_bytes: got {x.row_bytes}, expected {row_bytes}, the bytes of its {of}")


def _check_scales(x: Any) -> None:
    known = SCALES_OF.get(x.value_type, ("none",))
    if x.scale_type not in known:
        expected = f"{' or '.join(known)} for {x.value_type} values"
        raise ValueError(f"scale_type: got {x.scale_type!r}, expected {expected}")
    if x.scale_type == "none":
        for name in ("scale_tile", "scale_bytes"):
            if getattr(x, name):
                raise ValueError(f"{name}: got {getattr(x, name)}, expected 0 without scales")
        return
    values, size = x.head_dim - x.rope_dim, SCALE_BYTES[x.scale_type]
    if not values:
        raise ValueError(
            f"rope_dim: got {x.rope_dim}, expected less than head_dim, {x.head_dim}, in a quantised format"
        )
    if not x.scale_tile or values % x.scale_tile:
        raise ValueError(f"scale_tile: got {x.scale_tile}, expected a divisor of the {values} quantised values")
    if x.value_type == "e2m1" and x.scale_tile % 2:
        raise ValueError(f"scale_tile: got {x.scale_tile}, expected an even number: two e2m1 values share a byte")
    if x.scale_bytes < x.num_scales * size or x.scale_bytes % size:
        expected = f"a multiple of {size} of at least {x.num_scales * size}, for {x.num_scales} {x.scale_type} scales"
        raise ValueError(f"scale_bytes: got {x.scale_bytes}, expected {expected}")
    if x.scale_type == "e4m3" and x.min_scale < LEAST_E4M3_SCALE:
        raise ValueError(f"min_scale: got {x.min_scale}, expected at least 2^-9, the least e4m3 number above 0")


def check_for_kernels(x: Any) -> None:
    """Raise ValueError, naming the field, for a format that not every backend's kernels take."""
    if not re.fullmatch(r"[A-Za-z]\w*", x.name, re.ASCII):  # the name of a struct in CUDA's sources
        raise ValueError(f"name: got {x.name!r}, expected a letter, then letters, digits and underscores")
    if x.value_type == "float16" or (x.value_type == "e4m3" and x.scale_type == "none"):
        raise ValueError(f"value_type: got {x.value_type} without scales, expected bfloat16, float32 or scales")
    is_fine = 0 < x.scale_tile < FINE_TILE
    for name, multiple in (("head_dim", FINE_TILE if is_fine else 8), ("rope_dim", 8)):
        if getattr(x, name) % multiple:
            of = f" with scales of {x.scale_tile} values" if multiple > 8 else ""
            raise ValueError(f"{name}: got {getattr(x, name)}, expected a multiple of {multiple}{of}")
    if x.head_dim < LEAST_DIM:
        raise ValueError(f"head_dim: got {x.head_dim}, expected at least {LEAST_DIM}")
    if not x.num_scales:
        return
    tiles = KERNEL_TILES[x.value_type, x.scale_type]
    if x.scale_tile not in tiles:
        of = f"{x.value_type} values with {x.scale_type} scales"
        raise ValueError(f"scale_tile: got {x.scale_tile}, expected {' or '.join(map(str, tiles))} for {of}")
    if x.rope_dim and is_fine:
        raise ValueError(f"rope_dim: got {x.rope_dim}, expected 0 with scales of {x.scale_tile} values")
    if x.num_scales > MOST_SCALES:
        raise ValueError(
            f"scale_tile: got {x.num_scales} scales of {x.scale_tile} values, expected at most {MOST_SCALES}"
        )
    scale_bytes = -(-x.num_scales * SCALE_BYTES[x.scale_type] // WORD_BYTES) * WORD_BYTES
    if x.scale_bytes != scale_bytes:
        raise ValueError(
            f"scale_bytes: got {x.scale_bytes}, expected {scale_bytes}: no padding but to {WORD_BYTES} bytes"
        )
    if x.row_bytes % ACCESS_BYTES:  # the row's 16-bit values then begin at such a multiple, too
        raise ValueError(
            f"row_bytes: got {x.row_bytes}, expected a multiple of {ACCESS_BYTES}; scales at the page's end "
            "(scale_placement) take no bytes of a row"
        )
