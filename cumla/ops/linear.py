"""Products with block-scaled FP8 weights, as in published checkpoints."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import BF16, BYTES, FLOAT32, Call
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_flags, check_integers
from ..kernels.types.projection import BlockScaledProduct

INPUTS = (*BF16, *FLOAT32)
COLUMNS_STEP = 32  # columns of a block are a multiple of it


@launch_cached
def fp8_block_linear(
    x: Array,
    weight: Array,
    weight_scale: Array,
    *,
    block_rows: int = 128,
    block_columns: int = 128,
    float32_output: bool = False,
    prefetch_weights: bool = False,
    finite_weights: bool = False,
    is_ue8m0: bool = False,
    batch_invariant: bool = False,
    out: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """x W^T for FP8 weights with a scale for each block, without rounding x: a decode step's projections.

    Args:
        x: [T, K] or, with a weight for each of G groups, [T, G, K], bfloat16; on the host also float32
        weight: [N, K] or [G, N, K] uint8 (or float8_e4m3fn): e4m3
        weight_scale: [ceil(N / block_rows), ceil(K / block_columns)] float32, or [G, ...]; a value is e4m3 * scale
        block_rows: rows of the weight that share a scale, from 1 on
        block_columns: columns that share a scale, a multiple of 32
        float32_output: whether the result is float32; otherwise it has x's dtype
        prefetch_weights: whether weights may be read before the stream's preceding work has ended, which hides latency;
            only for weights that the preceding work does not write
        finite_weights: whether no byte of the weight is NaN (0x7f, 0xff), which saves a check; with a NaN the result is
            unspecified
        is_ue8m0: whether all scales are powers of two from 2^-100 to 2^7, which saves work; with another scale the
            result is unspecified
        batch_invariant: True: a token's result is bit-identical for any number of tokens and any other tokens: products
            are tiles of 128 tokens (on the host of 16), which cost the same for fewer tokens
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: [T, N] or [T, G, N] to write instead of allocating

    Returns [T, N] or [T, G, N]. Each product is exact, sums are float32, rounded once at the end. The products of a
    block are added before they are scaled, so the sum of x times e4m3 within a block must not overflow; scales are
    finite. Subnormal scales (magnitudes below 2^-126) count as 0 on every backend; sums below 2^-126 may become 0. NaN
    in weights, scales and x, and infinities in x, propagate as in IEEE 754.
    Fast for up to 128 tokens, which read the weights once; for more, dequantise and multiply, as cumla.models does.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: block-wise FP8 of DeepSeek V3 checkpoints (128 x 128), V4.1 (32 x 32).
    """
    check_integers(1, block_rows=block_rows, block_columns=block_columns)
    check_flags(
        float32_output=float32_output, prefetch_weights=prefetch_weights, finite_weights=finite_weights,
        is_ue8m0=is_ue8m0, batch_invariant=batch_invariant,
    )  # fmt: skip
    if block_columns % COLUMNS_STEP:
        raise ValueError(f"block_columns: got {block_columns}, expected a multiple of {COLUMNS_STEP}")
    call = Call(backend, stream, early_release)
    argument = call.borrow("x", x)
    groups: tuple[str, ...] = ("G",) if argument.native.ndim == 3 else ()
    x = call.checked(argument, INPUTS, ("T", *groups, "K"))
    call.check_float32("x", x.dtype.name)
    if not x.shape[-1]:
        raise ValueError("x: got rows of 0 values, expected at least 1")
    weight = call.array("weight", weight, BYTES[:1], (*groups, "N", "K"))
    rows, columns = weight.shape[-2:]
    blocks = -(-rows // block_rows), -(-columns // block_columns)
    scale = call.array("weight_scale", weight_scale, FLOAT32, (*groups, *blocks))
    dtypes = FLOAT32 if float32_output else (x.dtype,)
    result = call.output("out", out, dtypes, (*x.shape[:-1], rows))
    if result.size:
        with call.kernels("projection") as kernels:
            kernels.block_scaled_product(
                BlockScaledProduct(
                    by_group(x), by_group(weight, 0), by_group(scale, 0), block_rows, block_columns, by_group(result),
                    prefetch_weights, finite_weights, is_ue8m0, batch_invariant,
                )
            )  # fmt: skip
    return call.results()


def by_group(array: Any, axis: int = 1) -> Any:
    """An array as [groups, rows, columns]; axis: the array's axis of groups, if it has one."""
    if array.ndim == 2:
        return array[None]
    return array.transpose(1, 0, 2) if axis else array
