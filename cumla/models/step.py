"""Metadata that the layers of one step of a model share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_integers, check_kind, shown
from ..metadata.batch import CommonAttentionMetadata, HostLens
from ..metadata.build_order import takes_prefix_len
from ..metadata.builder import MOST_POSITIONS, ServingConfig
from ..metadata.indexer import DeepseekV32IndexerMetadata, DeepseekV32IndexerMetadataBuilder
from ..metadata.slots import STATE_BLOCK_SIZES, get_compressed_slot_mapping, ring_capacity
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder
from ..metadata.validation import check_tables
from .layer_spec import LayerSpec

# What a layer has as the layer that it names has it.
SAME = {
    "row_source": ("ratio", "rope_dim"), "selection_source": ("ratio", "topk", "pool"),
    "candidate_source": ("candidate_blocks", "candidate_block_size"),
}  # fmt: skip
POOLED = 2  # the ratio at which rings have the positions that are pooled


class StepIndexerMetadataBuilder(DeepseekV32IndexerMetadataBuilder):
    """The indexer's builder within a step of model layers. It treats the same requests as decodes as the window's does.

    Decodes of equal lengths are passed to the kernels as in the base class, others token by token, from buffers of the
    builder.
    """

    flattens_ragged: ClassVar[bool] = True


class V41IndexerMetadataBuilder(StepIndexerMetadataBuilder):
    """V4.1's indexer builder: a request's keys are read once for all tokens of a decode, up to six."""

    natively_supported_next_n = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class RowsStep:
    """Metadata that a step's layers of one ratio share: of latent rows, or of compressed rows.

    Attributes:
        block_table: [num_reqs, B] int32, pages of the rows and of the indexer's keys
        slot_mapping: [slots] int64, of the row that each token completes; -1 for the others
        row_positions: [slots] int32, the first position in each token's row, at which the row is rotated; -1 for
            padding
        indexer: of the layers that select; None without such layers
        state_block_table: [num_reqs, S] int32, pages of compressors' states; -1: absent, for example already freed.
            None without states in pages
        state_slot_mapping: [slots] int64, of each token's state; -1 where the state has no page
        state_block_size: positions of a page of states
    """

    block_table: Any
    slot_mapping: Any
    row_positions: Any
    indexer: DeepseekV32IndexerMetadata | None
    state_block_table: Any = None
    state_slot_mapping: Any = None
    state_block_size: int = 0


@dataclass(frozen=True)
class StepMetadata:
    """Metadata of one step. Arrays are views of the builder's buffers, or the batch's own.

    Attributes:
        tokens: of the step's tokens: of window or latent rows, and of attention
        rows: by `LayerSpec.ratio`, of layers with selected rows
        ring_slot_mapping: [slots] int64, the slot of each token in its request's ring; -1 for padding and for a request
            without a ring. None without layers that have rings
    """

    tokens: DeepseekSparseSWAMetadata
    rows: dict[int, RowsStep]
    ring_slot_mapping: Any = None

    @property
    def positions(self) -> Any:
        """[slots] int32, of each token in its sequence; -1 for padding."""
        return self.tokens.positions


class StepBuilder:
    """Builds StepMetadata. Its buffers keep their addresses, so a captured graph is valid after a build.

    Args:
        specs: the model's layers, or one of each kind: `specs()` of its configuration
        config: the metadata builders' configuration; `serving_of` returns it for a model
        state_block_sizes: positions of a page of states, by compress ratio
    """

    def __init__(
        self, specs: Sequence[LayerSpec], config: ServingConfig, backend: str | None = None,
        state_block_sizes: Mapping[int, int] = STATE_BLOCK_SIZES,
    ) -> None:  # fmt: skip
        check_kind(ServingConfig, config=config)
        check_kind(Mapping, state_block_sizes=state_block_sizes)
        check_specs(specs)
        self.specs, self.config, self.backend = tuple(specs), config, backend
        self.state_block_sizes = state_block_sizes
        self.groups = sorted({group for spec in specs for group in spec.groups()} - {"rows", "window", "rings"})
        with_rings, latent = [spec for spec in specs if "rings" in spec.groups()], specs[0].rows == "latent"
        pools = {spec.pool if latent else POOLED for spec in with_rings}
        if len(pools) > 1:
            raise ValueError(f"specs: got layers with pools of {sorted(pools)} rows, expected one size")
        self.has_rings, self._ring_capacity = bool(pools), ring_capacity(config.num_speculative_tokens, *pools)
        self.ratios = sorted({spec.ratio for spec in specs if spec.ratio})
        if latent and config.noncausal_decodes:
            raise ValueError("config.noncausal_decodes: got True, expected False: the layers have no window")
        for ratio in self.ratios:
            if config.has_c1a == (latent or ratio > POOLED) or ratio not in config.compress_ratios:
                raise ValueError(
                    f"config.compress_ratios: got {config.compress_ratios} with has_c1a {config.has_c1a}, which have "
                    f"no such layers of ratio {ratio}; serving_of returns the configuration of a model"
                )
            if f"states{ratio}" in self.groups:
                if ratio not in state_block_sizes:
                    raise ValueError(f"state_block_sizes: got {shown(state_block_sizes)}, expected one for {ratio}")
                check_integers(1, MOST_POSITIONS, **{f"state_block_sizes[{ratio}]": state_block_sizes[ratio]})
        self._tokens = DeepseekSparseSWAMetadataBuilder(config, backend)
        self._indexers = {}
        for ratio, spec in {spec.ratio: spec for spec in specs if spec.selects}.items():
            kind = V41IndexerMetadataBuilder if spec.keys == "latents" else StepIndexerMetadataBuilder
            self._indexers[ratio] = kind(config, backend, ratio, spec.pool)
        self._buffers: dict[str, Any] = {}

    @takes_prefix_len
    def build(
        self,
        batch: CommonAttentionMetadata,
        tables: Mapping[str, Any] | None = None,
        rings: Array | None = None,
        replay_start: Array | None = None,
    ) -> StepMetadata:
        """Metadata of a decode-first batch. The batch's own block table is for latent rows, or for the window caches.

        Args:
            batch: the batch; build(0, batch, ...) is also accepted, as by the metadata builders
            tables: [num_reqs, B] int32 by group of caches, for the groups of the model's layers: "compressed", pages of
                compressed_block_size positions; "states4" and "states128", pages of state_block_sizes positions. A
                table of states has a column for each page of the sequences; states whose page is -1 are not saved.
                Before a position at which a later step continues, the pages of the last ratio positions (at ratio 4 of
                the last 2 * ratio) must be present
            rings: [num_reqs] int32, each request's ring, fixed for its lifetime; -1: none, its tokens are not saved and
                complete no rows and no pooled keys. Required with layers that have rings
            replay_start: of DeepseekSparseSWAMetadataBuilder.build

        Raises TypeError or ValueError for an impossible batch, and for a table that is missing or too narrow.
        """
        tables = {} if tables is None else tables
        self._check_tables(batch, tables)
        rings = Call(self.backend).optional("rings", rings, INT32, (batch.num_reqs,))
        if self.has_rings and rings is None:
            raise ValueError("rings: got None, expected the ring of each request for the layers that have rings")
        compressed = tables.get("compressed")
        c128a = compressed if 128 in self.config.compress_ratios else None
        tokens = self._tokens.build(0, batch, c128a_block_table=c128a, replay_start=replay_start)
        positions = dlpack.borrow(tokens.positions, "positions")
        rows = {ratio: self._rows(ratio, batch, tokens, compressed, tables, positions) for ratio in self.ratios}
        ring_slots = None
        if self.has_rings:
            ring_slots = self._ring_slots(rings, dlpack.borrow(tokens.token_to_req_indices, "requests"), positions)
        return StepMetadata(tokens, rows, ring_slots)

    def _rows(
        self, ratio: int, batch: CommonAttentionMetadata, tokens: DeepseekSparseSWAMetadata, compressed: Any,
        tables: Mapping[str, Any], positions: Any,
    ) -> RowsStep:  # fmt: skip
        indexer = None
        if ratio in self._indexers:
            options = {} if compressed is None else {"block_table": compressed}
            indexer = self._indexers[ratio].build(0, batch, **options)
        if compressed is None:  # latent rows, and index keys in the same pages
            return RowsStep(tokens.block_table, tokens.slot_mapping, positions, indexer)
        first = positions
        if ratio == POOLED:
            first = self._buffer("row_positions", np.int32, positions)[: len(positions)]
            xp = dlpack.namespace_of(positions)
            xp.maximum(positions - positions % POOLED, -1, out=first)  # padding stays -1
        states = tables.get(f"states{ratio}")
        if states is None:
            assert indexer is not None
            return RowsStep(compressed, indexer.slot_mapping, first, indexer)
        size, page = self.state_block_sizes[ratio], self.config.compressed_block_size // ratio
        slots = self._slots("slots", batch, compressed, page, ratio)
        state_slots = self._slots("states", batch, states, size, 1)
        return RowsStep(compressed, slots, first, indexer, states, state_slots, size)

    def _check_tables(self, batch: CommonAttentionMetadata, tables: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for tables too narrow for the rows and states of the batch's sequences."""
        check_kind(Mapping, tables=tables)
        checked, call = {}, Call(self.backend)
        for group in self.groups:
            table = tables.get(group)
            if table is None:
                raise ValueError(f"tables[{group!r}]: got None, expected a block table for the caches of this group")
            table = call.array(f"tables[{group!r}]", table, INT32, (batch.num_reqs, -1))
            page, each = self.config.compressed_block_size, self.ratios[0]
            if group != "compressed":
                page, each = self.state_block_sizes[int(group.removeprefix("states"))], 1
            checked[f"tables[{group!r}]"] = table, page, each
        if checked:
            check_tables(HostLens.of(batch).seq_lens, checked)

    def _slots(self, name: str, batch: CommonAttentionMetadata, table: Any, block_size: int, ratio: int) -> Any:
        """Slots of rows of `ratio` positions, one a token."""
        rows = len(batch.slot_mapping)
        like = dlpack.borrow(batch.seq_lens, "seq_lens")
        out = self._buffer(f"{name}{block_size}/{ratio}", np.int64, like)[:rows]
        get_compressed_slot_mapping(
            rows, batch.query_start_loc, batch.seq_lens, table, block_size, ratio, out, backend=self.backend
        )
        return out

    def _ring_slots(self, rings: Any, requests: Any, positions: Any) -> Any:
        """Slots in rings: ring * capacity + position % capacity, -1 without a ring and for padding."""
        capacity, xp = self._ring_capacity, dlpack.namespace_of(positions)
        out = self._buffer("ring_slots", np.int64, positions)[: len(positions)]
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
        return self._buffers[name]


