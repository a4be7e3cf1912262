"""Model layers on one of several ranks: rows are sharded, the indexer's keys replicated.

Latent rows or compressed rows are sharded across ranks. Windows, compressors' states, rings and the indexer's keys are
replicated, so that every rank selects the same rows. Every rank has all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import dlpack
from ..arrays.streams import InOrder
from ..dispatch.values import check_kind
from ..layers.selected_attention import Chosen
from ..layers.sparse import Observer, not_observed
from ..models.attended import WindowAndList
from ..models.attention import SparseAttention, Step
from ..models.caches import LayerCaches
from ..models.hidden_states import attend
from ..models.shared_selection import SharedSelection, selected_tokens
from ..models.step import StepMetadata
from ..models.validation import begin, check_step
from ..ops.shards import localise_indices
from .communicator import Communicator
from .context import ContextAttention
from .rank_rows import RankRows, ShardedCompressedCache
from .sparse_layer import ShardedSparseMLALayer
from .validation import check_rank_rows


class ShardedAttention:
    """`SparseAttention` of one rank: the cache of selected rows passed to `step` has the rank's part of the rows.

    Args:
        attention: a layer of any model
        comm: the rank's communicator
    """

    def __init__(self, attention: SparseAttention, comm: Communicator) -> None:
        check_kind(SparseAttention, attention=attention)
        self.attention, self.comm = attention, comm
        self._window: ShardedSparseMLALayer | None = None
        if isinstance(attention.attended, WindowAndList):
            self._window = ShardedSparseMLALayer(attention.attended.sparse, comm, backend=attention.backend)
        self._context = ContextAttention(comm, backend=attention.backend)

    def step(
        self,
        hidden_states: Any,
        layer_caches: LayerCaches,
        metadata: StepMetadata,
        rows: RankRows | None,
        selection: SharedSelection | None = None,
        *,
        topk_indices: Any = None,
        early_release: bool = True,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """`SparseAttention.step` with `rows` of the sharded cache; None for a layer with a window alone.

        A layer that reads another layer's rows takes the rank rows of that layer.
        """
        layer, spec = self.attention, self.attention.spec
        if isinstance(rows, RankRows) != (spec.ratio > 0):
            expected = "RankRows" if spec.ratio else "None"
            raise ValueError(f"rows: got {type(rows).__name__}, expected {expected} for ratio {spec.ratio}")
        check_step(layer, hidden_states, layer_caches, metadata, selection, topk_indices, all_rows=False)
        if rows is not None:
            name = "rows" if spec.rows == "latent" else "compressed"
            check_rank_rows(
                begin(layer, hidden_states), self.comm, rows, f"layer_caches.{name}", getattr(layer_caches, name),
                metadata.tokens, spec.ratio,
            )  # fmt: skip
        run = _RankStep(layer, layer_caches, metadata, selection, observe, rows, self._window, self._context).run
        shape = len(metadata.positions), spec.hidden_size
        return attend(run, hidden_states, shape, layer.activations, topk_indices, out, stream, early_release)


@dataclass(frozen=True)
class _RankStep(Step):
    rank_rows: RankRows | None
    window: ShardedSparseMLALayer | None
    context: ContextAttention

    @property
    def row_slots(self) -> Any:
        assert self.rank_rows is not None
        return self.rank_rows.slot_mapping

    @property
    def maps_slots(self) -> bool:
        """False: selected rows are counted over all ranks, and each rank maps its own."""
        return False

    def side(self) -> InOrder:
        """No side stream: exchanges between ranks must stay on one stream."""
        return InOrder()

    def attend(self, q: Any, chosen: Chosen, o: Any, join: Any) -> None:
        tokens, rows, compressed = self.metadata.tokens, self.rank_rows, None
        if self.window is not None:
            if rows is not None:
                compressed = ShardedCompressedCache(
                    self.caches.compressed, rows.block_table, rows.shard, topk_indices=chosen.topk_indices
                )
            self.window.step(q, None, self.caches.window, tokens, compressed, out=o, observe=self.observe)
            return
        assert rows is not None
        layer, positions = self.layer, dlpack.borrow(tokens.positions, "positions")
        with self.observe("map"):
            xp, selected = dlpack.namespace_of(positions), chosen.topk_indices
            if chosen.pool > 1:
                selected = selected_tokens(selected, positions, chosen.pool, backend=layer.backend)
            seen = xp.where(selected <= positions[:, None], selected, -1).astype("int32")
            slots, lens = localise_indices(
                seen, tokens.token_to_req_indices, rows.block_table, self.caches.rows.shape[1], rows.shard,
                tokens.is_valid_token, backend=layer.backend,
            )  # fmt: skip
        self.context.observe = lambda part: self.observe("decode" if part == "attend" else part)
        self.context.sparse_decode(
            q, self.caches.rows, slots, lens, attn_sink=layer.sinks, layout=layer.layouts.rows,
            softmax_scale=layer.spec.softmax_scale, batch_invariant=layer.batch_invariant, out=o,
        )  # fmt: skip
