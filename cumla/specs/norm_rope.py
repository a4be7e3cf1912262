"""Specs of norms and RoPE, and of the inserts after them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..bounds import ROUNDED
from ..dispatch.call import BFLOAT16, FLOAT32, SLOTS
from ..dispatch.debug_checks import norm_rope as checks
from ..layout import DSV4_BF16, INDEXER_BF16, CacheLayout
from ..ops.norm_rope import (
    QUANTIZED_GROUP,
    ROWS,
    apply_rope,
    fused_q_kv_rmsnorm,
    indexer_knorm_rope_and_insert,
    inverse_rope_and_quantize,
    norm_rope_and_insert,
    qnorm_rope_and_insert,
)
from .inputs import Inputs
from .spec import CACHE, Array, OperationSpec, Result, Variant, dtype_name, shape

WRITTEN_CACHE = Array(CACHE, "out", bound=ROUNDED)
INTO = {  # what rows are inserted with
    "k_cache": WRITTEN_CACHE, "slot_mapping": Array(SLOTS, holds="slots"),
    "positions": Array(SLOTS, holds="positions"), "cos_sin_cache": Array(FLOAT32),
}  # fmt: skip


def norms(x: Inputs) -> dict[str, Any]:
    rows, (rank, dim) = x.size.rows, x.choose((96, 64), (1024, 512), (65, 40))
    dtype = x.choose(np.float32, BFLOAT16)
    return {
        "qr": x.rows(rows, rank), "kv": x.rows(rows, dim), "q_weight": x.rows(rank, dtype=dtype),
        "kv_weight": x.rows(dim, dtype=dtype),
    }  # fmt: skip


def into(x: Inputs, layout: CacheLayout, beyond: bool = False) -> dict[str, Any]:
    """beyond: the last position is not in RoPE's table."""
    positions = x.positions(x.size.rows)
    if beyond:
        positions[-1:] = 2 * x.size.context
    return {
        "k_cache": x.new_cache(layout), "slot_mapping": x.slots(x.size.rows), "positions": positions,
        "cos_sin_cache": x.rotation(x.size.context), "block_size": x.size.block_size, "layout": layout,
    }  # fmt: skip


def window_rows(x: Inputs, layout: CacheLayout) -> dict[str, Any]:
    """Queries, and rows of V4's window cache."""
    rows = x.size.rows
    return {"q": x.rows(rows, x.size.heads, 512), "kv": x.rows(rows, 512), **into(x, layout)}


def latent_rows(x: Inputs, layout: CacheLayout, beyond: bool = False) -> dict[str, Any]:
    """Rows of V4.1's caches."""
    weight = x.choose(x.floats(512), x.rows(512), None)
    return {"kv": x.rows(x.size.rows, 512), **into(x, layout, beyond), "weight": weight}


def index_keys(x: Inputs, layout: CacheLayout, hadamard: bool = False) -> dict[str, Any]:
    """hadamard: keys are rotated so, and not by RoPE."""
    weight, bias = x.floats(128), x.floats(128)
    arguments = {"k": x.floats(x.size.rows, 128), "weight": weight, "bias": bias, **into(x, layout)}
    if hadamard:
        return arguments | {"hadamard": True, "cos_sin_cache": None}
    return arguments | {"rope_first": x.choose(True, False), "is_neox": x.choose(True, False)}


def rope(x: Inputs, inverse: bool = False, dim: int = 192, is_neox: bool = False) -> dict[str, Any]:
    rows, heads = x.size.rows, x.size.heads
    arguments = {
        "x": x.rows(rows, heads, dim), "positions": x.positions(rows), "cos_sin_cache": x.rotation(x.size.context),
        "inverse": inverse, "is_neox": is_neox, "rope_first": x.choose(is_neox, False, True),
    }  # fmt: skip
    if is_neox:
        arguments |= {"ssmax_scale": x.floats(heads), "ssmax_bias": x.floats(heads)}
    return arguments


def quantised_output(x: Inputs) -> dict[str, Any]:
    rows, groups = x.size.rows, 2
    return {
        "o": x.rows(rows, groups * -(-x.size.heads // groups), 512), "positions": x.positions(rows),
        "cos_sin_cache": x.rotation(x.size.context), "num_groups": groups,
    }  # fmt: skip


def norms_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    return tuple(Result(tuple(arguments[x].shape), dtype_name(arguments[x])) for x in ("qr", "kv"))


def rotated_results(arguments: Mapping[str, Any], name: str) -> tuple[Result, ...]:
    return (Result(tuple(arguments[name].shape), dtype_name(arguments[name])),)


def quantised_output_results(arguments: Mapping[str, Any]) -> tuple[Result, ...]:
    tokens, heads, dim = shape(arguments, "o", "T", "h", "512")
    groups = arguments["num_groups"]
    width = heads // groups * dim
    values = Result((groups, tokens, width), "uint8")
    return values, Result((groups, tokens, width // QUANTIZED_GROUP), "float32")


SPECS = (
    OperationSpec(
        fused_q_kv_rmsnorm, "norm_rope", dict.fromkeys(("qr", "kv", "q_weight", "kv_weight"), Array(ROWS)),
        (Variant("", norms),), results=norms_results, bounds=(ROUNDED, ROUNDED), outputs=("out",),
    ),
    OperationSpec(
        qnorm_rope_and_insert, "norm_rope", {"q": Array(ROWS), "kv": Array(ROWS), **INTO},
        (Variant("DSV4_BF16", functools.partial(window_rows, layout=DSV4_BF16)),), checks.qnorm_rope_and_insert,
        results=functools.partial(rotated_results, name="q"), bounds=(ROUNDED,), outputs=("out",),
    ),
    OperationSpec(
        norm_rope_and_insert, "norm_rope", {"kv": Array(ROWS), **INTO, "weight": Array(ROWS)},
        (Variant("DSV4_BF16", functools.partial(latent_rows, layout=DSV4_BF16, beyond=True)),),
        checks.norm_rope_and_insert,
    ),
    OperationSpec(
        indexer_knorm_rope_and_insert, "norm_rope",
        {"k": Array(ROWS), "weight": Array(ROWS), "bias": Array(ROWS), **INTO},
        (
            Variant("INDEXER_BF16", functools.partial(index_keys, layout=INDEXER_BF16)),
            Variant("hadamard", functools.partial(index_keys, layout=INDEXER_BF16, hadamard=True)),
        ),
        checks.indexer_knorm_rope_and_insert,
    ),
    OperationSpec(
        apply_rope, "norm_rope",
        {
            "x": Array(ROWS), "positions": Array(SLOTS, holds="positions"), "cos_sin_cache": Array(FLOAT32),
            "ssmax_scale": Array(FLOAT32), "ssmax_bias": Array(FLOAT32),
        },
        (
            Variant("", rope),
            Variant("inverse", functools.partial(rope, inverse=True)),
            Variant("ssmax_scale", functools.partial(rope, is_neox=True)),
        ),
        checks.apply_rope,
        results=functools.partial(rotated_results, name="x"), bounds=(ROUNDED,), outputs=("out",),
    ),
    OperationSpec(
        inverse_rope_and_quantize, "norm_rope",
        {"o": Array(ROWS), "positions": Array(SLOTS, holds="positions"), "cos_sin_cache": Array(FLOAT32)},
        (Variant("scales", quantised_output),), checks.inverse_rope_and_quantize, results=quantised_output_results,
        bounds=(None, ROUNDED),  # values may round to the next one
        outputs=("out",),
    ),
)  # fmt: skip
