"""Spec of the products with block-scaled FP8 weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import SUMS
from ..dispatch.call import BYTES, FLOAT32
from ..ops.linear import INPUTS, fp8_block_linear
from .inputs import Inputs
from .spec import Array, OperationSpec, Result, Variant, dtype_name

BLOCK = 128


def product(
    x: Inputs, groups: tuple[int, ...] = (), rows: int = 200, columns: int = 288, is_ue8m0: bool = False
) -> dict[str, Any]:
    """is_ue8m0: scales are powers of two."""
    block_rows, block_columns = x.choose(BLOCK, 32, 7), x.choose(BLOCK, 32)
    blocks = *groups, -(-rows // block_rows), -(-columns // block_columns)
    exponents = x.rng.uniform(-10, -8, blocks)
    return {
        "x": x.rows(x.size.tokens, *groups, columns), "weight": x.weights(*groups, rows, columns),
        "weight_scale": x.put(np.exp2(np.round(exponents) if is_ue8m0 else exponents), np.float32),
        "block_rows": block_rows, "block_columns": block_columns, "float32_output": x.choose(True, False),
        "prefetch_weights": x.choose(False, True), "is_ue8m0": is_ue8m0,
        "batch_invariant": x.choose(False, True),
    }  # fmt: skip


def results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    x, rows = arguments["x"], arguments["weight"].shape[-2]
    dtype = "float32" if arguments.get("float32_output") else dtype_name(x)
    return (Result((*x.shape[:-1], rows), dtype),)


SPECS = (
    OperationSpec(
        fp8_block_linear, "projection",
        {"x": Array(INPUTS), "weight": Array(BYTES[:1]), "weight_scale": Array(FLOAT32)},
        (Variant("", product), Variant("groups", functools.partial(product, groups=(2,)))), results=results,
        bounds=(SUMS,), outputs=("out",),
    ),
)  # fmt: skip
