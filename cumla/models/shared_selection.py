"""The selection that layers of a model share within a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import dlpack, streams
from ..arrays.array import Array
from ..arrays.memory import coincide
from ..dispatch.values import check_integers, check_kind
from ..layers.selection import Candidates
from ..metadata.builder import ServingConfig
from ..ops.indices import compute_global_topk_indices_and_lens
from .caches import LayerCaches
from .layer_spec import LayerSpec
from .step import StepMetadata, check_specs

PAGE_ROWS = 1 << 30  # more positions than a sequence has


def selected_tokens(topk_indices: Array, positions: Array, pool: int, *, backend: str | None = None) -> Any:
    """The tokens that a layer attends to, counted within the request.

    GLM's draft layer selects in the first draft step of a round, and attends to the same tokens in the next ones
    (`index_share_for_mtp_iteration`): `SparseAttention.step` takes the result as topk_indices.

    Args:
        topk_indices: [T, K] int32, pools that each token selects (`SharedSelection.topk_indices`), -1 for none; rows if
            pool is 1
        positions: [T] int32, of each token
        pool: `LayerSpec.pool`, tokens of an index key

    Returns int32 [T, K * pool + pool - 1]: the tokens of the pools, then the incomplete pool's tokens up to the
    token itself, then -1.
    """
    check_integers(1, pool=pool)
    chosen, at = dlpack.borrow(topk_indices, "topk_indices"), dlpack.borrow(positions, "positions")
    framework, xp, tokens = dlpack.framework_of(topk_indices), dlpack.namespace_of(chosen), len(chosen)
    with streams.callers(chosen, framework, None):
        # With all positions in page 0, slots are positions.
        found, _ = compute_global_topk_indices_and_lens(
            chosen, xp.zeros(tokens, np.int32), xp.zeros((1, 1), np.int32), PAGE_ROWS // pool * pool,
            xp.ones(tokens, np.bool_), compact=True, positions=at, pool=pool, backend=backend,
        )  # fmt: skip
    return dlpack.give(found, framework)


class SharedSelection:
    """The rows that the tokens of a step select: a layer that selects writes them, later layers read them.

    Attributes:
        topk_indices: int32 [max_num_batched_tokens, topk], rows counted within a token's request, then -1; with pooled
            keys [.., topk / pool], pools
        slots: int32 [max_num_batched_tokens, topk + pool - 1], slots of the selected rows; for decode tokens only
        lens: int32 [max_num_batched_tokens], their count; for decode tokens only
        candidate_blocks: int32 [max_num_batched_tokens, candidate_blocks]; None for a model without candidate blocks

    One selection serves all layers of a model, one step after another.
    """

    def __init__(self, specs: Sequence[LayerSpec], serving: ServingConfig, xp: Any = np) -> None:
        check_specs(specs)
        check_kind(ServingConfig, serving=serving)
        tokens = serving.max_num_batched_tokens
        self.topk_indices = xp.full((tokens, max(spec.selected_keys for spec in specs)), -1, np.int32)
        self.slots = xp.full((tokens, max(spec.listed_rows for spec in specs)), -1, np.int32)
        self.lens = xp.zeros(tokens, np.int32)
        blocks = max(spec.candidate_blocks if spec.candidates != "none" else 0 for spec in specs)
        self.candidate_blocks: Any = xp.full((tokens, blocks), -1, np.int32) if blocks else None
        self._written: dict[str, tuple[int, Any]] = {}
        self._owned: dict[int, tuple[Any, Any]] = {}  # by owner: the step, and the caches that it wrote

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.topk_indices, self.slots, self.lens, self.candidate_blocks

    def candidates(self, spec: LayerSpec) -> Candidates | None:
        """The candidate blocks that a layer writes or reads."""
        if spec.candidates == "none":
            return None
        return Candidates(self.candidate_blocks, spec.candidate_block_size, spec.candidates == "written")

    def note(self, spec: LayerSpec, metadata: StepMetadata) -> None:
        """Remember that this layer wrote "rows", and "candidates" if it does, for the step."""
        self._written["rows"] = spec.layer, metadata
        if spec.candidates == "written":
            self._written["candidates"] = spec.layer, metadata

    def check(self, what: str, layer: int | None, metadata: StepMetadata) -> None:
        """Raise ValueError unless this layer wrote the "rows" or "candidates" last, and for this step."""
        found, step = self._written.get(what, (None, None))
        if found != layer or step is not metadata:
            got = f"no {what}" if found is None else f"{what} of layer {found}"
            when = "" if found is None or step is metadata else " of another step"
            raise ValueError(f"selection: got {got}{when}, expected {what} of layer {layer} of this step")

    def note_owned(self, layer: int, metadata: StepMetadata, caches: LayerCaches) -> None:
        """Remember the caches to which an owner added the step's rows and keys."""
        self._owned[layer] = metadata, caches

    def check_owned(self, spec: LayerSpec, metadata: StepMetadata, caches: LayerCaches) -> None:
        """Raise ValueError unless the owner wrote the step's rows and keys to the arrays of these caches."""
        layer = spec.row_source
        step, written = self._owned.get(-1 if layer is None else layer, (None, None))
        if step is not metadata:
            raise ValueError(
                f"selection: layer {layer}, which owns the rows, has not run in this step, expected it before"
            )
        for name in ("rows", "compressed") if spec.owns_keys else ("rows", "compressed", "indexer"):
            ours, owned = getattr(caches, name), getattr(written, name)
            if ours is not owned and ours is not None:
                ours, owned = (dlpack.borrow(x, f"layer_caches.{name}") for x in (ours, owned))
                if ours.shape != owned.shape or not coincide(ours, owned):
                    raise ValueError(
                        f"layer_caches.{name}: got another array, expected the array of layer {layer}, the rows' owner"
                    )
