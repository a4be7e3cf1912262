"""Specs of the copies of whole pages."""

from __future__ import annotations

from typing import Any

from ..dispatch.call import BYTES, FLOATS, SLOTS
from ..dispatch.debug_checks import blocks as checks
from ..layout import DSV4_FP8
from ..ops.blocks import copy_blocks, swap_blocks
from .inputs import Inputs
from .spec import Array, OperationSpec, Variant

ANY = (*BYTES, *FLOATS, *SLOTS)


def pool(x: Inputs) -> Any:
    """Pages of any bytes."""
    return x.e4m3(x.size.pages, x.size.block_size * DSV4_FP8.token_bytes)


def copy(x: Inputs, of_values: bool = True) -> dict[str, Any]:
    """of_values: a second cache has pages of bfloat16."""
    caches = [pool(x), x.rows(x.size.pages, 3, 4)] if of_values else [pool(x)]
    return {"kv_caches": caches, "src_to_dsts": x.pairs(x.size.pages)}


def swap(x: Inputs) -> dict[str, Any]:
    return {"src": pool(x), "dst": pool(x), "src_to_dst": x.pairs(x.size.pages)}


SPECS = (
    OperationSpec(
        copy_blocks, "blocks", {"kv_caches": Array(ANY, "in out"), "src_to_dsts": Array(SLOTS, holds="pages")},
        (Variant("", copy),), checks.copy_blocks, compiled=False,
    ),
    OperationSpec(
        swap_blocks, "blocks",
        {"src": Array(ANY), "dst": Array(ANY, "in out"), "src_to_dst": Array(SLOTS, holds="pages")},
        (Variant("", swap),), checks.copy_blocks, compiled=False,
    ),
)  # fmt: skip
