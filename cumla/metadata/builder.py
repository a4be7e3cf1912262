"""The base class of the metadata builders, and their configuration."""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from ..arrays import dlpack, streams
from ..dispatch import debug
from ..dispatch.backends import BACKENDS
from ..dispatch.call import INT32, SLOTS, Call
from ..dispatch.launch_cache import VALIDATED, call_key, remember_validated
from ..dispatch.values import check_choice, check_flags, check_integers, check_kind, plain, shown
from ..kernels.types.metadata import SPLIT_PAGES
from ..ops.sparse_attention import MAX_HEADS
from .batch import CommonAttentionMetadata, host_array
from .vllm_helpers import reorder_batch_to_split_decodes_and_prefills

M = TypeVar("M")

COMPRESS_RATIOS = (1, 2, 4, 128)
MOST_POSITIONS = (2**31 - 1) // SPLIT_PAGES  # in a page: kernels count the positions of a split in int32


class AttentionCGSupport(enum.IntEnum):
    """The batches for which a builder's metadata can be used inside a CUDA graph.

    Attributes:
        NEVER: none
        UNIFORM_SINGLE_TOKEN_DECODE: decodes of one token for each request
        UNIFORM_BATCH: requests that all have the same number of tokens
        ALWAYS: any
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class ServingConfig:
    """The builders' configuration, from the model and the server.

    Attributes:
        window_size: positions of the sliding window, a token's own included
        compress_ratios: one a layer: 1 (or 0) window only, 2 (V4.1) and 4 (V4) with an indexer, 128 without
        block_size: tokens of a page of the window cache
        compressed_block_size: positions (not rows) that a page of a compressed cache covers
        index_topk: entries the indexer selects
        num_heads: query heads on this device, at most 128
        num_speculative_tokens: draft tokens that a decode may have in addition to its own token
        max_num_batched_tokens: query tokens of a step
        max_num_seqs: requests of a step
        max_model_len: positions of a sequence
        prefill_chunk_size: requests of the longest kind that fit in the prefill workspace
        max_logits_bytes: budget for the indexer's float32 logits
        num_sms: multiprocessors that share the indexer's decode logits (132 on an H100 or H200)
        has_c1a: ratio 1 is V4.1's C1A, compressed rows of one position each; window-only layers have ratio 0
        noncausal_decodes: for DSpark's draft layers: each token of a decode sees the window before the decode's first
            token and all tokens of the decode
        batch_invariant: for batch-invariant layers: the builders' plans are for them, and each token of the indexer's
            decodes is an entry of its own
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
    num_sms: int = 132
    has_c1a: bool = False
    noncausal_decodes: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "compress_ratios"}
        for name in ("has_c1a", "noncausal_decodes", "batch_invariant"):
            check_flags(**{name: numbers.pop(name)})
            object.__setattr__(self, name, bool(getattr(self, name)))
        check_integers(0, 2**31 - 2, num_speculative_tokens=numbers.pop("num_speculative_tokens"))
        check_integers(1, MAX_HEADS, num_heads=numbers.pop("num_heads"))
        check_integers(1, 2**63 - 1, max_logits_bytes=numbers.pop("max_logits_bytes"))
        for name in ("block_size", "compressed_block_size"):
            check_integers(1, MOST_POSITIONS, **{name: numbers.pop(name)})
        check_integers(1, **numbers)
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))
        try:
            values = tuple(self.compress_ratios)
        except TypeError:
            raise TypeError(f"compress_ratios: got {shown(self.compress_ratios)}, expected one a layer") from None
        for ratio in values:
            check_integers(0, compress_ratios=ratio)
            if ratio and ratio not in COMPRESS_RATIOS:
                raise ValueError(f"compress_ratios: got {ratio}, expected 0, 1, 2, 4 or 128")
        ratios = tuple(int(ratio) if self.has_c1a else max(1, int(ratio)) for ratio in values)
        if not ratios:
            raise ValueError("compress_ratios: got no layers, expected at least one")
        object.__setattr__(self, "compress_ratios", ratios)
        largest = max(*ratios, 1)
        if self.compressed_block_size % largest:
            raise ValueError(
                f"compressed_block_size: got {self.compressed_block_size}, expected a multiple of {largest}, "
                "the largest compress ratio"
            )

    @property
    def decode_threshold(self) -> int:
        """Longest query that counts as a decode."""
        return 1 + self.num_speculative_tokens

    @property
    def indexer_compress_ratio(self) -> int:
        """Positions per row of the indexer's cache: 4 with layers of ratio 4 (V4), 2 with layers of ratio 2 (V4.1; it
        has another cache for layers of ratio 1), otherwise 1 (V3.2)."""
        return next((ratio for ratio in (4, 2) if ratio in self.compress_ratios), 1)

    @property
    def decode_swa_width(self) -> int:
        """Entries of a decode token's window row. noncausal_decodes: window + longest decode, rounded up to 64."""
        if not self.noncausal_decodes:
            return self.window_size
        return -(-(self.window_size + self.decode_threshold) // 64) * 64

    def has_compressed_rows(self, compress_ratio: int) -> bool:
        """Whether the layers with this ratio have compressed rows in addition to their window."""
        return compress_ratio > 1 or (compress_ratio == 1 and self.has_c1a)

    def layer_type(self, compress_ratio: int) -> str:
        """ "swaonly", "c1a", "c2a", "c4a" or "c128a". Raises ValueError for another ratio."""
        check_choice((0, *COMPRESS_RATIOS), compress_ratio=compress_ratio)
        return f"c{compress_ratio}a" if self.has_compressed_rows(compress_ratio) else "swaonly"


class BatchArrays(NamedTuple):
    """A batch's arrays, borrowed for kernels."""

    query_start_loc: Any
    seq_lens: Any
    slot_mapping: Any
    block_table: Any

    @classmethod
    def of(cls, call: Call, batch: CommonAttentionMetadata, block_table: Any = None) -> BatchArrays:
        """Borrow and check a batch's arrays; `block_table`, unless None, replaces the batch's own.

        CuPy arrays whose key was already validated are not checked again.
        """
        num_reqs, name = batch.num_reqs, "block_table"
        if block_table is None:
            name, block_table = "block_table_tensor", batch.block_table_tensor
        fields = cls(batch.query_start_loc, batch.seq_lens, batch.slot_mapping, block_table)
        cache_key = call_key("batch", num_reqs, *fields)
        if debug.active and debug.is_on():
            check_twins(call, batch)
        elif cache_key in VALIDATED:
            call.first = dlpack.argument(fields.query_start_loc, "query_start_loc")
            return fields
        arrays = cls(
            call.array("query_start_loc", fields.query_start_loc, INT32, (num_reqs + 1,)),
            call.array("seq_lens", fields.seq_lens, INT32, (num_reqs,)),
            call.array("slot_mapping", fields.slot_mapping, SLOTS, (-1,)),
            call.array(name, block_table, INT32, (num_reqs, -1)),
        )
        if all(array is source for array, source in zip(arrays, fields, strict=True)):
            remember_validated(cache_key)
        return arrays


def check_twins(call: Call, batch: CommonAttentionMetadata) -> None:
    """Raise ValueError for an array of a batch whose values differ from those of its copy in host memory."""
    seq_lens = call.borrow("seq_lens", batch.seq_lens)
    if not call.checks_values():
        return
    from ..dispatch.debug_checks.values import check_equal

    with streams.callers(seq_lens.native, seq_lens.framework, call.stream):
        for name, count in (("seq_lens", batch.num_reqs), ("query_start_loc", batch.num_reqs + 1)):
            twin = host_array(f"{name}_cpu", getattr(batch, f"{name}_cpu"))[:count]
            array = call.array(name, getattr(batch, name), INT32, (count,))
            if len(twin) == count:
                check_equal(name, array, f"{name}_cpu", twin)


def check_mode(name: str, of_config: bool, of_layer: bool) -> None:
    """Raise ValueError for metadata whose builder's config has another batch_invariant than the layer."""
    if of_config != of_layer:
        raise ValueError(
            f"{name}: got batch_invariant={of_config} in the builder's config, expected {of_layer}, as the layer has"
        )


def check_current(name: str, metadata: Any) -> None:
    """Raise ValueError, under `cumla.debug`, for metadata whose builder has built again since: the metadata's arrays
    are the builder's buffers, which then contain the later batch."""
    if not debug.active or not debug.is_on() or metadata.build is None:
        return
    number, last = metadata.build.number, metadata.build.builds[0]
    if number != last:
        raise ValueError(
            f"{name}: got metadata of build {number} of its builder, which has built {last} times, expected the last "
            "build's: the builder's arrays contain only its batch"
        )


@dataclass(frozen=True)
class Build:
    """Identifies the build of a builder that produced metadata.

    Attributes:
        builds: [number of builds so far], the builder's own list
        number: this build's number, from 1
    """

    builds: list[int]
    number: int


class ViewCache:
    """Views of a builder's fixed buffers by name, cached by their counts.

    Slicing the buffers and exporting the views to a framework takes longer than filling them.
    """

    def __init__(self, cut: Callable[..., dict[str, Any]]) -> None:
        self._cut = cut
        self._cached = functools.lru_cache(maxsize=256)(self._give)

    def __call__(self, framework: str, *counts: int) -> dict[str, Any]:
        """`cut(*counts)` as arrays of `framework`."""
        return (self._give if framework == "jax" else self._cached)(framework, *counts)

    def _give(self, framework: str, *counts: int) -> dict[str, Any]:
        return {name: dlpack.give_shared(view, framework) for name, view in self._cut(*counts).items()}


class AttentionMetadataBuilder(abc.ABC, Generic[M]):
    """Builds one kind of metadata, step after step, into buffers whose addresses do not change.

    Attributes:
        cudagraph_support: which batches may run inside a CUDA graph
        full_cudagraph_supported: whether any batch may
        reorder_batch_threshold: longest query that the builder wants at the front of the batch, draft tokens included
            once constructed; None if it takes any order

    Source: vLLM AttentionMetadataBuilder; `config` replaces the engine's, and the device is the arrays' device.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    full_cudagraph_supported: ClassVar[bool] = False
    reorder_batch_threshold: int | None = None

    def __init__(self, config: ServingConfig, backend: str | None = None) -> None:
        check_kind(ServingConfig, config=config)
        check_choice((*BACKENDS, None), backend=backend)
        self.config, self.backend = config, backend
        self._builds = [0]
        if self.reorder_batch_threshold is not None:
            self.reorder_batch_threshold += config.num_speculative_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled builder has the same configuration and no builds: each builder has its own buffers."""
        return type(self), (self.config, self.backend)

    @abc.abstractmethod
    def build(
        self,
        common_prefix_len: int | CommonAttentionMetadata = 0,
        common_attn_metadata: CommonAttentionMetadata | None = None,
        fast_build: bool = False,
    ) -> M:
        """The metadata of a batch: build(common_prefix_len, batch), as in vLLM, or build(batch).

        Args:
            common_prefix_len: leading tokens that all requests share (for cascade attention)
            fast_build: optimise the build rather than execution: the result is used only a few times
        """

    def _counted(self) -> Build:
        """Count a new build, which becomes the last one."""
        self._builds[0] += 1
        return Build(self._builds, self._builds[0])

    @classmethod
    def get_cudagraph_support(cls, config: ServingConfig) -> AttentionCGSupport:
        """Which batches may run inside a CUDA graph."""
        return cls.cudagraph_support

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether this batch may run in a graph. Padding requests (no query) do not make a batch non-uniform."""
        support, batch = self.get_cudagraph_support(self.config), common_attn_metadata
        if support in (AttentionCGSupport.NEVER, AttentionCGSupport.ALWAYS):
            return support is AttentionCGSupport.ALWAYS
        starts = host_array("query_start_loc_cpu", batch.query_start_loc_cpu)
        query_lens = np.diff(starts[: batch.num_reqs + 1])
        query_lens = query_lens[query_lens > 0]
        longest = 1 if support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE else self.config.decode_threshold
        return bool((query_lens <= longest).all() and (query_lens == query_lens[:1]).all())

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata, **options: Any) -> M:
        """The metadata to capture a graph with; options as in `build`."""
        with debug.unchecked():  # the batch's values need not be valid
            return self.build(0, common_attn_metadata, **options)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        num_sms: int,
    ) -> bool:
        """Whether to attend to the common prefix separately: never, for sparse attention."""
        return False

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Move decodes to the front by `reorder_batch_to_split_decodes_and_prefills`. Returns whether any moved."""
        if self.reorder_batch_threshold is None:
            return False
        return reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output, self.reorder_batch_threshold)
