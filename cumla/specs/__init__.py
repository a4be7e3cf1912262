"""One spec an operation, a file a family: its arrays, results, inputs by size, bounds and kernels."""

from __future__ import annotations

from . import sparse_cache
from .spec import OperationSpec

SPECS: dict[str, OperationSpec] = {spec.name: spec for family in (sparse_cache,) for spec in family.SPECS}
