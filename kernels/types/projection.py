"""Arguments of products with quantised weights."""

from typing import Any, NamedTuple


class BlockScaledProduct(NamedTuple):
    """The arguments of `cumla.fp8_block_linear`, by group, and the array of its result: out = x W^T.

    Attributes:
        x: [n, M, K] bfloat16, on the host also float32
        weight: [n, N, K] e4m3 codes
        scales: [n, ceil(N / block_rows), ceil(K / block_columns)] float32
        out: [n, M, N], x's dtype or float32
        prefetch: read weights while the preceding kernel still runs
        finite: no code is NaN
        power_of_two: scales are powers of two from 2^-100 to 2^7

    On a device, the last axes of x, weight and out are contiguous.
    """

    x: Any
    weight: Any
    scales: Any
    block_rows: int
    block_columns: int
    out: Any
    prefetch: bool
    finite: bool
    power_of_two: bool
