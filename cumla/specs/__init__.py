"""One spec an operation, a file a family: its arrays, results, inputs by size, bounds and kernels."""

from __future__ import annotations

from typing import Any

from . import advance, blocks, dense_cache, indices, prefill_rows, sparse_cache
from .spec import OperationSpec

FAMILIES: tuple[Any, ...] = (sparse_cache, prefill_rows, dense_cache, blocks, advance, indices)
SPECS: dict[str, OperationSpec] = {spec.name: spec for family in FAMILIES for spec in family.SPECS}
