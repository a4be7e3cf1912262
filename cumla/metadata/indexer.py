"""Metadata of the indexer, which scores a cache's rows for each query of DeepSeek V3.2, V4 and V4.1 layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_choice, check_integers, plain_integers
from ..kernels.types.metadata import IndexerBuffers, IndexerCounts, IndexerStep
from ..ops.key_pools import MOST_POOLED
from .batch import CommonAttentionMetadata, HostLens, host_integers
from .build_order import batch_of
from .builder import AttentionCGSupport, AttentionMetadataBuilder, BatchArrays, Build, ServingConfig, ViewCache
from .indexer_chunks import ChunkBuilder, DeepseekV32IndexerPrefillChunkMetadata, DeepseekV32IndexerPrefillMetadata
from .validation import check_batch, check_capacity


@dataclass
class DeepSeekV32IndexerDecodeMetadata:
    """The decode kernels' metadata: an entry is a request, or one of its tokens where requests are flattened.

    Attributes:
        block_table: [batch_size, B] int32
        seq_lens: [batch_size] int32, rows an entry sees, or [batch_size, next_n], one for each of its tokens
        decode_lens: [batch_size] int32, query tokens of an entry
        requires_padding: entries have different numbers of tokens: their queries must be padded to the largest
        schedule_metadata: [num_sms + 1, 2] int32: entry and split where each multiprocessor's work range starts. A
            split is four pages; an entry with several lengths has splits for its last length. The splits of all entries
            are divided in order into ranges of almost equal size, larger ones first. A range ends where the next one
            starts and may be empty; the last row is the end, (batch_size, 0). The same as DeepGEMM's
            get_paged_mqa_logits_metadata
        packed: the decode tokens are the entries' tokens in order: the first entries have a token for each of their
            lengths, the others none. Further tokens and entries are padding
    """

    block_table: Any
    seq_lens: Any
    decode_lens: Any
    requires_padding: bool
    schedule_metadata: Any
    packed: bool = False


@dataclass
class DeepseekV32IndexerMetadata:
    """Metadata that the indexers of a step share. Arrays are views of the builder's buffers, or the batch's own.

    Attributes:
        seq_lens, query_start_loc, num_reqs, max_query_len, max_seq_len, num_actual_tokens: as in the batch
        slot_mapping: [slots] slot of each token's row in the indexer's cache, -1 for none: the batch's own; for a
            compressed cache int64, the slot of the row that the token completes
        num_decodes, num_decode_tokens, num_prefills, num_prefill_tokens: host counts
        head_dim: values of an indexer key
        prefill: None without prefills
        decode: None without decodes
        compress_ratio: positions of a row; all lengths, rows and slots of prefill and decode count rows
        batch_invariant: whether the step is for batch-invariant layers, as the builder's config has it
        build: the build that produced the metadata, for `cumla.debug`
    """

    seq_lens: Any
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Any
    slot_mapping: Any
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    head_dim: int = 128
    prefill: DeepseekV32IndexerPrefillMetadata | None = None
    decode: DeepSeekV32IndexerDecodeMetadata | None = None
    compress_ratio: int = 1
    batch_invariant: bool = False
    build: Build | None = field(default=None, repr=False, compare=False)


class DeepseekV32IndexerMetadataBuilder(AttentionMetadataBuilder[DeepseekV32IndexerMetadata]):
    """Builds DeepseekV32IndexerMetadata for decode-first batches of decodes (with draft tokens) and prefills.

    If the decode kernels support requests of `next_n` = 1 + num_speculative_tokens tokens natively
    (`natively_supported_next_n`), uniform decodes are passed as requests, with a length for each token. Otherwise
    every token becomes a separate entry (`use_flattening`), which also allows ragged decodes; so it does with
    config.batch_invariant.

    compress_ratio is the number of positions of a row of the cache, config.indexer_compress_ratio if None: 4 with C4A
    layers, 2 with C2A layers. With these and with C1A layers (config.has_c1a), a page covers
    config.compressed_block_size positions and the builder maps slots; otherwise a row is a position, a page has
    config.block_size rows, and slots are the batch's. V4.1's layers of ratio 1 and of ratio 2 have separate indexer
    caches, and need a builder for each, with its compress_ratio.

    pool is the number of positions of an index key where rows have one position each (GLM-5.3-Flash): lengths, rows and
    slots of the metadata then count keys, and its compress_ratio is pool. A page covers config.block_size positions.

    The first build allocates the builder's buffers, on the device of its batch's arrays. The arrays that the decode
    kernels read keep their addresses: a captured graph is valid after the next build. A build reads nothing back from
    the device and does not synchronise.

    Source: vLLM DeepseekV32IndexerMetadataBuilder.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    full_cudagraph_supported: ClassVar[bool] = True
    reorder_batch_threshold = 1
    natively_supported_next_n: ClassVar[tuple[int, ...]] = (1, 2)
    flattens_ragged: ClassVar[bool] = False  # ragged decodes are flattened, otherwise some of them count as prefills

    def __init__(
        self, config: ServingConfig, backend: str | None = None, compress_ratio: int | None = None, pool: int = 1
    ) -> None:
        super().__init__(config, backend)
        if compress_ratio is None:
            if config.has_c1a and {1, 2} <= set(config.compress_ratios):
                raise ValueError("compress_ratio: got None for layers of ratio 1 and of ratio 2, expected one of them")
            compress_ratio = config.indexer_compress_ratio
        check_choice((1, 2, 4), compress_ratio=compress_ratio)
        check_integers(1, MOST_POOLED, pool=pool)
        if pool > 1 and (compress_ratio > 1 or config.has_c1a or config.block_size % pool):
            raise ValueError(
                f"pool: got {pool}, expected 1 with compressed rows, otherwise a divisor of block_size "
                f"{config.block_size}"
            )
        self.pool = int(pool)
        self.num_speculative_tokens = config.num_speculative_tokens
        self.next_n = 1 + config.num_speculative_tokens
        self.use_flattening = config.batch_invariant or self.next_n not in self.natively_supported_next_n
        self.num_sms = config.num_sms
        self.compress_ratio = int(compress_ratio) * self.pool
        self.maps_slots = self.compress_ratio > 1 or config.has_c1a
        compressed = self.maps_slots and self.pool == 1
        self.page_positions = config.compressed_block_size if compressed else config.block_size
        self._chunks = ChunkBuilder(config, self.compress_ratio)
        self.block_size = self.page_positions // self.compress_ratio  # rows of a page
        self._max_columns = -(-config.max_model_len // self.page_positions)
        self._most_entries = config.max_num_seqs * self.next_n
        self.max_prefill_buffer_size = self._chunks.workspace_rows
        self._buffers: IndexerBuffers | None = None
        self._before = IndexerCounts(0, 0, False, 1, 0, 0, 0, self.block_size, self.compress_ratio, 1, self.maps_slots)
        self._views = ViewCache(self._cut)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self.backend, self.compress_ratio // self.pool, self.pool)

    def build(
        self,
        common_prefix_len: int | CommonAttentionMetadata = 0,
        common_attn_metadata: CommonAttentionMetadata | None = None,
        fast_build: bool = False,
        *,
        block_table: Array | None = None,
        validate: bool = True,
        stream: Any = None,
    ) -> DeepseekV32IndexerMetadata:
        """Metadata of a batch.

        Args:
            common_prefix_len, fast_build: accepted for every builder; without effect
            common_attn_metadata: the batch; build(batch) is build(0, batch)
            block_table: [num_reqs, B] int32, pages of the indexer's cache, if they are not the batch's own
            validate: check the host values of the batch first; False trusts them

        Raises ValueError, before the device is touched, for an impossible batch; the message names the request.
        """
        batch = batch_of(common_prefix_len, common_attn_metadata)
        call = Call(self.backend, stream)
        arrays = BatchArrays.of(call, batch, block_table)
        lens, rows = HostLens.of(batch), len(arrays.slot_mapping)
        check_capacity(batch, self.config, rows)
        if validate:
            table = (arrays.block_table, self.page_positions, self.compress_ratio)
            name = "block_table_tensor" if block_table is None else "block_table"
            check_batch(batch, lens, self.config, **{name: table})
        require_uniform = not self.use_flattening and not self.flattens_ragged
        split = lens.split(batch, self.config.decode_threshold, require_uniform)
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split
        shortest, max_decode_len = _extremes(lens, num_decodes, self.config.decode_threshold)
        use_native = not self.use_flattening and max_decode_len in self.natively_supported_next_n
        each = max_decode_len if use_native else 1
        packed = shortest == max_decode_len == each or _are_packed(lens.query_lens[:num_decodes], each)
        flatten = not packed if self.flattens_ragged else not use_native and max_decode_len > 1
        counts = self._lay_out(
            num_decodes, num_decode_tokens, flatten, 1 if flatten else each, max_decode_len, arrays.block_table,
            batch.max_seq_len,
        )  # fmt: skip
        given: Any = batch.block_table_tensor if block_table is None else block_table
        framework = dlpack.framework_of(batch.query_start_loc)

        slot_mapping, decode, prefill = batch.slot_mapping, None, None
        with call.kernels("indexer_metadata") as kernels:
            buffers = self._fixed_buffers(call, arrays.seq_lens)
            chunks = self._chunks.lay_out(lens, num_decodes, arrays.seq_lens) if num_prefills else []
            batch_arrays = arrays.query_start_loc, arrays.seq_lens, arrays.block_table
            kernels.build_indexer(IndexerStep(*batch_arrays, counts, buffers, chunks[0].chunk if chunks else None))
            self._before = counts
            for other in chunks[1:]:
                kernels.build_indexer_chunk(arrays.query_start_loc, arrays.seq_lens, self.compress_ratio, other.chunk)
            views = self._views_of(framework, counts, arrays.block_table, rows)
            if self.maps_slots:
                slot_mapping = views["slot_mapping"]
            if num_decodes:
                decode = DeepSeekV32IndexerDecodeMetadata(
                    block_table=views["block_table"] if counts.flatten else given[:num_decodes],
                    seq_lens=views["seq_lens"],
                    decode_lens=views["decode_lens"],
                    requires_padding=not counts.flatten and shortest < max_decode_len,
                    schedule_metadata=views["schedule_metadata"],
                    packed=packed or counts.flatten,
                )
            if num_prefills:
                prefill = self._chunks.metadata(chunks, given, framework)
        return DeepseekV32IndexerMetadata(
            seq_lens=batch.seq_lens,
            num_reqs=batch.num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_prefills,
            num_prefill_tokens=num_prefill_tokens,
            prefill=prefill,
            decode=decode,
            compress_ratio=self.compress_ratio,
            batch_invariant=self.config.batch_invariant,
            build=self._counted(),
        )

    @plain_integers
    def build_one_prefill_chunk(
        self,
        req_slice: slice,
        query_slice: slice,
        query_start_loc_cpu: Any,
        seq_lens_cpu: Any,
        block_table: Any,
        skip_kv_gather: bool = False,
        *,
        stream: Any = None,
    ) -> DeepseekV32IndexerPrefillChunkMetadata | None:
        """One chunk in new arrays, from host values only.

        Args:
            req_slice: the chunk's requests
            query_slice: the chunk's queries, counted within the queries of its requests
            query_start_loc_cpu: [R + 1] int32 in host memory
            seq_lens_cpu: [R] int32 in host memory
            block_table: [R, B] int32; the chunk has its framework and device
            skip_kv_gather: whether the previous chunk had the same requests, so that the workspace has their rows

        Returns None if the requests have no row yet. Raises TypeError or ValueError for slices out of range, lengths
        that do not fit together and more rows than the workspace has.
        """
        return self._chunks.build_one(
            Call(self.backend, stream), req_slice, query_slice, query_start_loc_cpu, seq_lens_cpu, block_table,
            skip_kv_gather,
        )  # fmt: skip

    @plain_integers
    def _prepare_decode_tensors(
        self,
        seq_lens: Any,
        block_table: Any,
        decode_lens: Any,
        decode_lens_cpu: Any,
        query_start_loc: Any,
        num_decodes: int,
        num_decode_tokens: int,
        use_native: bool,
        next_n: int,
        max_decode_len: int,
    ) -> tuple[Any, Any, Any, int, bool]:
        """The decode kernels' arrays for decodes only: the decode part of `build` without a batch.

        Args:
            seq_lens, decode_lens, query_start_loc: [num_decodes] int32
            block_table: [num_decodes, B] int32
            decode_lens_cpu: [num_decodes] host integers
            num_decode_tokens: the decodes' tokens, padding tokens included
            use_native: whether requests of next_n tokens are passed to the kernels as requests
            max_decode_len: largest of decode_lens

        Returns (seq_lens, block_table, decode_lens, batch_size, requires_padding). Requests of several tokens
        are flattened into one entry a token, with length 0 for padding tokens; or, if `use_native`, have one
        length for each of next_n tokens, seq_lens [num_decodes, next_n]: token j sees the sequence without its last
        max_decode_len - 1 - j positions. No length is below 0 or above the sequence's.
        """
        check_integers(0, num_decodes=num_decodes, num_decode_tokens=num_decode_tokens, max_decode_len=max_decode_len)
        check_integers(1, next_n=next_n)
        decode_lens_cpu = host_integers("decode_lens_cpu", decode_lens_cpu)
        call = Call(self.backend)
        lens = call.array("seq_lens", seq_lens, INT32, (num_decodes,))
        table = call.array("block_table", block_table, INT32, (num_decodes, -1))
        starts = call.array("query_start_loc", query_start_loc, INT32, (num_decodes,))
        last_len = call.array("decode_lens", decode_lens, INT32, (num_decodes,))[-1:]
        starts = dlpack.namespace_of(starts).concatenate([starts, starts[-1:] + last_len])
        flatten = not use_native and max_decode_len > 1
        counts = self._lay_out(
            num_decodes, num_decode_tokens, flatten, next_n if use_native else 1,
            max_decode_len if use_native else 1, table, self.config.max_model_len,
        )  # fmt: skip
        with call.kernels("indexer_metadata") as kernels:
            kernels.build_indexer(IndexerStep(starts, lens, table, counts, self._fixed_buffers(call, lens)))
            self._before = counts
        views = self._views_of(dlpack.framework_of(seq_lens), counts, table, 0)
        shortest = int(np.minimum.reduce(decode_lens_cpu, initial=max_decode_len))
        requires_padding = not counts.flatten and shortest < max_decode_len
        table = views["block_table"] if counts.flatten else block_table
        return views["seq_lens"], table, views["decode_lens"], counts.batch_size, requires_padding

    def _lay_out(
        self,
        num_decodes: int,
        num_decode_tokens: int,
        flatten: bool,
        lens_per_entry: int,
        decode_len: int,
        block_table: Any,
        max_seq_len: int,
    ) -> IndexerCounts:
        """The entries for the decode kernels, and the columns of their block tables."""
        before, batch_size, columns = self._before, num_decodes, 0
        if flatten:
            batch_size = min(num_decode_tokens, self._most_entries)  # tokens beyond are padding
            columns = min(-(-max_seq_len // self.page_positions), block_table.shape[1], self._max_columns)
        return IndexerCounts(
            num_decodes, batch_size, flatten, lens_per_entry, columns,
            before.batch_size if before.flatten else 0, before.columns, self.block_size, self.compress_ratio,
            decode_len if lens_per_entry > 1 else 1, self.maps_slots,
        )  # fmt: skip

    def _fixed_buffers(self, call: Call, like: Any) -> IndexerBuffers:
        if self._buffers is None:
            config, xp = self.config, dlpack.namespace_of(like)
            capacity = max(config.max_num_batched_tokens, self._most_entries)
            self._buffers = IndexerBuffers(
                decode_lens=xp.zeros(capacity, np.int32),
                seq_lens=xp.zeros(capacity, np.int32),
                slot_mapping=xp.full(capacity if self.maps_slots else 0, -1, np.int64),
                block_table=xp.zeros((self._most_entries, self._max_columns), np.int32),
                schedule=xp.zeros((self.num_sms + 1, 2), np.int32),
            )
        call.check_place("the builder's buffers", self._buffers.seq_lens)
        return self._buffers

    def _views_of(self, framework: str, counts: IndexerCounts, block_table: Any, rows: int) -> dict[str, Any]:
        columns = block_table.shape[1] if counts.flatten else 0
        return self._views(framework, counts.batch_size, counts.lens_per_entry, columns, rows)

    def _cut(self, batch_size: int, lens_per_entry: int, columns: int, rows: int) -> dict[str, Any]:
        """Views of the buffers that decodes read, and of the slots of `rows` tokens."""
        buffers = self._buffers
        assert buffers is not None
        seq_lens = buffers.seq_lens[: batch_size * lens_per_entry]
        return {
            "seq_lens": seq_lens.reshape(batch_size, lens_per_entry) if lens_per_entry > 1 else seq_lens,
            "decode_lens": buffers.decode_lens[:batch_size],
            "block_table": buffers.block_table[:batch_size, :columns],
            "schedule_metadata": buffers.schedule,
            "slot_mapping": buffers.slot_mapping[:rows],
        }


def _extremes(lens: HostLens, num_decodes: int, most: int) -> tuple[int, int]:
    """The shortest and the longest query of the decodes, at most `most` tokens long; 0 without decodes."""
    if not num_decodes:
        return 0, 0
    if lens.starts[num_decodes] == most * num_decodes:  # the usual case takes a sixth of the time
        return most, most
    query_lens = lens.query_lens[:num_decodes]
    return int(np.minimum.reduce(query_lens)), int(np.maximum.reduce(query_lens))


def _are_packed(query_lens: np.ndarray, each: int) -> bool:
    """Whether the first requests have `each` tokens each and the others none."""
    return bool((query_lens[: np.count_nonzero(query_lens)] == each).all())
