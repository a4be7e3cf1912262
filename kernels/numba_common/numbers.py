"""Number formats bit by bit: bfloat16, float16, e4m3, e2m1 and UE8M0, to and from float32.

Both Numba backends use these functions: a CUDA kernel may call a compiled function, which is then compiled
for the device. Where targets could differ they use integer arithmetic, on int64 (Numba gives float64 for
a mix of uint64 and int64). Rounding is to nearest even. Subnormals of a format are a fixed grid: adding a
number whose last place is the grid's step rounds to the grid.
"""

from typing import Any

import numpy as np

from .compiled import compiled

# Types of floating-point arrays; kernels take the arrays as unsigned integers.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

INFINITY_BITS = 0x7F800000  # bits of float32's infinity; larger magnitudes are NaN
NAN_BITS = 0x7FC00000
SMALLEST_NORMAL = np.float32(2.0**-126)


@compiled
def float32_bits(x: Any) -> Any:
    return np.int64(np.float32(x).view(np.uint32))


@compiled
def float32_value(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@compiled
def flushed(x: Any) -> Any:
    """float32 `x`, or 0 if it is subnormal."""
    return x if not abs(x) < SMALLEST_NORMAL else np.float32(0) * x


@compiled
def bfloat16_bits(x: Any) -> Any:
    bits = float32_bits(x)
    if x != x:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@compiled
def bfloat16_value(bits: Any) -> Any:
    return float32_value(np.int64(bits) << 16)


@compiled
def float16_bits(x: Any) -> Any:
    bits = float32_bits(x)
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > INFINITY_BITS:
        return sign | 0x7E00 | ((magnitude >> 13) & 0x3FF)
    if magnitude >= 0x477FF000:  # 65520, half a step above the largest finite value
        return sign | 0x7C00
    if magnitude < 0x38800000:  # 2^-14, the smallest normal: steps of 2^-24, the last place of 0.5
        return sign | (float32_bits(float32_value(magnitude) + np.float32(0.5)) - 0x3F000000)
    return sign | (((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10))


@compiled
def float16_value(bits: Any) -> Any:
    sign, magnitude = (np.int64(bits) & 0x8000) << 16, np.int64(bits) & 0x7FFF
    if magnitude >= 0x7C00:
        return float32_value(sign | INFINITY_BITS | ((magnitude & 0x3FF) << 13))
    if magnitude < 0x400:
        return float32_value(sign | float32_bits(np.float32(magnitude) * np.float32(2.0**-24)))
    return float32_value(sign | ((magnitude << 13) + (112 << 23)))


@compiled
def e4m3_byte(x: Any) -> Any:
    """e4m3 byte of x; beyond 448 saturates, NaN becomes 0x7F."""
    if x != x:
        return np.int64(0x7F)
    bits = float32_bits(x)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    if magnitude >= 0x43E00000:  # 448
        return sign | 0x7E
    if magnitude < 0x3C800000:  # 2^-6, the smallest normal: steps of 2^-9, the last place of 2^14
        return sign | (float32_bits(float32_value(magnitude) + np.float32(16384.0)) - 0x46800000)
    return sign | (((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3))


@compiled
def e4m3_value(byte: Any) -> Any:
    sign, magnitude = (np.int64(byte) & 0x80) << 24, np.int64(byte) & 0x7F
    if magnitude == 0x7F:
        return float32_value(sign | NAN_BITS)
    if magnitude < 8:
        return float32_value(sign | float32_bits(np.float32(magnitude) * np.float32(2.0**-9)))
    return float32_value(sign | ((magnitude << 20) + (120 << 23)))


@compiled
def e2m1_code(x: Any) -> Any:
    """The four bits of x as e2m1; beyond 6 saturates. NaN becomes 0: the format has none.

    Ties go to even codes: a midpoint below an odd code rounds down.
    """
    if x != x:
        return np.int64(0)
    y = abs(x)
    code = np.int64(y > 0.25) + np.int64(y >= 0.75) + np.int64(y > 1.25) + np.int64(y >= 1.75)
    code += np.int64(y > 2.5) + np.int64(y >= 3.5) + np.int64(y > 5)
    return ((float32_bits(x) >> 28) & 8) | code


@compiled
def e2m1_value(code: Any) -> Any:
    """The value of an e2m1 code: its bits in e4m3's fields are the value times 2^-6."""
    return e4m3_value(((code & 8) << 4) | ((code & 7) << 2)) * np.float32(64)


@compiled
def scale_exponent(amax: Any, min_exponent: Any) -> Any:
    """Smallest e >= `min_exponent` with amax <= 448 * 2^e. Exact: 448 is 1.75 * 2^8."""
    bits = float32_bits(amax)
    exponent = (bits >> 23) - 127 - 8
    if (bits & 0x7FFFFF) > 0x600000:
        exponent += 1
    return max(exponent, min_exponent)


@compiled
def power_of_two(exponent: Any) -> Any:
    """2^exponent as float32, for exponents of normal numbers."""
    return float32_value((exponent + 127) << 23)


@compiled
def ue8m0_value(byte: Any) -> Any:
    """The scale of a UE8M0 byte: 0 is 2^-127, a subnormal of float32, and 255 is NaN."""
    if byte == 255:
        return float32_value(NAN_BITS)
    return float32_value(np.int64(byte) << 23 if byte else 1 << 22)


@compiled
def one_scale(a: Any, b: Any, c: Any, d: Any) -> Any:
    """One UE8M0 scale for four: the largest that is not NaN, times 2^-6, so that 6 becomes 384."""
    largest = np.int64(0)
    for scale in (np.int64(a), np.int64(b), np.int64(c), np.int64(d)):
        if scale != 255:
            largest = max(largest, scale)
    return max(largest - 6, 1)


@compiled
def e2m1_in_units(code: Any, scale: Any, unit: Any) -> Any:
    """An e2m1 code with a UE8M0 scale as an e4m3 byte with the scale `unit`; 0 if the scale is 2^-30 of it or less."""
    if scale == 255:
        return np.int64(0x7F)
    return e4m3_byte(e2m1_value(code) * power_of_two(max(np.int64(scale) - unit, -30)))


@compiled(error_model="numpy")
def e2m1_scale(amax: Any, powers_of_two: Any, min_exponent: Any, min_scale: Any) -> Any:
    """The scale of a tile of e2m1 values whose largest finite magnitude is `amax`, NaN if the tile has a NaN.

    A power of two, 6 being 1.5 * 2^2, or an e4m3 number.
    """
    if amax != amax:
        return float32_value(NAN_BITS)
    if powers_of_two:
        bits = float32_bits(amax)
        exponent = (bits >> 23) - 127 - 2
        if (bits & 0x7FFFFF) > 0x400000:
            exponent += 1
        return power_of_two(max(exponent, min_exponent))
    return e4m3_value(e4m3_byte(max(np.float32(amax) / np.float32(6), np.float32(min_scale))))


@compiled(error_model="numpy")
def tile_scale(amax: Any, powers_of_two: Any, min_exponent: Any, min_scale: Any) -> Any:
    """The scale of a tile of e4m3 values whose largest finite magnitude is `amax`."""
    if powers_of_two:
        return power_of_two(scale_exponent(amax, min_exponent))
    return max(np.float32(amax) / np.float32(448), np.float32(min_scale))


@compiled(error_model="numpy")
def quantized(x: Any, scale: Any) -> Any:
    """x / scale as an e4m3 byte."""
    return e4m3_byte(np.float32(x) / np.float32(scale))


@compiled
def dequantized(byte: Any, scale: Any) -> Any:
    """An e4m3 byte times scale, in float32."""
    return e4m3_value(byte) * np.float32(scale)


@compiled(error_model="numpy")
def e2m1_quantized(x: Any, scale: Any) -> Any:
    """x / scale as an e2m1 code. A product with 1 / scale would round some values to the other neighbour."""
    return e2m1_code(np.float32(x) / np.float32(scale))


@compiled
def to_float32(bits: Any, kind: Any) -> Any:
    """The value of an element of a float array of `kind` viewed as unsigned integers."""
    if kind == BFLOAT16:
        return bfloat16_value(bits)
    if kind == FLOAT16:
        return float16_value(bits)
    return float32_value(bits)


@compiled
def from_float32(x: Any, kind: Any) -> Any:
    """The bits of `x` as a float of `kind`."""
    if kind == BFLOAT16:
        return bfloat16_bits(x)
    if kind == FLOAT16:
        return float16_bits(x)
    return float32_bits(x)
