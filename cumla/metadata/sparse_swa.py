"""Sliding-window and C128A metadata of DeepSeek V4 layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..batch import CommonAttentionMetadata, reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills
from ..call import INT32, SLOTS, Call
from ..interop import dlpack
from ..kernels.step import C128A_RATIO, BatchCounts, SwaBuffers
from .base import AttentionCGSupport, AttentionMetadataBuilder, ServingConfig
from .validation import check_batch

LAYER_TYPES = {1: "swaonly", 4: "c4a", 128: "c128a"}


@dataclass
class DeepseekSparseSWAMetadata:
    """What the sparse layers of one step share. Arrays are views of the builder's buffers, or the batch's own.

    block_table, slot_mapping, seq_lens, query_start_loc, query_start_loc_cpu    as in the batch
    block_size                tokens of a page of the window cache
    is_valid_token            [slots] bool, False where slot_mapping is negative
    token_to_req_indices      [slots] int32, 0 for padding
    decode_swa_indices        [num_decode_tokens, 1, window] int32 slots, -1 after the length
    decode_swa_lens           [num_decode_tokens] int32, 0 for padding
    prefill_swa_indices       [num_prefill_tokens, window] int32 slots, for prefill straight from the pages
    prefill_swa_lens          [num_prefill_tokens] int32
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens             host counts
    prefill_seq_lens          [num_prefills] int32; None without prefills, as are the next three
    prefill_gather_lens       [num_prefills] int32, rows of the window cache that a request's queries reach
    prefill_seq_lens_cpu, prefill_query_lens_cpu                                 host copies
    c128a_global_decode_topk_indices  [num_decode_tokens, 1, width] int32 slots of all compressed rows;
                              None without C128A layers, as are the next two
    c128a_decode_topk_lens    [num_decode_tokens] int32
    c128a_prefill_topk_indices  [num_prefill_tokens, width] int32, 0, 1, ... as many as there are, then -1
    """

    block_table: Any
    slot_mapping: Any
    block_size: int
    seq_lens: Any
    query_start_loc: Any
    query_start_loc_cpu: Any
    is_valid_token: Any
    token_to_req_indices: Any
    decode_swa_indices: Any
    decode_swa_lens: Any
    prefill_swa_indices: Any
    prefill_swa_lens: Any
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    config: ServingConfig
    prefill_seq_lens: Any = None
    prefill_gather_lens: Any = None
    prefill_seq_lens_cpu: Any = None
    prefill_query_lens_cpu: Any = None
    c128a_global_decode_topk_indices: Any = None
    c128a_decode_topk_lens: Any = None
    c128a_prefill_topk_indices: Any = None

    def get_prefill_chunk_plan(self, compress_ratio: int) -> list[tuple[int, int, int, int]]:
        """Cut the prefills into chunks whose workspace is bounded.

        Returns [(start, end, N, M)]: prefills [start, end) share a workspace of end - start times M rows,
        of which a request's first N hold its compressed rows and the rest its window rows. As many
        requests go together as `prefill_chunk_size` requests of the longest kind would need room for;
        one that is larger alone is a chunk of its own.
        """
        if not self.num_prefills:
            return []
        config = self.config
        compressed = self.prefill_seq_lens_cpu // compress_ratio if compress_ratio > 1 else 0
        prefix = self.prefill_seq_lens_cpu - self.prefill_query_lens_cpu
        window = self.prefill_query_lens_cpu + np.minimum(prefix, config.window_size - 1)
        compressed = np.broadcast_to(compressed, window.shape)
        longest = config.window_size + config.max_num_batched_tokens
        if compress_ratio > 1:
            longest += -(-config.max_model_len // compress_ratio)
        budget = config.prefill_chunk_size * longest
        plan: list[tuple[int, int, int, int]] = []
        start, rows_compressed, rows_window = 0, 0, 0
        for i in range(self.num_prefills):
            more_compressed = max(rows_compressed, int(compressed[i]))
            more_window = max(rows_window, int(window[i]))
            if i > start and (i + 1 - start) * (more_compressed + more_window) > budget:
                plan.append((start, i, rows_compressed, rows_compressed + rows_window))
                start, more_compressed, more_window = i, int(compressed[i]), int(window[i])
            rows_compressed, rows_window = more_compressed, more_window
        plan.append((start, self.num_prefills, rows_compressed, rows_compressed + rows_window))
        return plan


class DeepseekSparseSWAMetadataBuilder(AttentionMetadataBuilder[DeepseekSparseSWAMetadata]):
    """Builds DeepseekSparseSWAMetadata for decode-first batches of decodes (with draft tokens) and prefills.

    Its buffers are allocated by the first build, on the device of that batch's arrays, and keep their
    addresses: a captured graph that reads them is right after the next build. Nothing is read back from
    the device and nothing synchronises.

    Source: vLLM DeepseekSparseSWAMetadataBuilder, and build_c128a_topk_metadata for C128A.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, config: ServingConfig, backend: str | None = None) -> None:
        super().__init__(config)
        self.backend = backend
        self.layer_types = {LAYER_TYPES[ratio] for ratio in config.compress_ratios}
        self._buffers: SwaBuffers | None = None
        self._rows_in_use = 0

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        return reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output, self.config.decode_threshold)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        c128a_block_table: Any = None,
        validate: bool = True,
        stream: Any = None,
    ) -> DeepseekSparseSWAMetadata:
        """Metadata of a batch.

        c128a_block_table  [num_reqs, B] int32, pages of the C128A cache; needed where the config has C128A
        validate           check the host numbers of the batch first; False trusts them

        Raises ValueError, before the device is touched, for a batch that cannot be: it names the request.
        """
        config, batch = self.config, common_attn_metadata
        if validate:
            check_batch(batch, config)
        split = split_decodes_and_prefills(batch, config.decode_threshold)
        num_decodes, _, num_decode_tokens, _ = split
        if "c128a" in self.layer_types and c128a_block_table is None:
            raise ValueError("c128a_block_table: got None, expected a block table for the C128A layers")

        call = Call(self.backend, stream)
        query_start_loc = call.array("query_start_loc", batch.query_start_loc, INT32, (batch.num_reqs + 1,))
        seq_lens = call.array("seq_lens", batch.seq_lens, INT32, (batch.num_reqs,))
        slot_mapping = call.array("slot_mapping", batch.slot_mapping, SLOTS, (-1,))
        block_table = call.array("block_table_tensor", batch.block_table_tensor, INT32, (batch.num_reqs, -1))
        c128a_table = call.optional("c128a_block_table", c128a_block_table, INT32, (batch.num_reqs, -1))
        buffers = self._buffers or self._allocate(seq_lens)
        rows = len(slot_mapping)
        if not batch.num_actual_tokens <= rows <= config.max_num_batched_tokens:
            raise ValueError(
                f"slot_mapping: got {rows} entries, expected num_actual_tokens = {batch.num_actual_tokens} to "
                f"max_num_batched_tokens = {config.max_num_batched_tokens}"
            )
        counts = BatchCounts(
            batch.num_reqs, num_decodes, num_decode_tokens, batch.num_actual_tokens, rows, self._rows_in_use
        )
        width = self._c128a_width(batch.max_seq_len)
        with call.kernels("step") as kernels:
            kernels.build_sparse_swa(
                query_start_loc, seq_lens, slot_mapping, block_table, c128a_table, counts,
                config.block_size, config.window_size, config.compressed_block_size // C128A_RATIO, width, buffers,
            )  # fmt: skip
        self._rows_in_use = rows
        return self._metadata(batch, split, rows, width, buffers)

    def _c128a_width(self, max_seq_len: int) -> int:
        """Columns in use: a power of two, so that few widths occur, within the fixed capacity."""
        if "c128a" not in self.layer_types:
            return 0
        rows = max(max_seq_len // C128A_RATIO, 1)
        return min(max(128, 1 << (rows - 1).bit_length()), self._c128a_capacity)

    @property
    def _c128a_capacity(self) -> int:
        return -(-self.config.max_model_len // C128A_RATIO // 128) * 128 or 128

    def _allocate(self, like: Any) -> SwaBuffers:
        config, xp = self.config, dlpack.namespace_of(like)
        tokens = config.max_num_batched_tokens
        has_c128a = "c128a" in self.layer_types
        capacity = self._c128a_capacity if has_c128a else 0
        self._buffers = SwaBuffers(
            token_to_req_indices=xp.zeros(tokens, np.int32),
            is_valid_token=xp.zeros(tokens, np.bool_),
            swa_indices=xp.full((tokens, config.window_size), -1, np.int32),
            swa_lens=xp.zeros(tokens, np.int32),
            prefill_gather_lens=xp.zeros(config.max_num_seqs, np.int32),
            c128a_indices=xp.full((tokens if has_c128a else 0, capacity), -1, np.int32),
            c128a_lens=xp.zeros(tokens if has_c128a else 0, np.int32),
        )
        return self._buffers

    def _metadata(
        self,
        batch: CommonAttentionMetadata,
        split: tuple[int, int, int, int],
        rows: int,
        width: int,
        buffers: SwaBuffers,
    ) -> DeepseekSparseSWAMetadata:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split
        framework = dlpack.framework_of(batch.seq_lens)
        num_tokens = num_decode_tokens + num_prefill_tokens

        def give(array: Any) -> Any:
            return dlpack.give(array, framework)

        metadata = DeepseekSparseSWAMetadata(
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            block_size=self.config.block_size,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            is_valid_token=give(buffers.is_valid_token[:rows]),
            token_to_req_indices=give(buffers.token_to_req_indices[:rows]),
            decode_swa_indices=give(buffers.swa_indices[:num_decode_tokens, None]),
            decode_swa_lens=give(buffers.swa_lens[:num_decode_tokens]),
            prefill_swa_indices=give(buffers.swa_indices[num_decode_tokens:num_tokens]),
            prefill_swa_lens=give(buffers.swa_lens[num_decode_tokens:num_tokens]),
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=num_prefill_tokens,
            config=self.config,
        )
        if num_prefills:
            seq_lens_cpu = dlpack.borrow(batch.seq_lens_cpu, "seq_lens_cpu")
            starts = dlpack.borrow(batch.query_start_loc_cpu, "query_start_loc_cpu")
            metadata.prefill_seq_lens = batch.seq_lens[num_decodes:]
            metadata.prefill_gather_lens = give(buffers.prefill_gather_lens[:num_prefills])
            metadata.prefill_seq_lens_cpu = seq_lens_cpu[num_decodes : batch.num_reqs]
            metadata.prefill_query_lens_cpu = np.diff(starts[num_decodes : batch.num_reqs + 1])
        if width:
            metadata.c128a_global_decode_topk_indices = give(buffers.c128a_indices[:num_decode_tokens, None, :width])
            metadata.c128a_decode_topk_lens = give(buffers.c128a_lens[:num_decode_tokens])
            metadata.c128a_prefill_topk_indices = give(buffers.c128a_indices[num_decode_tokens:num_tokens, :width])
        return metadata
