"""Memory of the dense layers across steps: the context workspace and the buffers of captured graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.call import INT32, SLOTS, Call, Shape
from ..dispatch.values import check_integers, check_kind
from ..kernels.types.plan import DenseDecodePlan, Workspace
from ..ops.blocks import copy_blocks, swap_blocks
from .batch import PADDING_SLOT
from .mla import SUPPORTED_HEAD_SIZES, MLACommonMetadata, check_head_size
from .mla_builder import MLACommonMetadataBuilder, MLAConfig
from .validation import check_columns

# The arrays that a captured graph reads: dtypes, shape, and the values of padding requests.
GRAPH_INPUTS: dict[str, tuple[tuple[np.dtype[Any], ...], Shape, int]] = {
    "slot_mapping": (SLOTS, (-1,), PADDING_SLOT),
    "seq_lens_tensor": (INT32, ("batch_size",), 0),
    "block_tables": (INT32, ("batch_size", -1), 0),
}
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


class MLACommonState:
    """The workspace that prefills gather context into, and the arrays that captured decode graphs read.

    Attributes:
        context_chunk_workspace_size: rows of the workspace (0 if the config allows no context)
        context_chunk_workspace: [rows, head_size] NumPy or CuPy array, allocated by the first `begin_forward`

    Source: vLLM MLACommonState.
    """

    def __init__(self, config: MLAConfig) -> None:
        check_kind(MLAConfig, config=config)
        self.config = config
        self.chunked_prefill_enabled = config.chunked_prefill_enabled
        self.enable_prefix_caching = config.enable_prefix_caching
        self.context_chunk_workspace_size = config.context_chunk_workspace_size if config.allows_context else 0
        self.context_chunk_workspace: Any = None
        self._graph_slot_mapping: Any = None
        self._plan_workspace = Workspace(owner="state")  # shared by all graphs' plans: graphs run one after another

    @contextlib.contextmanager
    def graph_capture(self, max_batch_size: int, like: Any, *, stream: Any = None) -> Iterator[None]:
        """Hold arrays for graphs of up to `max_batch_size` decodes during their capture.

        Args:
            like: an array on the graphs' device and of their framework

        The arrays are initialised as padding: slot -1, one token in block 0. Metadata and input buffers taken inside
        the context keep the arrays alive after it.
        """
        check_integers(1, max_batch_size=max_batch_size)
        config = self.config
        framework, native = dlpack.framework_of(like), dlpack.borrow(like, "like")
        columns = -(-config.max_model_len // config.block_size)
        with streams.callers(native, framework, stream):
            xp = dlpack.namespace_of(native)
            self._graph_slot_mapping = dlpack.give(xp.full(max_batch_size, PADDING_SLOT, np.int64), framework)
            self._graph_seq_lens = dlpack.give(xp.ones(max_batch_size, np.int32), framework)
            self._graph_block_tables = dlpack.give(xp.zeros((max_batch_size, columns), np.int32), framework)
        try:
            yield
        finally:
            self._graph_slot_mapping = self._graph_seq_lens = self._graph_block_tables = None

    def graph_clone(self, batch_size: int) -> MLACommonState:
        """A state for another graph. Raises ValueError outside of `graph_capture`."""
        self._check_capturing(batch_size)
        return type(self)(self.config)

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> MLACommonMetadata:
        """Metadata of `batch_size` decodes over the arrays of `graph_capture`, to capture a graph with."""
        _refuse_encoder(is_encoder_decoder_model)
        self._check_capturing(batch_size)
        longest = self.config.max_seq_len_to_capture or self.config.max_model_len
        return MLACommonMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=batch_size,
            num_decode_tokens=batch_size,
            slot_mapping=self._graph_slot_mapping[:batch_size],
            seq_lens=None,
            seq_lens_tensor=self._graph_seq_lens[:batch_size],
            max_prefill_seq_len=0,
            max_decode_seq_len=longest,
            context_lens_tensor=None,
            block_tables=self._graph_block_tables[:batch_size],
            use_cuda_graph=True,
            max_query_len=1,
            max_decode_query_len=1,
            head_dim=self.config.head_size,
            block_size=self.config.block_size,
            batch_invariant=self.config.batch_invariant,
            decode_plan=DenseDecodePlan(self._plan_workspace, batch_invariant=self.config.batch_invariant),
        )

    def get_graph_input_buffers(
        self, attn_metadata: MLACommonMetadata, is_encoder_decoder_model: bool = False
    ) -> dict[str, Any]:
        """The arrays that a graph captured with this metadata reads, by name."""
        _refuse_encoder(is_encoder_decoder_model)
        decodes = attn_metadata.decode_metadata
        if decodes is None:
            raise ValueError("attn_metadata: got no decodes, expected a batch of decodes")
        return {
            "slot_mapping": attn_metadata.slot_mapping,
            "seq_lens_tensor": decodes.seq_lens_tensor,
            "block_tables": decodes.block_tables,
        }

    def prepare_graph_input_buffers(
        self,
        input_buffers: dict[str, Any],
        attn_metadata: MLACommonMetadata,
        is_encoder_decoder_model: bool = False,
        *,
        stream: Any = None,
    ) -> None:
        """Copy a step's decodes into the arrays of a captured graph.

        The batch may be smaller than the graph's: the other requests get slot -1 and no tokens, so they write no rows
        and their out is 0. Columns of a block table beyond the graph's are lookahead and left out.
        Raises ValueError, before anything is written, for a batch that is larger, and for longer sequences.
        """
        _refuse_encoder(is_encoder_decoder_model)
        check_kind(MLACommonMetadata, attn_metadata=attn_metadata)
        check_kind(Mapping, input_buffers=input_buffers)
        decodes = attn_metadata.decode_metadata
        if decodes is None or attn_metadata.num_prefills:
            raise ValueError(f"attn_metadata: got {attn_metadata.num_prefills} prefills, expected decodes only")
        missing = [name for name in GRAPH_INPUTS if name not in input_buffers]
        if missing:
            raise ValueError(f"input_buffers: got no {missing[0]}, expected the arrays of get_graph_input_buffers")
        framework, call = dlpack.framework_of(input_buffers["seq_lens_tensor"]), Call()
        copies = []
        for name, (dtypes, shape, rest) in GRAPH_INPUTS.items():
            target = call.array(f"input_buffers[{name!r}]", input_buffers[name], dtypes, shape, writable=True)
            source = call.borrow(name, getattr(decodes, name)).native
            if len(source) > len(target):
                raise ValueError(f"{name}: got {len(source)} requests, expected at most the graph's {len(target)}")
            if source.ndim != target.ndim or source.dtype.kind not in "iu":
                raise ValueError(f"{name}: got {source.dtype} of shape {source.shape}, expected the graph's")
            copies.append((target, source, rest))
            if target.ndim == 2 and decodes.seq_lens:
                check_columns(f"input_buffers[{name!r}]", target, self.config.block_size, max(decodes.seq_lens))
        with streams.callers(copies[0][0], framework, stream):
            for target, source, rest in copies:
                if target.ndim == 1:
                    target[: len(source)] = source
                else:
                    columns = min(target.shape[1], source.shape[1])
                    target[: len(source), :columns] = source[:, :columns]
                target[len(source) :] = rest

    def begin_forward(self, model_input: Any, *, stream: Any = None) -> None:
        """Set the workspace of the step's metadata; the first call allocates it on the input tokens' device.

        Args:
            model_input: has `input_tokens`, any array of the device, and `attn_metadata`, whose context_chunk_workspace
                is set
        """
        if not self.context_chunk_workspace_size:
            return
        if self.context_chunk_workspace is None:
            like = model_input.input_tokens
            framework, native = dlpack.framework_of(like), dlpack.borrow(like, "input_tokens")
            shape = (self.context_chunk_workspace_size, self.config.head_size)
            with streams.callers(native, framework, stream):
                self.context_chunk_workspace = dlpack.empty(shape, DTYPES[self.config.dtype], native)
        model_input.attn_metadata.context_chunk_workspace = self.context_chunk_workspace

    def _check_capturing(self, batch_size: int) -> None:
        if self._graph_slot_mapping is None:
            raise ValueError("graph_capture: not entered, expected to be inside of it")
        check_integers(0, batch_size=batch_size)
        if batch_size > len(self._graph_slot_mapping):
            raise ValueError(f"batch_size: got {batch_size}, expected at most {len(self._graph_slot_mapping)}")


class MLACommonBackend:
    """The classes and cache operations of dense multi-head latent attention. Source: vLLM MLACommonBackend."""

    swap_blocks = staticmethod(swap_blocks)
    copy_blocks = staticmethod(copy_blocks)

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"  # the name that engines expect

    @staticmethod
    def get_metadata_cls() -> type[MLACommonMetadata]:
        return MLACommonMetadata

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> MLACommonMetadata:
        """Metadata with these fields, by the constructor of `get_metadata_cls`."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return MLACommonMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[MLACommonState]:
        return MLACommonState

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
        """[num_blocks, block_size, head_size]. Raises ValueError for other than one head of 576 values."""
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}, expected 1: all heads share a row")
        check_head_size("head_size", head_size)
        return num_blocks, block_size, head_size

    @staticmethod
    def get_supported_head_sizes() -> Sequence[int]:
        return list(SUPPORTED_HEAD_SIZES)


def _refuse_encoder(is_encoder_decoder_model: bool) -> None:
    if is_encoder_decoder_model:
        raise ValueError("is_encoder_decoder_model: got True, expected False: there is no cross attention here")
