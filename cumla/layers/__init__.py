"""One attention layer, one step, between its projections."""

from .dense import BlockQuantizedWeight, MLACommonImpl
from .sparse import CompressedCache, LayerWorkspace, SparseMLALayer

__all__ = ["BlockQuantizedWeight", "CompressedCache", "LayerWorkspace", "MLACommonImpl", "SparseMLALayer"]
