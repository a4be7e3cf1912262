"""Metadata that the layers of one step of V4 or V3.2 share, with slots for the compressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..arrays import dlpack
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_integers, check_kind, shown
from ..metadata.batch import CommonAttentionMetadata, HostLens
from ..metadata.build_order import takes_prefix_len
from ..metadata.builder import MOST_POSITIONS, ServingConfig
from ..metadata.indexer import (
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)
from ..metadata.slots import get_compressed_slot_mapping
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder
from ..metadata.validation import check_tables

STATE_BLOCK_SIZES = {4: 4, 128: 8}  # positions of a page of states, by compress ratio


def check_without_c1a(config: ServingConfig) -> None:
    """Raise ValueError for V4.1's configuration, whose layers of ratio 1 have compressed rows."""
    if config.has_c1a:
        raise ValueError("config.has_c1a: got True, expected False: DeepseekV41StepBuilder builds V4.1's metadata")


class StepIndexerMetadataBuilder(DeepseekV32IndexerMetadataBuilder):
    """The indexer's builder within a step of model layers. It treats the same requests as decodes as the window's does.

    Decodes of equal lengths are passed to the kernels as in the base class, others token by token, from buffers of the
    builder.
    """

    flattens_ragged: ClassVar[bool] = True


@dataclass(frozen=True)
class CompressorStep:
    """Metadata that a step's compressors of one ratio share.

    Attributes:
        block_table: [num_reqs, B] int32, pages of the compressed caches
        slot_mapping: [slots] int64, of the row that each token completes; -1 for the others
        state_block_table: [num_reqs, S] int32, pages of the states; -1: absent, for example already freed
        state_slot_mapping: [slots] int64, of each token's state; -1 where the state has no page
        state_block_size: positions of a page of states
    """

    block_table: Any
    slot_mapping: Any
    state_block_table: Any
    state_slot_mapping: Any
    state_block_size: int


@dataclass(frozen=True)
class DeepseekV4StepMetadata:
    """Metadata of one step. Arrays are views of the builder's buffers, or the batch's own.

    Attributes:
        window: of the window caches and of attention
        indexer: of the indexers; None without layers that select
        compressors: by compress ratio
    """

    window: DeepseekSparseSWAMetadata
    indexer: DeepseekV32IndexerMetadata | None
    compressors: dict[int, CompressorStep]

    @property
    def positions(self) -> Any:
        """[slots] int32, of each token in its sequence; -1 for padding."""
        return self.window.positions


