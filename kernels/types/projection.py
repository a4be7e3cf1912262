"""Arguments of products with quantised weights."""

from typing import Any, NamedTuple

ROW_BLOCK = 16  # tokens of a product on the host where a token's result must not depend on the number of tokens


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
        batch_invariant: whether a token's result must not depend on the number of tokens and on the other tokens

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
    batch_invariant: bool = False
