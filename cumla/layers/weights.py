"""Reads a projection's weight from an engine's layer, dequantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import dlpack
from ..arrays.memory import to_host
from ..dispatch.call import BYTES, FLOATS
from ..dispatch.values import FLOAT32_LEAST, check_integers, shown

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8 = np.dtype(np.uint8), E4M3  # dtypes of e4m3 values
NUMBERS = tuple(map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)))
BLOCK = (128, 128)  # of DeepSeek V3 checkpoints
PACKED = ("weight_packed", "qweight")  # attributes of compressed-tensors, and of GPTQ and AWQ
SCALES = ("weight_scale_inv", "weight_scale")  # for blocks, and for a tensor or its rows: value = e4m3 * scale


@dataclass(frozen=True)
class BlockQuantizedWeight:
    """A matrix in FP8 with a scale for each block, as in DeepSeek V3 checkpoints.

    Attributes:
        weight: uint8 (or float8) [out, in], e4m3, of any strides
        scale: [ceil(out / block[0]), ceil(in / block[1])], float32 or UE8M0 (float8_e8m0fnu, uint8); value = e4m3 *
            scale. Scales below 2^-126 in magnitude count as 0
        block: rows and columns that share a scale, each from 1 on

    Raises TypeError or ValueError for a block that is no pair of such integers. A layer checks the arrays, and its
    error has the weight's name.
    """

    weight: Any
    scale: Any
    block: tuple[int, int] = BLOCK

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", checked_block("block", self.block))


def checked_block(name: str, block: Any) -> tuple[int, int]:
    """Raises TypeError or ValueError unless a block is two integers from 1 on."""
    try:
        rows, columns = block
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {shown(block)}, expected the rows and the columns that share a scale") from None
    check_integers(1, **{f"{name}[0]": rows, f"{name}[1]": columns})
    return int(rows), int(columns)


def weight_of(name: str, source: Any) -> Any:
    """The weight [out, in] as a NumPy or CuPy array of bfloat16, float16 or float32.

    Args:
        source: the array; a BlockQuantizedWeight; or a layer with `weight`. If the weight is FP8 the layer also has
            `weight_scale_inv` (one scale for each block of `weight_block_size`, by default 128 x 128) or `weight_scale`
            (one scale, or one a row)

    Raises TypeError or ValueError for any other source; for packed weights the error names the attribute.
    """
    if isinstance(source, BlockQuantizedWeight):
        return dequantized(source, name)
    for attribute in PACKED:
        if hasattr(source, attribute):
            raise TypeError(
                f"{name}.{attribute}: got a packed weight, expected a layer with `weight` in bfloat16, float16, "
                "float32 or FP8; unpack it first"
            )
    if hasattr(source, "weight"):
        return _weight_of_layer(name, source)
    weight = dlpack.borrow(source, name)
    if weight.dtype not in FLOATS:
        raise TypeError(f"{name}: got dtype {weight.dtype}, expected bfloat16, float16 or float32, or FP8 with scales")
    return weight


def _weight_of_layer(name: str, layer: Any) -> Any:
    weight = dlpack.argument(layer.weight, f"{name}.weight").native
    if weight.dtype not in BYTES:
        return weight_of(f"{name}.weight", layer.weight)
    if weight.ndim != 2:
        raise ValueError(f"{name}.weight: got shape {tuple(weight.shape)}, expected [out, in]")
    scale = next(
        (getattr(layer, attribute) for attribute in SCALES if getattr(layer, attribute, None) is not None), None
    )
    if scale is None:
        raise ValueError(f"{name}: got an FP8 weight without {' or '.join(SCALES)}, expected the layer to have them")
    native = dlpack.borrow(scale, f"{name}'s scales")
    rows, columns = weight.shape
    if native.size == 1:
        block, native = (rows, columns), native.reshape(1, 1)
    elif native.shape in ((rows,), (rows, 1)):
        block, native = (1, columns), native.reshape(rows, 1)
    else:
        block = checked_block(f"{name}.weight_block_size", getattr(layer, "weight_block_size", None) or BLOCK)
    return dequantized(BlockQuantizedWeight(weight, native, block), name)


def dequantized(weight: BlockQuantizedWeight, name: str = "kv_b_proj") -> Any:
    """float32 [out, in] on the weight's device. Raises TypeError or ValueError if values and scales do not fit."""
    values = dequantized_on_host(weight, f"{name}.weight")
    native = dlpack.borrow(weight.weight, f"{name}.weight")
    return values if isinstance(native, np.ndarray) else dlpack.namespace_of(native).asarray(values)


def dequantized_on_host(weight: BlockQuantizedWeight, name: str) -> np.ndarray:
    """`dequantized` in host memory."""
    return values_of(*checked_blocks(weight, name), weight.block)


def values_of(codes: Any, scales: Any, block: tuple[int, int]) -> np.ndarray:
    """float32 values, in host memory, of e4m3 codes [.., rows, columns] and scales of blocks."""
    values, spread = np.ascontiguousarray(to_host(codes)).view(E4M3).astype(np.float32), to_host(scales)
    for axis, size, step in zip((-2, -1), codes.shape[-2:], block, strict=True):
        spread = spread.repeat(min(size, step), axis=axis)  # a block may be larger than the matrix
    return values * spread[..., : codes.shape[-2], : codes.shape[-1]]


def checked_blocks(weight: BlockQuantizedWeight, name: str) -> tuple[Any, np.ndarray]:
    """The codes on their own device, uint8 [out, in], and float32 scales in host memory.

    Raises TypeError or ValueError if codes and scales do not fit.
    """
    values, scales = dlpack.argument(weight.weight, name).native, _scales(weight.scale, name)
    if values.dtype not in FP8:
        raise TypeError(f"{name}: got dtype {values.dtype} with scales, expected float8_e4m3fn or its bytes in uint8")
    if values.ndim != 2:
        raise ValueError(f"{name}: got FP8 values of shape {values.shape}, expected [out, in]")
    (rows, columns), (block_rows, block_columns) = values.shape, weight.block
    expected = (-(-rows // block_rows), -(-columns // block_columns))
    if scales.shape != expected:
        raise ValueError(f"{name}: got scales of shape {scales.shape}, expected {expected} for {values.shape}")
    return values.view(np.uint8), scales


def _scales(scale: Any, name: str) -> np.ndarray:
    """Scales as contiguous float32; subnormal numbers become 0, as in `fp8_block_linear`."""
    array = to_host(dlpack.borrow(scale, f"{name} (scale)"))
    dtype = str(getattr(scale, "dtype", array.dtype)).rpartition(".")[2]
    if array.dtype == np.uint8 and dtype in ("uint8", "float8_e8m0fnu"):
        array = array.view(ml_dtypes.float8_e8m0fnu)
    elif array.dtype not in NUMBERS:
        raise TypeError(f"{name}: got scales of dtype {dtype}, expected float32 or float8_e8m0fnu")
    scales: np.ndarray = array.astype(np.float32, order="C")
    scales[np.abs(scales) < FLOAT32_LEAST] = 0
    return scales