@dataclass
class DeepseekV4StepBuilder:
    """Builds DeepseekV4StepMetadata. Its buffers keep their addresses, so a captured graph is valid after a build.

    Attributes:
        config: the metadata builders' configuration
        state_block_sizes: positions of a page of states, by compress ratio
    """

    config: ServingConfig
    backend: str | None = None
    state_block_sizes: Mapping[int, int] = field(default_factory=STATE_BLOCK_SIZES.copy)

    def __post_init__(self) -> None:
        config = self.config
        check_kind(ServingConfig, config=config)
        check_kind(Mapping, state_block_sizes=self.state_block_sizes)
        self.ratios = sorted({ratio for ratio in config.compress_ratios if ratio > 1})
        check_without_c1a(config)
        if not set(self.ratios) <= set(STATE_BLOCK_SIZES):
            raise ValueError(f"config.compress_ratios: got {config.compress_ratios}, expected 0, 1, 4 and 128")
        for ratio in self.ratios:
            if ratio not in self.state_block_sizes:
                raise ValueError(f"state_block_sizes: got {shown(self.state_block_sizes)}, expected one for {ratio}")
            check_integers(1, MOST_POSITIONS, **{f"state_block_sizes[{ratio}]": self.state_block_sizes[ratio]})
        self._window = DeepseekSparseSWAMetadataBuilder(config, self.backend)
        self._indexer = StepIndexerMetadataBuilder(config, self.backend) if 4 in self.ratios else None
        self._buffers: dict[str, Any] = {}

    @takes_prefix_len
    def build(
        self,
        batch: CommonAttentionMetadata,
        compressed_block_table: Any = None,
        state_block_tables: Mapping[int, Any] | None = None,
    ) -> DeepseekV4StepMetadata:
        """Metadata of a decode-first batch. The batch's own block table is for the window caches.

        Args:
            batch: the batch; build(0, batch, ...) is also accepted, as by the metadata builders
            compressed_block_table: [num_reqs, B] int32, pages of compressed_block_size positions, of the compressed
                caches of both ratios and of the indexers; required if the model has such layers
            state_block_tables: by compress ratio, [num_reqs, S] int32, pages of state_block_sizes[ratio] positions. A
                table has a column for each page of the sequences; states whose page is -1 are not saved. Before a
                position at which a later step continues, the pages of the last ratio positions (at ratio 4 of the last
                2 * ratio) must be present

        Raises TypeError or ValueError for an impossible batch, and for a table that is missing or too narrow.
        """
        if self.ratios and compressed_block_table is None:
            raise ValueError("compressed_block_table: got None, expected a block table for the compressed caches")
        tables = {} if state_block_tables is None else state_block_tables
        check_kind(Mapping, state_block_tables=tables)
        for ratio in self.ratios:
            if ratio not in tables:
                raise ValueError(f"state_block_tables: got ratios {sorted(tables)}, expected {self.ratios}")
        self._check_tables(batch, compressed_block_table, tables)
        window = self._window.build(0, batch, c128a_block_table=compressed_block_table if 128 in self.ratios else None)
        indexer = None
        if self._indexer is not None:
            indexer = self._indexer.build(0, batch, block_table=compressed_block_table)
        rows = len(batch.slot_mapping)
        compressors = {}
        for ratio in self.ratios:
            table, state_table = compressed_block_table, tables[ratio]
            block = self.config.compressed_block_size // ratio
            compressors[ratio] = CompressorStep(
                table,
                self._slots(f"slots{ratio}", batch, rows, table, block, ratio),
                state_table,
                self._slots(f"states{ratio}", batch, rows, state_table, self.state_block_sizes[ratio], 1),
                self.state_block_sizes[ratio],
            )
        return DeepseekV4StepMetadata(window, indexer, compressors)

    def _check_tables(self, batch: CommonAttentionMetadata, compressed: Any, states: Mapping[int, Any]) -> None:
        """Raise TypeError or ValueError for tables too narrow for the rows and states of the batch's sequences."""
        if not self.ratios:
            return
        page, call = self.config.compressed_block_size, Call(self.backend)
        checked = {"compressed_block_table": (compressed, page, self.ratios[0])}
        for ratio in self.ratios:
            checked[f"state_block_tables[{ratio}]"] = states[ratio], self.state_block_sizes[ratio], 1
        tables = {
            name: (call.array(name, table, INT32, (batch.num_reqs, -1)), positions, positions_per_row)
            for name, (table, positions, positions_per_row) in checked.items()
        }
        check_tables(HostLens.of(batch).seq_lens, tables)

    def _slots(
        self, name: str, batch: CommonAttentionMetadata, rows: int, table: Any, block_size: int, ratio: int
    ) -> Any:
        """Slots of rows of `ratio` positions, one a token."""
        out = self._buffer(name, batch)[:rows]
        get_compressed_slot_mapping(
            rows, batch.query_start_loc, batch.seq_lens, table, block_size, ratio, out, backend=self.backend
        )
        return out

    def _buffer(self, name: str, batch: CommonAttentionMetadata) -> Any:
        if name not in self._buffers:
            xp = dlpack.namespace_of(dlpack.borrow(batch.seq_lens, "seq_lens"))
            self._buffers[name] = xp.zeros(self.config.max_num_batched_tokens, np.int64)
        return self._buffers[name]


@dataclass(frozen=True)
class DeepseekV32StepMetadata:
    """Metadata that all layers of one step share: of the step's tokens, and of the indexers."""

    tokens: DeepseekSparseSWAMetadata
    indexer: DeepseekV32IndexerMetadata

    @property
    def positions(self) -> Any:
        """[slots] int32, of each token in its sequence; -1 for padding."""
        return self.tokens.positions


class DeepseekV32StepBuilder:
    """Builds DeepseekV32StepMetadata of decode-first batches, in buffers whose addresses do not change."""

    def __init__(self, config: ServingConfig, backend: str | None = None) -> None:
        check_kind(ServingConfig, config=config)
        if config.compress_ratios != (1,):
            raise ValueError(f"config.compress_ratios: got {config.compress_ratios}, expected (1,)")
        check_without_c1a(config)
        if config.noncausal_decodes:
            raise ValueError("config.noncausal_decodes: got True, expected False: layers of V3.2 have no window")
        self.config = config
        self._tokens = DeepseekSparseSWAMetadataBuilder(config, backend)
        self._indexer = StepIndexerMetadataBuilder(config, backend)

    @takes_prefix_len
    def build(self, batch: CommonAttentionMetadata) -> DeepseekV32StepMetadata:
        """Metadata of a batch whose block table serves both caches; build(0, batch) is also accepted.

        Raises ValueError for an impossible batch.
        """
        return DeepseekV32StepMetadata(self._tokens.build(0, batch), self._indexer.build(0, batch))
