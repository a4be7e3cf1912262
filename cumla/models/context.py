"""What the parts of a layer read: of the layer, and of one step of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..layers.sparse import Observer
from ..ops.norm_rope import fused_q_kv_rmsnorm
from .block_scaled import BlockScaledWeight
from .caches import Formats, LayerCaches
from .layer_spec import LayerSpec
from .products import stacked
from .scratch import Scratch
from .shared_selection import SharedSelection
from .step import RowsStep, StepMetadata
from .weights import WeightReader

SHORTEST = 8  # values of a row that a norm loads by 16 bytes


class LayerContext:
    """A layer, as its parts know it.

    Attributes:
        activations: type of hidden states; dtype: of matrices
        cos_sin: RoPE's table
        rounds_activations: whether products of many tokens with FP8 weights round activations to FP8
        batch_invariant: whether a token's bits depend on its request's tokens alone
        blocks: memory for products in blocks of tokens if the layer is batch invariant, else None
        norms_with_keys: whether the launch that norms index keys norms the queries' latent, and the insert of rows
            norms these
    """

    spec: LayerSpec
    layouts: Formats
    xp: Any
    backend: str | None
    scratch: Scratch
    activations: np.dtype[Any]
    dtype: np.dtype[Any]
    cos_sin: Any
    rounds_activations: bool
    batch_invariant: bool
    blocks: Scratch | None
    norms_with_keys: bool
    queries: Any

    @property
    def index_cos_sin(self) -> Any:
        """RoPE's table of the indexer; None if it does not rotate."""
        return None if self.spec.index_pairs == "none" else self.cos_sin

    def matrix(self, get: WeightReader, *names: str, rounds: bool = True) -> Any:
        """Stacked weights; rounds: whether products of many tokens round activations to FP8 if the layer does."""
        weight = stacked([get.matrix(f"{name}.weight") for name in names], self.dtype, self.xp, self.scratch)
        if rounds and self.rounds_activations and isinstance(weight, BlockScaledWeight):
            return replace(weight, rounds_activations=True)
        return weight


@dataclass(frozen=True)
class StepContext:
    """One step of a layer, as the layer's parts know it. The caller's stream is current."""

    layer: LayerContext
    caches: LayerCaches
    metadata: StepMetadata
    selection: SharedSelection | None
    observe: Observer

    def norm(self, qr: Any, other: Any, weight: Any) -> None:
        """RMSNorm of the queries' latent and of other rows, in place; a layer may lack either."""
        layer, q_weight, eps = self.layer, self.layer.queries.norm, self.layer.spec.q_eps
        if q_weight is None and weight is None:
            return
        if q_weight is None:
            qr, q_weight, eps = self.nothing(other), weight[:SHORTEST], layer.spec.row_eps
        elif weight is None:
            other, weight = self.nothing(qr), q_weight[:SHORTEST]
        fused_q_kv_rmsnorm(qr, other, q_weight, weight, eps, out=(qr, other), backend=layer.backend)

    def nothing(self, like: Any) -> Any:
        """Rows of zeros in place of rows that a layer lacks."""
        found = self.array("nothing", (len(like), SHORTEST))
        found[...] = 0
        return found

    @property
    def rows(self) -> RowsStep:
        return self.metadata.rows[self.layer.spec.ratio]

    @property
    def row_slots(self) -> Any:
        """Slots of this step's selected rows."""
        return self.rows.slot_mapping

    @property
    def maps_slots(self) -> bool:
        """Whether a selection also writes the slots of the rows that decodes select."""
        return True

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self.layer.scratch.shaped(name, shape, dtype or self.layer.activations, self.layer.cos_sin)
