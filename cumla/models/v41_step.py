"""Metadata that the layers of one step of DeepSeek V4.1 share, and the selection passed from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack
from ..arrays.memory import coincide
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_integers, check_kind
from ..layers.selection import Candidates
from ..metadata.batch import CommonAttentionMetadata, HostLens
from ..metadata.build_order import takes_prefix_len
from ..metadata.builder import ServingConfig
from ..metadata.indexer import DeepseekV32IndexerMetadata
from ..metadata.slots import ring_capacity
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder
from ..metadata.validation import check_tables
from .caches import DeepseekV41Caches
from .step import StepIndexerMetadataBuilder
from .v41_config import DeepseekV41Config

POOLED = 2  # the ratio at which two positions are pooled


@dataclass(frozen=True)
class CompressedRowsStep:
    """Metadata that a step's layers of one ratio share.

    Attributes:
        block_table: [num_reqs, B] int32, pages of the compressed rows and of the indexer's keys
        slot_mapping: [slots] int64, of the row that each token completes; -1 for the others
        row_positions: [slots] int32, the first position in each token's row, at which the row is rotated; -1 for
            padding
        indexer: of the layers that select rows
    """

    block_table: Any
    slot_mapping: Any
    row_positions: Any
    indexer: DeepseekV32IndexerMetadata


@dataclass(frozen=True)
class DeepseekV41StepMetadata:
    """Metadata of one step. Arrays are views of the builder's buffers, or the batch's own.

    Attributes:
        window: of the window caches and of attention
        rows: by compress ratio, of layers with compressed rows
        ring_slot_mapping: [slots] int64, the slot of each token in its request's ring; -1 for padding and for a request
            without a ring. None without layers of ratio 2
    """

    window: DeepseekSparseSWAMetadata
    rows: dict[int, CompressedRowsStep]
    ring_slot_mapping: Any

    @property
    def positions(self) -> Any:
        """[slots] int32, of each token in its sequence; -1 for padding."""
        return self.window.positions


class V41IndexerMetadataBuilder(StepIndexerMetadataBuilder):
    """V4.1's indexer builder: a request's keys are read once for all tokens of a decode, up to six."""

    natively_supported_next_n = (1, 2, 3, 4, 5, 6)


class DeepseekV41StepBuilder:
    """Builds DeepseekV41StepMetadata. Its buffers keep their addresses, so a captured graph is valid after a build.

    Args:
        config: the metadata builders' configuration, with has_c1a; `serving_of` returns it for a model
    """

    def __init__(self, config: ServingConfig, backend: str | None = None) -> None:
        check_kind(ServingConfig, config=config)
        self.ratios = sorted({ratio for ratio in config.compress_ratios if ratio})
        if not config.has_c1a or not set(self.ratios) <= {1, POOLED}:
            raise ValueError(
                f"config: got compress_ratios {config.compress_ratios} and has_c1a {config.has_c1a}, expected ratios "
                "0, 1 and 2 and has_c1a"
            )
        self.config, self.backend = config, backend
        self._window = DeepseekSparseSWAMetadataBuilder(config, backend)
        self._indexers = {ratio: V41IndexerMetadataBuilder(config, backend, ratio) for ratio in self.ratios}
        self._buffers: dict[str, Any] = {}

    @takes_prefix_len
    def build(
        self,
        batch: CommonAttentionMetadata,
        compressed_block_table: Any = None,
        rings: Any = None,
        replay_start: Any = None,
    ) -> DeepseekV41StepMetadata:
        """Metadata of a decode-first batch. The batch's own block table is for the window caches.

        Args:
            batch: the batch; build(0, batch, ...) is also accepted, as by the metadata builders
            compressed_block_table: [num_reqs, B] int32, pages of compressed_block_size positions, of the compressed
                rows of both ratios and of the indexers' keys; required if the model has such layers
            rings: [num_reqs] int32, each request's ring, fixed for its lifetime; -1: none, its tokens are not saved and
                complete no rows. Required with layers of ratio 2
            replay_start: of DeepseekSparseSWAMetadataBuilder.build

        Raises TypeError or ValueError for an impossible batch, and for a table that is missing or too narrow.
        """
        call = Call(self.backend)
        table = call.optional("compressed_block_table", compressed_block_table, INT32, (batch.num_reqs, -1))
        rings = call.optional("rings", rings, INT32, (batch.num_reqs,))
        if self.ratios:
            if table is None:
                raise ValueError("compressed_block_table: got None, expected a block table for the compressed rows")
            tables = {"compressed_block_table": (table, self.config.compressed_block_size, self.ratios[0])}
            check_tables(HostLens.of(batch).seq_lens, tables)
        if POOLED in self.ratios and rings is None:
            raise ValueError("rings: got None, expected the ring of each request for the layers of ratio 2")
        window = self._window.build(0, batch, replay_start=replay_start)
        positions = dlpack.borrow(window.positions, "positions")
        rows = {}
        for ratio in self.ratios:
            indexer = self._indexers[ratio].build(0, batch, block_table=compressed_block_table)
            first = positions
            if ratio == POOLED:
                first = self._buffer("row_positions", np.int32, positions)
                xp = dlpack.namespace_of(positions)
                xp.maximum(positions - positions % POOLED, -1, out=first)  # padding stays -1
            rows[ratio] = CompressedRowsStep(compressed_block_table, indexer.slot_mapping, first, indexer)
        ring_slots = None
        if POOLED in self.ratios:
            ring_slots = self._ring_slots(rings, dlpack.borrow(window.token_to_req_indices, "requests"), positions)
        return DeepseekV41StepMetadata(window, rows, ring_slots)

    def _ring_slots(self, rings: Any, requests: Any, positions: Any) -> Any:
        """Slots in rings: ring * capacity + position % capacity, -1 without a ring and for padding."""
        capacity, xp = ring_capacity(self.config.num_speculative_tokens), dlpack.namespace_of(positions)
        out = self._buffer("ring_slots", np.int64, positions)
        if not len(rings):
            out[...] = -1
            return out
        of_tokens = rings[requests].astype(np.int64)
        slots = of_tokens * capacity + positions % capacity
        out[...] = xp.where((of_tokens >= 0) & (positions >= 0), slots, -1)
        return out

    def _buffer(self, name: str, dtype: Any, like: Any) -> Any:
        if name not in self._buffers:
            xp = dlpack.namespace_of(like)
            self._buffers[name] = xp.zeros(self.config.max_num_batched_tokens, dtype)
        return self._buffers[name][: len(like)]


class DeepseekV41Selection:
    """The rows that the tokens of a step select: a layer that selects writes them, later layers read them.

    Attributes:
        topk_indices: int32 [max_num_batched_tokens, index_topk], rows counted within a token's request, then -1
        slots: int32 of the same shape, slots of the selected rows; for decode tokens only
        lens: int32 [max_num_batched_tokens], their count; for decode tokens only
        candidate_blocks: int32 [max_num_batched_tokens, candidate_topk_blocks]; None for a model without candidate
            blocks

    One selection serves all layers of a model, one step after another.
    """

    def __init__(self, config: DeepseekV41Config, serving: ServingConfig, xp: Any = np) -> None:
        check_kind(DeepseekV41Config, config=config)
        check_kind(ServingConfig, serving=serving)
        tokens = serving.max_num_batched_tokens
        self.topk_indices = xp.full((tokens, config.index_topk), -1, np.int32)
        self.slots = xp.full((tokens, config.index_topk), -1, np.int32)
        self.lens = xp.zeros(tokens, np.int32)
        self.candidate_blocks: Any = None
        if config.candidate_source_layer_id >= 0:
            self.candidate_blocks = xp.full((tokens, config.candidate_topk_blocks), -1, np.int32)
        self._block_size = config.candidate_block_size
        self._written: dict[str, tuple[int, Any]] = {}
        self._owned: dict[int, tuple[Any, Any]] = {}  # by owner: the step, and the caches that it wrote

    def candidates(self, written: bool) -> Candidates:
        """The candidate blocks, to write or to read."""
        return Candidates(self.candidate_blocks, self._block_size, written)

    def note(self, what: str, layer: int, metadata: DeepseekV41StepMetadata) -> None:
        """Remember that this layer wrote "rows" or "candidates" for the step."""
        self._written[what] = layer, metadata

    def check(self, what: str, layer: int | None, metadata: DeepseekV41StepMetadata) -> None:
        """Raise ValueError unless this layer wrote the "rows" or "candidates" last, and for this step."""
        found, step = self._written.get(what, (None, None))
        if found != layer or step is not metadata:
            got = f"no {what}" if found is None else f"{what} of layer {found}"
            when = "" if found is None or step is metadata else " of another step"
            raise ValueError(f"selection: got {got}{when}, expected {what} of layer {layer} of this step")

    def note_owned(self, layer: int, metadata: DeepseekV41StepMetadata, caches: DeepseekV41Caches) -> None:
        """Remember the caches to which an owner added the step's rows and keys."""
        self._owned[layer] = metadata, caches

    def check_owned(self, layer: int, metadata: DeepseekV41StepMetadata, caches: DeepseekV41Caches) -> None:
        """Raise ValueError unless the owner wrote the step's rows and keys to the arrays of these caches."""
        step, written = self._owned.get(layer, (None, None))
        if step is not metadata:
            raise ValueError(
                f"selection: layer {layer}, which owns the rows, has not run in this step, expected it before"
            )
        for name in ("compressed", "indexer"):
            ours, owned = getattr(caches, name), getattr(written, name)
            if ours is not owned and ours is not None:
                ours, owned = (dlpack.borrow(x, f"layer_caches.{name}") for x in (ours, owned))
                if ours.shape != owned.shape or not coincide(ours, owned):
                    raise ValueError(
                        f"layer_caches.{name}: got another array, expected the array of layer {layer}, the rows' owner"
                    )


def serving_of(config: DeepseekV41Config, **options: Any) -> ServingConfig:
    """The metadata builders' configuration for a model. options: other fields of ServingConfig."""
    check_kind(DeepseekV41Config, config=config)
    if "num_heads" not in options:
        options["num_heads"] = config.num_attention_heads
    check_integers(1, num_heads=options["num_heads"])
    return ServingConfig(
        window_size=config.sliding_window, compress_ratios=config.compress_ratios[: config.num_hidden_layers],
        index_topk=config.index_topk, has_c1a=True, **options,
    )  # fmt: skip
