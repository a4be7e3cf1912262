"""The builder of dense attention's metadata (`mla.py`), and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.call import Call
from ..dispatch.values import check_flags, check_integers, check_kind, plain, shown
from ..kernels.types.plan import DenseDecodePlan, Workspace
from ..layout import MLA_BF16
from .batch import CommonAttentionMetadata, HostLens, first_true
from .build_order import batch_of
from .builder import AttentionCGSupport, AttentionMetadataBuilder, BatchArrays, ServingConfig
from .mla import INT32_MAX, MLACommonMetadata, check_head_size
from .mla_context import cut_context
from .mla_groups import GroupedBatch, SequenceGroup, batch_of_groups
from .validation import check_batch, check_block_size, check_capacity

MAX_WORKSPACE_TOKENS = 128 * 1024  # 144 MiB of 16-bit rows


@dataclass(frozen=True)
class MLAConfig(ServingConfig):
    """A `ServingConfig` (dense attention ignores its sliding-window and indexer fields) with, in addition:

    Attributes:
        sliding_window: tokens of a prompt that the cache holds, or None for all tokens
        chunked_prefill_enabled: whether a prompt may come in parts
        enable_prefix_caching: whether a prompt may start after rows that are already cached
        max_seq_len_to_capture: longest sequence of captured graphs; max_model_len if None
        head_size: values of a cached row
        dtype: of the workspace that context is gathered into: "bfloat16" or "float16"
    """

    sliding_window: int | None = None
    chunked_prefill_enabled: bool = True
    enable_prefix_caching: bool = True
    max_seq_len_to_capture: int | None = None
    head_size: int = MLA_BF16.head_dim
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ServingConfig.__dataclass_fields__}
        object.__setattr__(self, "compress_ratios", ServingConfig(**numbers).compress_ratios)
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))
        check_head_size("head_size", self.head_size)
        check_flags(
            chunked_prefill_enabled=self.chunked_prefill_enabled, enable_prefix_caching=self.enable_prefix_caching
        )
        if self.sliding_window is not None:
            check_integers(1, sliding_window=self.sliding_window)
            if self.batch_invariant:
                raise ValueError(
                    f"sliding_window: got {self.sliding_window} with batch_invariant=True, expected None: prefills "
                    "attend over the cache's rows"
                )
        if self.max_seq_len_to_capture is not None:
            check_integers(1, max_seq_len_to_capture=self.max_seq_len_to_capture)
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype: got {shown(self.dtype)}, expected 'bfloat16' or 'float16'")

    @property
    def allows_context(self) -> bool:
        """Whether a prefill may have tokens that are already in the cache."""
        return self.chunked_prefill_enabled or self.enable_prefix_caching

    @property
    def context_chunk_workspace_size(self) -> int:
        """Rows of the workspace that context is gathered into.

        Eight of the longest sequences, or four pages for each request if that is more, but at most 128 Ki rows: the
        projections of more rows would take memory from the cache.
        Raises ValueError if the workspace is smaller than a page for each request.
        """
        smallest = self.max_num_seqs * self.block_size
        rows = min(max(8 * self.max_model_len, 4 * smallest), MAX_WORKSPACE_TOKENS)
        if rows < smallest:
            raise ValueError(
                f"max_num_seqs: got {self.max_num_seqs} requests with pages of {self.block_size} tokens, "
                f"expected at most {MAX_WORKSPACE_TOKENS} tokens in a page of each"
            )
        return rows


class MLACommonMetadataBuilder(AttentionMetadataBuilder[MLACommonMetadata]):
    """Builds MLACommonMetadata for decode-first batches.

    Decodes are requests of at most 1 + num_speculative_tokens query tokens, all of one length; a request of
    another length is a prefill, regardless of its context, and so are the requests after it. Arrays that are not in
    the batch are computed on the host and copied to the device in one copy. A build reads nothing back from the device
    and does not synchronise.

    An engine with sequence groups instead of a batch uses `prepare`, `add_seq_group` and `build_groups`.
    Source: vLLM MLACommonMetadataBuilder.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    full_cudagraph_supported = True
    reorder_batch_threshold = 1

    def __init__(self, config: MLAConfig, backend: str | None = None) -> None:
        check_kind(MLAConfig, config=config)
        super().__init__(config, backend)
        self.mla_config = config
        self.block_size = self.page_size = config.block_size
        self.sliding_window = config.sliding_window
        self.chunked_prefill_enabled = config.chunked_prefill_enabled
        self.enable_prefix_caching = config.enable_prefix_caching
        self.context_chunk_workspace_size = config.context_chunk_workspace_size if config.allows_context else 0
        self._plan_workspace = Workspace(owner="builder")  # shared by all steps' plans: steps run one after another
        self.prepare()

    def prepare(self) -> None:
        """Start a new batch of sequence groups."""
        self._groups: list[SequenceGroup] = []

    def add_seq_group(self, group: SequenceGroup) -> None:
        """Add a sequence group, in the engine's order."""
        check_kind(SequenceGroup, group=group)
        self._groups.append(group)

    def build_groups(
        self, like: Any, cuda_graph_pad_size: int = -1, *, is_profile_run: bool = False, stream: Any = None
    ) -> tuple[MLACommonMetadata, GroupedBatch]:
        """Metadata of the groups added since `prepare`, as a decode-first batch.

        Args:
            like: an array whose device and framework the metadata's arrays get
            cuda_graph_pad_size: padding requests, without tokens and with slot -1, to bring the batch to a captured
                size; -1 outside of a graph
        """
        config = self.mla_config
        check_integers(-1, cuda_graph_pad_size=cuda_graph_pad_size)
        grouped = batch_of_groups(self._groups, config.block_size, config.sliding_window, max(cuda_graph_pad_size, 0))
        framework, native = dlpack.framework_of(like), dlpack.borrow(like, "like")
        with streams.callers(native, framework, stream):
            batch = grouped.to_device(native, framework)
        metadata = self.build(
            0, batch, use_cuda_graph=cuda_graph_pad_size >= 0, is_profile_run=is_profile_run, stream=stream,
            validate=not is_profile_run,
        )  # fmt: skip
        return metadata, grouped

    def build(
        self,
        common_prefix_len: int | CommonAttentionMetadata = 0,
        common_attn_metadata: CommonAttentionMetadata | None = None,
        fast_build: bool = False,
        *,
        use_cuda_graph: bool = False,
        is_profile_run: bool = False,
        validate: bool = True,
        stream: Any = None,
    ) -> MLACommonMetadata:
        """Metadata of a batch.

        Args:
            common_prefix_len, fast_build: accepted for every builder; without effect
            common_attn_metadata: the batch; build(batch) is build(0, batch)
            use_cuda_graph: whether a captured graph will run this batch
            is_profile_run: whether the step only measures how much memory is needed
            validate: check the host values of the batch first; False trusts them

        Raises ValueError, before the device is touched, for an impossible batch; the message names the request.
        """
        config, batch = self.mla_config, batch_of(common_prefix_len, common_attn_metadata)
        call = Call(self.backend, stream)
        arrays = BatchArrays.of(call, batch)
        lens = HostLens.of(batch)
        check_capacity(batch, config, len(arrays.slot_mapping))
        if validate:
            check_block_size(batch, config.block_size)
            check_batch(batch, lens, config, block_table_tensor=(arrays.block_table, config.block_size, 1))
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = lens.split(
            batch, config.decode_threshold, require_uniform=True
        )
        decode_lens = lens.query_lens[:num_decodes]
        shorter = first_true(decode_lens != decode_lens.max(initial=0))
        if shorter >= 0 and decode_lens[shorter:].any():  # an empty query between others: lengths differ
            num_decodes, num_decode_tokens = shorter, int(lens.starts[shorter])
            num_prefills = batch.num_reqs - num_decodes
        if num_prefills:
            num_prefill_tokens = int(lens.starts[-1]) - num_decode_tokens
        contexts = (lens.seq_lens - lens.query_lens).astype(np.int32)
        prefill_contexts = contexts[num_decodes:]
        if not config.allows_context and prefill_contexts.any():
            request = num_decodes + int(prefill_contexts.argmax())
            raise ValueError(
                f"seq_lens_cpu: request {request} has {contexts[request]} tokens in the cache before its prefill, "
                "expected none as neither chunked_prefill_enabled nor enable_prefix_caching is set"
            )
        chunks = None
        if not config.batch_invariant:  # these layers' prefills read the cache's pages
            chunks = cut_context(prefill_contexts, self.context_chunk_workspace_size, self.page_size)
        seq_starts = np.concatenate([[0], np.cumsum(lens.seq_lens, dtype=np.int64)])
        parts = [contexts, seq_starts]
        if chunks is not None:
            parts += [chunks.starts, chunks.cu_seq_lens]
        framework = dlpack.framework_of(batch.query_start_loc)
        with streams.callers(arrays.seq_lens, framework, stream):
            sent = [dlpack.give(view, framework) for view in send_together(parts, arrays.seq_lens)]

        decode_lens, prefill_lens = lens.query_lens[:num_decodes], lens.query_lens[num_decodes:]
        max_decode_query_len = int(decode_lens.max(initial=0))
        return MLACommonMetadata(
            num_prefills=num_prefills,
            num_prefill_tokens=num_prefill_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            slot_mapping=batch.slot_mapping,
            seq_lens=lens.seq_lens.tolist(),
            seq_lens_tensor=batch.seq_lens,
            max_prefill_seq_len=int(lens.seq_lens[num_decodes:].max(initial=0)),
            max_decode_seq_len=int(lens.seq_lens[:num_decodes].max(initial=0)),
            context_lens_tensor=sent[0],
            block_tables=batch.block_table_tensor,
            use_cuda_graph=use_cuda_graph,
            max_query_len=max(max_decode_query_len, int(prefill_lens.max(initial=0))),
            max_decode_query_len=max_decode_query_len,
            query_start_loc=batch.query_start_loc,
            seq_start_loc=sent[1],
            head_dim=config.head_size,
            is_profile_run=is_profile_run,
            context_chunk_starts=sent[2] if chunks else None,
            context_chunk_cu_seq_lens=sent[3] if chunks else None,
            context_chunk_seq_tot=chunks.seq_tot if chunks else None,
            context_chunk_max_seq_lens=chunks.max_seq_lens if chunks else None,
            block_size=config.block_size,
            batch_invariant=config.batch_invariant,
            decode_plan=DenseDecodePlan(self._plan_workspace, batch_invariant=config.batch_invariant),
        )


def send_together(parts: list[np.ndarray], like: Any) -> list[Any]:
    """int32 arrays on the device of `like`, as views of one copy; arrays beyond int32 are copied alone, as int64."""
    xp = dlpack.namespace_of(like)
    packed = np.concatenate([part.ravel() for part in parts])
    if packed.max(initial=0) > INT32_MAX:
        return [xp.asarray(part if part.max(initial=0) > INT32_MAX else part.astype(np.int32)) for part in parts]
    packed = packed.astype(np.int32)
    sent, first, views = xp.asarray(packed), 0, []
    for part in parts:
        views.append(sent[first : first + part.size].reshape(part.shape))
        first += part.size
    return views
