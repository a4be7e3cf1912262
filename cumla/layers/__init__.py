"""One step of one attention layer, between its projections."""

from .dense import BlockQuantizedWeight, MLACommonImpl
from .selection import IndexerInputs
from .sparse import CompressedCache, LayerWorkspace, SparseMLALayer

__all__ = [
    "BlockQuantizedWeight", "CompressedCache", "IndexerInputs", "LayerWorkspace", "MLACommonImpl", "SparseMLALayer",
]  # fmt: skip
