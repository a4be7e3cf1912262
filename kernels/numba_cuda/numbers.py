"""The number formats as functions for kernels, compiled for the device."""

from typing import Any

from ..numba_common import numbers
from ..numba_common.compiled import Compiled
from ..numba_common.numbers import BFLOAT16, INFINITY_BITS, KINDS

__all__ = [
    "BFLOAT16", "INFINITY_BITS", "KINDS", "bfloat16_bits", "bfloat16_value", "dequantized", "e2m1_in_units",
    "e2m1_quantized", "e2m1_scale", "e2m1_value", "e4m3_byte", "e4m3_value", "float16_value", "float32_bits",
    "float32_value", "flushed", "from_float32", "one_scale", "power_of_two", "quantized", "scale_exponent",
    "tile_scale", "to_float32", "ue8m0_value",
]  # fmt: skip


def _for_kernels(function: Any) -> Any:
    return function.dispatcher() if isinstance(function, Compiled) else function


bfloat16_bits = _for_kernels(numbers.bfloat16_bits)
bfloat16_value = _for_kernels(numbers.bfloat16_value)
dequantized = _for_kernels(numbers.dequantized)
e2m1_in_units = _for_kernels(numbers.e2m1_in_units)
e2m1_quantized = _for_kernels(numbers.e2m1_quantized)
e2m1_scale = _for_kernels(numbers.e2m1_scale)
e2m1_value = _for_kernels(numbers.e2m1_value)
e4m3_value = _for_kernels(numbers.e4m3_value)
e4m3_byte = _for_kernels(numbers.e4m3_byte)
float16_value = _for_kernels(numbers.float16_value)
float32_bits = _for_kernels(numbers.float32_bits)
float32_value = _for_kernels(numbers.float32_value)
flushed = _for_kernels(numbers.flushed)
from_float32 = _for_kernels(numbers.from_float32)
one_scale = _for_kernels(numbers.one_scale)
power_of_two = _for_kernels(numbers.power_of_two)
quantized = _for_kernels(numbers.quantized)
scale_exponent = _for_kernels(numbers.scale_exponent)
tile_scale = _for_kernels(numbers.tile_scale)
to_float32 = _for_kernels(numbers.to_float32)
ue8m0_value = _for_kernels(numbers.ue8m0_value)
