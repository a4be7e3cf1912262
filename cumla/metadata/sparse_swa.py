"""Sliding-window and C128A metadata of DeepSeek V4 and V4.1 layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..arrays import dlpack
from ..arrays.array import Array
from ..dispatch.call import INT32, Call
from ..dispatch.values import check_flags, check_integers, check_optional_size
from ..kernels.types.metadata import C128A_RATIO, BatchCounts, SwaBuffers, WindowStep
from ..kernels.types.plan import DecodePlan, Workspace
from .batch import CommonAttentionMetadata, HostLens
from .build_order import batch_of
from .builder import AttentionCGSupport, AttentionMetadataBuilder, BatchArrays, Build, ServingConfig, ViewCache
from .validation import Table, check_batch, check_block_size, check_capacity

LAYER_TYPES = ("swaonly", "c4a", "c128a")  # V4's types; V4.1's have plans only in models with such layers


@dataclass
class DeepseekSparseSWAMetadata:
    """Metadata that the sparse layers of one step share. Arrays are views of the builder's buffers, or the batch's own.

    Attributes:
        block_table, slot_mapping, seq_lens, query_start_loc, query_start_loc_cpu: as in the batch
        block_size: tokens of a page of the window cache
        is_valid_token: [slots] bool, False where slot_mapping is negative
        token_to_req_indices: [slots] int32, 0 for padding
        positions: [slots] int32, of the token in its sequence, -1 for padding
        decode_swa_indices: [num_decode_tokens, 1, config.decode_swa_width] int32 slots, -1 after the length
        decode_swa_lens: [num_decode_tokens] int32, 0 for padding
        prefill_swa_indices: [num_prefill_tokens, window] int32 slots, for prefill straight from the pages
        prefill_swa_lens: [num_prefill_tokens] int32
        swa_indices, swa_lens: [num_tokens, 1, config.decode_swa_width] and [num_tokens] int32, for all tokens
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: host counts
        config: the builder's
        max_seq_len: longest sequence, or a bound on it, as in the batch
        longest: longest sequence of seq_lens_cpu, from which layers check the widths of their tables
        prefill_seq_lens: [num_prefills] int32; this and the next three are None without prefills
        prefill_gather_lens: [num_prefills] int32, rows of the window cache that a request's queries reach: its new
            rows, and earlier rows from its replay_start on
        prefill_seq_lens_cpu, prefill_query_lens_cpu: host copies
        c128a_global_decode_topk_indices: [num_decode_tokens, 1, width] int32 slots of all compressed rows; this and the
            next two are None without C128A layers
        c128a_decode_topk_lens: [num_decode_tokens] int32
        c128a_prefill_topk_indices: [num_prefill_tokens, width] int32: 0, 1, ... for complete rows, then -1
        tile_sched_swaonly, tile_sched_c1a, tile_sched_c2a, tile_sched_c4a, tile_sched_c128a: the decodes' plan for the
            layers of each type, None without such layers or without decodes
        replay_start: [num_reqs] int32, the argument of the build, or None
        build: the build that produced the metadata, for `cumla.debug`
    """

    block_table: Any
    slot_mapping: Any
    block_size: int
    seq_lens: Any
    query_start_loc: Any
    query_start_loc_cpu: Any
    is_valid_token: Any
    token_to_req_indices: Any
    positions: Any
    decode_swa_indices: Any
    decode_swa_lens: Any
    prefill_swa_indices: Any
    prefill_swa_lens: Any
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    config: ServingConfig
    max_seq_len: int = 0
    longest: int = 0
    swa_indices: Any = None
    swa_lens: Any = None
    prefill_seq_lens: Any = None
    prefill_gather_lens: Any = None
    prefill_seq_lens_cpu: Any = None
    prefill_query_lens_cpu: Any = None
    c128a_global_decode_topk_indices: Any = None
    c128a_decode_topk_lens: Any = None
    c128a_prefill_topk_indices: Any = None
    tile_sched_swaonly: DecodePlan | None = None
    tile_sched_c4a: DecodePlan | None = None
    tile_sched_c128a: DecodePlan | None = None
    tile_sched_c1a: DecodePlan | None = None
    tile_sched_c2a: DecodePlan | None = None
    replay_start: Any = None
    build: Build | None = field(default=None, repr=False, compare=False)
    _plans: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = field(
        init=False, repr=False, default_factory=dict
    )
    _pages_workspace: Workspace | None = field(default=None, repr=False)
    _pages_plans: dict[tuple[int, int], DecodePlan] = field(init=False, repr=False, default_factory=dict)

    def decode_plan(self, compress_ratio: int) -> DecodePlan | None:
        """The plan that the decodes of the layers with this ratio share; None if the config has no such layers."""
        plan: DecodePlan | None = getattr(self, f"tile_sched_{self.config.layer_type(compress_ratio)}")
        return plan

    def pages_plan(self, compress_ratio: int, first_token: int) -> DecodePlan:
        """The plan that the layers with this ratio share for the prefill chunk at `first_token`, on the pages path."""
        key = compress_ratio, first_token
        if key not in self._pages_plans:
            self._pages_plans[key] = DecodePlan(self._pages_workspace, batch_invariant=self.config.batch_invariant)
        return self._pages_plans[key]

    def get_prefill_chunk_plan(
        self, compress_ratio: int, prefill_chunk_size: int | None = None, has_compressed: bool | None = None
    ) -> list[tuple[int, int, int, int]]:
        """Divide the prefills into chunks whose workspace is bounded.

        Args:
            prefill_chunk_size: requests of the longest kind that fit in a workspace; the config's if None
            has_compressed: whether the workspace has compressed rows; None: if the ratio is above 1. V4.1's layers of
                ratio 1 have compressed rows; layers of ratio 0 cannot

        Returns [(start, end, N, M)]: prefills [start, end) share a workspace of end - start times M rows, first N
        compressed rows of a request and then its window rows. A chunk has all following requests that fit in the
        space of `prefill_chunk_size` requests of the longest kind; a request that does not fit is a chunk of its
        own. The plan does not depend on replay_start, which only makes windows shorter.
        """
        check_integers(0, compress_ratio=compress_ratio)
        check_optional_size(prefill_chunk_size=prefill_chunk_size)
        if has_compressed is None:
            has_compressed = compress_ratio > 1
        check_flags(has_compressed=has_compressed)
        if has_compressed and not compress_ratio:
            raise ValueError("has_compressed: got True for compress_ratio 0, expected a ratio of at least 1")
        key = compress_ratio, prefill_chunk_size or self.config.prefill_chunk_size, bool(has_compressed)
        if key not in self._plans:
            self._plans[key] = self._plan(*key) if self.num_prefills else []
        return self._plans[key]

    def _plan(
        self, compress_ratio: int, prefill_chunk_size: int, has_compressed: bool
    ) -> list[tuple[int, int, int, int]]:
        config = self.config
        longest = config.window_size + config.max_num_batched_tokens
        if has_compressed:
            longest += -(-config.max_model_len // compress_ratio)
        budget = prefill_chunk_size * longest
        seq_lens, query_lens = self.prefill_seq_lens_cpu, self.prefill_query_lens_cpu
        compressed = seq_lens // compress_ratio if has_compressed else np.zeros_like(seq_lens)
        window = query_lens + np.minimum(seq_lens - query_lens, config.window_size - 1)
        plan: list[tuple[int, int, int, int]] = []
        start, rows_compressed, rows_window = 0, 0, 0
        for i, (request_compressed, request_window) in enumerate(
            zip(compressed.tolist(), window.tolist(), strict=True)
        ):
            most_compressed, most_window = max(rows_compressed, request_compressed), max(rows_window, request_window)
            if i > start and (i + 1 - start) * (most_compressed + most_window) > budget:
                plan.append((start, i, rows_compressed, rows_compressed + rows_window))
                start, most_compressed, most_window = i, request_compressed, request_window
            rows_compressed, rows_window = most_compressed, most_window
        plan.append((start, self.num_prefills, rows_compressed, rows_compressed + rows_window))
        return plan


class DeepseekSparseSWAMetadataBuilder(AttentionMetadataBuilder[DeepseekSparseSWAMetadata]):
    """Builds DeepseekSparseSWAMetadata for decode-first batches of decodes (with draft tokens) and prefills.

    The first build allocates the builder's buffers, on the device of its batch's arrays. They keep their
    addresses: a captured graph that reads them is valid after the next build. A build reads nothing back from
    the device and does not synchronise.

    Source: vLLM DeepseekSparseSWAMetadataBuilder, and build_c128a_topk_metadata for C128A. vLLM's builder has the
    head_size and compress_ratio of one cache; here layers have them (`SparseMLALayer`), and one builder serves all.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    full_cudagraph_supported: ClassVar[bool] = True
    reorder_batch_threshold = 1

    def __init__(self, config: ServingConfig, backend: str | None = None) -> None:
        super().__init__(config, backend)
        self.num_speculative_tokens = config.num_speculative_tokens
        self.decode_threshold = config.decode_threshold
        self.window_size, self.block_size = config.window_size, config.block_size
        self.layer_types = {config.layer_type(ratio) for ratio in config.compress_ratios}
        self._has_c128a = "c128a" in self.layer_types
        self._workspaces = {name: Workspace() for name in self.layer_types}
        self._pages_workspace = Workspace()
        self._buffers: SwaBuffers | None = None
        self._rows_in_use = self._width_in_use = 0
        self._views = ViewCache(self._cut)

    def build(
        self,
        common_prefix_len: int | CommonAttentionMetadata = 0,
        common_attn_metadata: CommonAttentionMetadata | None = None,
        fast_build: bool = False,
        *,
        c128a_block_table: Array | None = None,
        replay_start: Array | None = None,
        validate: bool = True,
        stream: Any = None,
    ) -> DeepseekSparseSWAMetadata:
        """Metadata of a batch.

        Args:
            common_prefix_len, fast_build: accepted for every builder; without effect
            common_attn_metadata: the batch; build(batch) is build(0, batch)
            c128a_block_table: [num_reqs, B] int32, pages of the C128A cache; required if the config has C128A
            replay_start: [num_reqs] int32, the first position of each request whose window row is valid: a replayed
                request does not rebuild earlier rows. Windows start there or later, on every path and even if it is
                within the step, except windows of noncausal decodes. None: 0
            validate: check the host values of the batch first; False trusts them

        Raises ValueError, before the device is touched, for an impossible batch; the message names the request.
        """
        config, batch = self.config, batch_of(common_prefix_len, common_attn_metadata)
        if self._has_c128a and c128a_block_table is None:
            raise ValueError("c128a_block_table: got None, expected a block table for the C128A layers")
        call = Call(self.backend, stream)
        arrays = BatchArrays.of(call, batch)
        c128a_table = None
        if self._has_c128a:
            c128a_table = call.array("c128a_block_table", c128a_block_table, INT32, (batch.num_reqs, -1))
        replay = call.optional("replay_start", replay_start, INT32, (batch.num_reqs,))
        lens, rows = HostLens.of(batch), len(arrays.slot_mapping)
        check_capacity(batch, config, rows)
        if validate:
            check_block_size(batch, config.block_size)
            tables: dict[str, Table] = {"block_table_tensor": (arrays.block_table, config.block_size, 1)}
            if c128a_table is not None:
                tables["c128a_block_table"] = (c128a_table, config.compressed_block_size, C128A_RATIO)
            check_batch(batch, lens, config, **tables)
        split = lens.split(batch, self.decode_threshold)
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split
        counts = BatchCounts(
            batch.num_reqs, num_decodes, num_decode_tokens, int(lens.starts[-1]) if batch.num_reqs else 0, rows,
            self._rows_in_use, self._width_in_use,
        )  # fmt: skip
        width = self._c128a_width(batch.max_seq_len)
        with call.kernels("window_metadata") as kernels:
            buffers = self._buffers or self._allocate(arrays.seq_lens)
            call.check_place("the builder's buffers", buffers.swa_lens)
            kernels.build_sparse_swa(WindowStep(
                *arrays, c128a_table, counts, config.block_size, config.window_size,
                config.compressed_block_size // C128A_RATIO, width, buffers, replay, config.noncausal_decodes,
            ))  # fmt: skip
            self._rows_in_use, self._width_in_use = rows, width
            framework = dlpack.framework_of(batch.query_start_loc)
            views = self._views(framework, rows, num_decode_tokens, batch.num_actual_tokens, num_prefills, width)

        plans = self.build_tile_scheduler(num_decode_tokens)
        metadata = DeepseekSparseSWAMetadata(
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            block_size=config.block_size,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=num_prefill_tokens,
            config=config,
            max_seq_len=batch.max_seq_len,
            longest=int(lens.seq_lens.max(initial=0)),
            **views,
            **{f"tile_sched_{name}": plan for name, plan in plans.items()},
            replay_start=replay_start,
            _pages_workspace=self._pages_workspace,
            build=self._counted(),
        )
        if num_prefills:
            metadata.prefill_seq_lens = batch.seq_lens[num_decodes:]
            metadata.prefill_seq_lens_cpu = lens.seq_lens[num_decodes:]
            metadata.prefill_query_lens_cpu = lens.query_lens[num_decodes:]
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, *, c128a_block_table: Any = None, **options: Any
    ) -> DeepseekSparseSWAMetadata:
        """The metadata to capture a graph with.

        Args:
            c128a_block_table: as in `build`; None: C128A layers have no rows until the next build
        """
        if self._has_c128a and c128a_block_table is None:
            batch = common_attn_metadata
            columns = -(-max(batch.max_seq_len, 1) // self.config.compressed_block_size)
            xp = dlpack.namespace_of(dlpack.borrow(batch.seq_lens, "seq_lens"))
            c128a_block_table = xp.full((batch.num_reqs, columns), -1, np.int32)
        return super().build_for_cudagraph_capture(common_attn_metadata, c128a_block_table=c128a_block_table, **options)

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, DecodePlan | None]:
        """A plan for the decodes of one step by layer type ("swaonly", "c1a", "c2a", "c4a", "c128a").

        The layers of a type share a plan, which the first layer fills on the device. The plans of a type, one a step,
        share memory whose address does not change. None for V4's types that the model lacks, and without decodes.
        """
        check_integers(0, num_decode_tokens=num_decode_tokens)
        plans: dict[str, DecodePlan | None] = dict.fromkeys((*LAYER_TYPES, *self.layer_types))
        if num_decode_tokens:
            mode = self.config.batch_invariant
            plans |= {name: DecodePlan(x, batch_invariant=mode) for name, x in self._workspaces.items()}
        return plans

    def _c128a_width(self, max_seq_len: int) -> int:
        """Columns in use: a power of two up to the fixed capacity, so that few widths occur."""
        if not self._has_c128a:
            return 0
        rows = max(max_seq_len // C128A_RATIO, 1)
        return min(max(128, 1 << (rows - 1).bit_length()), self._c128a_capacity)

    @property
    def _c128a_capacity(self) -> int:
        return -(-self.config.max_model_len // C128A_RATIO // 128) * 128 or 128

    def _allocate(self, like: Any) -> SwaBuffers:
        config, xp = self.config, dlpack.namespace_of(like)
        tokens = config.max_num_batched_tokens
        c128a_rows, c128a_width = (tokens, self._c128a_capacity) if self._has_c128a else (0, 0)
        self._buffers = SwaBuffers(
            token_to_req_indices=xp.zeros(tokens, np.int32),
            is_valid_token=xp.zeros(tokens, np.bool_),
            positions=xp.full(tokens, -1, np.int32),
            swa_indices=xp.full((tokens, config.decode_swa_width), -1, np.int32),
            swa_lens=xp.zeros(tokens, np.int32),
            prefill_gather_lens=xp.zeros(config.max_num_seqs, np.int32),
            c128a_indices=xp.full((c128a_rows, c128a_width), -1, np.int32),
            c128a_lens=xp.zeros(c128a_rows, np.int32),
        )
        return self._buffers

    def _cut(self, rows: int, num_decode_tokens: int, num_tokens: int, num_prefills: int, width: int) -> dict[str, Any]:
        """The fields that are views of the buffers."""
        buffers, decodes, prefills = self._buffers, slice(num_decode_tokens), slice(num_decode_tokens, num_tokens)
        assert buffers is not None
        views = {
            "is_valid_token": buffers.is_valid_token[:rows],
            "token_to_req_indices": buffers.token_to_req_indices[:rows],
            "positions": buffers.positions[:rows],
            "decode_swa_indices": buffers.swa_indices[decodes, None],
            "decode_swa_lens": buffers.swa_lens[decodes],
            "prefill_swa_indices": buffers.swa_indices[prefills, : self.window_size],
            "prefill_swa_lens": buffers.swa_lens[prefills],
            "swa_indices": buffers.swa_indices[:num_tokens, None],
            "swa_lens": buffers.swa_lens[:num_tokens],
        }
        if num_prefills:
            views["prefill_gather_lens"] = buffers.prefill_gather_lens[:num_prefills]
        if width:
            views["c128a_global_decode_topk_indices"] = buffers.c128a_indices[decodes, None, :width]
            views["c128a_decode_topk_lens"] = buffers.c128a_lens[decodes]
            views["c128a_prefill_topk_indices"] = buffers.c128a_indices[prefills, :width]
        return views
