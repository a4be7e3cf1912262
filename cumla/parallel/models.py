"""V4 and V3.2 model layers on one of several ranks: rows are sharded, the indexer's keys replicated.

Compressed rows (V4) or latent rows (V3.2) are sharded across ranks. Windows, compressor states and the indexer's keys
are replicated, so that every rank selects the same rows. Every rank has all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..arrays import dlpack
from ..arrays.streams import InOrder
from ..dispatch.values import check_kind
from ..layers.sparse import Observer, not_observed
from ..models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Caches, V4Step
from ..models.deepseek_v32 import DeepseekV32Attention, DeepseekV32Caches, V32Step
from ..models.hidden_states import attend
from ..models.validation import begin
from ..ops.dense_cache import concat_and_cache_mla
from ..ops.shards import localise_indices
from .communicator import Communicator
from .context import ContextAttention
from .rank_rows import RankRows, ShardedCompressedCache
from .sparse_layer import ShardedSparseMLALayer
from .validation import check_rank_rows


class ShardedDeepseekV4Attention:
    """`DeepseekV4Attention` of one rank: the compressed cache passed to `step` has the rank's part of the rows."""

    def __init__(self, attention: DeepseekV4Attention, comm: Communicator) -> None:
        check_kind(DeepseekV4Attention, attention=attention)
        self.attention = attention
        self._sharded = ShardedSparseMLALayer(attention.attention, comm, backend=attention.backend)

    def step(
        self,
        hidden_states: Any,
        layer_caches: DeepseekV4Caches,
        metadata: Any,
        rows: RankRows | None,
        *,
        topk_indices: Any = None,
        early_release: bool = True,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """`DeepseekV4Attention.step` with `rows` of the compressed cache; None for a layer without compressed rows."""
        layer = self.attention
        if isinstance(rows, RankRows) != (layer.ratio > 1):
            expected = "None" if layer.ratio == 1 else "RankRows"
            raise ValueError(f"rows: got {type(rows).__name__}, expected {expected} for ratio {layer.ratio}")
        layer.check_step(hidden_states, layer_caches, metadata, topk_indices, all_rows=False)
        if rows is not None:
            call = begin(layer, hidden_states)
            check_rank_rows(call, self._sharded.comm, rows, layer_caches.compressed, metadata.window, layer.ratio)
        run = _RankV4Step(layer, layer_caches, metadata, observe, rows, self._sharded).run
        shape = len(metadata.positions), layer.config.hidden_size
        return attend(run, hidden_states, shape, layer.activations, topk_indices, out, stream, early_release)


@dataclass(frozen=True)
class _RankV4Step(V4Step):
    rows: RankRows | None
    sharded: ShardedSparseMLALayer

    def pool(self, pooled: Any) -> None:
        """Pool with one compressor after the other, as their rows have different slots."""
        assert self.rows is not None
        layer, own = self.layer, self.layer.compressors[0]
        scores = pooled[:, : own.columns]
        self.insert_pooled(
            scores, own, self.caches.state, self.caches.compressed, self.rows.slot_mapping, layer.layouts.v4
        )
        if len(layer.compressors) > 1:
            keys, slots = layer.compressors[1], self.metadata.compressors[layer.ratio].slot_mapping
            scores = pooled[:, own.columns : own.columns + keys.columns]
            self.insert_pooled(
                scores, keys, self.caches.indexer_state, self.caches.indexer, slots, layer.layouts.indexer
            )

    def side(self) -> InOrder:
        """No side stream: exchanges between ranks must stay on one stream."""
        return InOrder()

    def decode_slots(self) -> None:
        """None: selected rows are counted over all ranks, and each rank maps its own."""

    def attend(
        self, q: Any, topk_indices: Any, slots: tuple[Any, Any] | None, o: Any, join: Callable[[], None]
    ) -> None:
        compressed = None
        if self.rows is not None:
            compressed = ShardedCompressedCache(
                self.caches.compressed, self.rows.block_table, self.rows.shard, topk_indices=topk_indices
            )
        self.sharded.step(q, None, self.caches.window, self.metadata.window, compressed, out=o, observe=self.observe)


class ShardedDeepseekV32Attention:
    """`DeepseekV32Attention` of one rank: the caches passed to `step` have the rank's part of the rows."""

    def __init__(self, attention: DeepseekV32Attention, comm: Communicator) -> None:
        check_kind(DeepseekV32Attention, attention=attention)
        self.attention = attention
        self._context = ContextAttention(comm, backend=attention.backend)

    def step(
        self,
        hidden_states: Any,
        layer_caches: DeepseekV32Caches,
        metadata: Any,
        rows: RankRows,
        *,
        topk_indices: Any = None,
        early_release: bool = True,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """`DeepseekV32Attention.step` with `rows` of the latent cache."""
        layer = self.attention
        check_kind(RankRows, rows=rows)
        layer.check_step(hidden_states, layer_caches, metadata, topk_indices, all_rows=False)
        call = begin(layer, hidden_states)
        check_rank_rows(call, self._context.comm, rows, layer_caches.rows, metadata.tokens)
        run = _RankV32Step(layer, layer_caches, metadata, observe, rows, self._context).run
        shape = len(metadata.positions), layer.config.hidden_size
        return attend(run, hidden_states, shape, layer.activations, topk_indices, out, stream, early_release)


@dataclass(frozen=True)
class _RankV32Step(V32Step):
    rows: RankRows
    context: ContextAttention

    def insert_rows(self, kv_c: Any, k_pe: Any) -> None:
        layer = self.layer
        concat_and_cache_mla(
            kv_c, k_pe, self.caches.rows, self.rows.slot_mapping, layer.cache_dtype, backend=layer.backend
        )

    def decode_slots(self) -> None:
        """None: positions are counted over all ranks, and each rank maps its own."""

    def attend(self, q: Any, topk_indices: Any, slots: tuple[Any, Any] | None, o: Any) -> None:
        layer, step, rows = self.layer, self.metadata.tokens, self.rows
        with self.observe("map"):
            positions = dlpack.borrow(step.positions, "positions")
            xp = dlpack.namespace_of(positions)
            seen = xp.where(topk_indices <= positions[:, None], topk_indices, -1).astype("int32")
            slots, lens = localise_indices(
                seen, step.token_to_req_indices, rows.block_table, self.caches.rows.shape[1], rows.shard,
                step.is_valid_token, backend=layer.backend,
            )  # fmt: skip
        self.context.observe = lambda part: self.observe("decode" if part == "attend" else part)
        self.context.sparse_decode(
            q, self.caches.rows, slots, lens, layout=layer.layouts.v32, softmax_scale=layer.config.softmax_scale, out=o
        )