def check_specs(specs: Any) -> None:
    """Raise TypeError or ValueError unless these describe layers of one model."""
    if not isinstance(specs, Sequence) or not all(isinstance(spec, LayerSpec) for spec in specs):
        raise TypeError(f"specs: got {shown(specs)}, expected a sequence of LayerSpec")
    if len({spec.rows for spec in specs}) != 1:
        raise ValueError(f"specs: got layers with rows {sorted({x.rows for x in specs})}, expected one kind")
    by_layer = {spec.layer: spec for spec in specs}
    for spec in specs:
        for name, fields in SAME.items():
            source: Any = by_layer.get(getattr(spec, name), spec)
            for field in (name, *fields):
                ours, theirs = getattr(spec, field), getattr(source, field)
                if ours != theirs:
                    raise ValueError(
                        f"specs: got {field} {ours} in layer {spec.layer}, expected {theirs}, as in layer "
                        f"{source.layer}, its {name}"
                    )


def serving_of(config: Any, **options: Any) -> ServingConfig:
    """The metadata builders' configuration for a model.

    Args:
        config: of any model
        options: other fields of ServingConfig
    """
    if not callable(getattr(config, "specs", None)):
        raise TypeError(f"config: got {shown(config)}, expected the configuration of a model's attention layers")
    specs = config.specs()
    options.setdefault("num_heads", specs[0].heads)
    windows = [spec.window for spec in specs if spec.window]
    if windows:
        options["window_size"] = windows[0]
    return ServingConfig(
        compress_ratios=tuple(spec.ratio for spec in specs), index_topk=max(spec.topk for spec in specs),
        has_c1a=any(spec.rows == "window" and spec.ratio in (1, POOLED) for spec in specs), **options,
    )  # fmt: skip
