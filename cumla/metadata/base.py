"""What every metadata builder has, and the numbers that builders are configured with."""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from ..batch import CommonAttentionMetadata
from ..call import check_integers

M = TypeVar("M")

COMPRESS_RATIOS = (1, 4, 128)


class AttentionCGSupport(enum.IntEnum):
    """Which batches a builder's metadata can be used with inside a CUDA graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class ServingConfig:
    """What the builders need to know of a model and of its server.

    window_size             positions of the sliding window, a token's own included
    compress_ratios         one a layer: 1 (or 0) window only, 4 with an indexer, 128 without
    block_size              tokens of a page of the window cache
    compressed_block_size   positions (not rows) that a page of a compressed cache covers
    index_topk              entries the indexer selects
    num_heads               query heads on this device
    num_speculative_tokens  draft tokens a decode may carry beside its own
    max_num_batched_tokens  query tokens of a step
    max_num_seqs            requests of a step
    max_model_len           positions of a sequence
    prefill_chunk_size      requests of the longest kind that the prefill workspace has room for
    max_logits_bytes        budget for the indexer's float32 logits
    """

    window_size: int = 128
    compress_ratios: tuple[int, ...] = (1,)
    block_size: int = 64
    compressed_block_size: int = 256
    index_topk: int = 512
    num_heads: int = 64
    num_speculative_tokens: int = 0
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 131072
    prefill_chunk_size: int = 4
    max_logits_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "compress_ratios"}
        check_integers(0, num_speculative_tokens=numbers.pop("num_speculative_tokens"))
        check_integers(1, **numbers)
        ratios = tuple(max(1, int(ratio)) for ratio in self.compress_ratios)
        for ratio in ratios:
            if ratio not in COMPRESS_RATIOS:
                raise ValueError(f"compress_ratios: got {ratio}, expected 0, 1, 4 or 128")
        if not ratios:
            raise ValueError("compress_ratios: got no layers, expected at least one")
        object.__setattr__(self, "compress_ratios", ratios)
        largest = max(ratios)
        if self.compressed_block_size % largest:
            raise ValueError(
                f"compressed_block_size: got {self.compressed_block_size}, expected a multiple of {largest}, "
                "the largest compress ratio"
            )

    @property
    def decode_threshold(self) -> int:
        """Longest query that counts as a decode."""
        return 1 + self.num_speculative_tokens


class AttentionMetadataBuilder(abc.ABC, Generic[M]):
    """Builds one kind of metadata, step after step, into buffers that stay where they are.

    Source: vLLM AttentionMetadataBuilder; `config` in place of the engine's, the device as the arrays have it.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, config: ServingConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """The metadata of a batch.

        common_prefix_len  leading tokens that all requests share (for cascade attention)
        fast_build         build fast rather than for fast execution: the result is used only a few times
        """

    @classmethod
    def get_cudagraph_support(cls, config: ServingConfig) -> AttentionCGSupport:
        """Which batches may run inside a CUDA graph."""
        return cls.cudagraph_support

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether this batch may."""
        support = self.get_cudagraph_support(self.config)
        if support in (AttentionCGSupport.NEVER, AttentionCGSupport.ALWAYS):
            return support is AttentionCGSupport.ALWAYS
        longest = common_attn_metadata.max_query_len
        if support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE and longest > 1:
            return False
        batch = common_attn_metadata
        return longest <= self.config.decode_threshold and batch.num_actual_tokens == longest * batch.num_reqs

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The metadata to capture a graph with."""
        return self.build(0, common_attn_metadata)

    def use_cascade_attention(self, common_prefix_len: int, *args: Any, **kwargs: Any) -> bool:
        """Whether to attend to the common prefix apart from the rest."""
        return False

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Bring the batch into the order this builder wants; whether anything moved."""
        return False
