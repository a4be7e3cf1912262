"""One step of a sparse attention layer of a DeepSeek V4 class model on one of several ranks.

The layer's compressed rows are sharded; the few window rows and the indexer's keys are replicated on every rank. In
decodes and prefills, each rank attends to its compressed rows and to its part of the window.
"""

from __future__ import annotations

from typing import Any

from ..arrays import dlpack, streams
from ..dispatch.values import check_kind
from ..kernels.types.metadata import C128A_RATIO
from ..layers.sparse import Observer, SparseMLALayer, not_observed
from ..layout import CacheLayout
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..ops.shards import localise_indices
from ..ops.sparse_attention import V_DIM
from ..ops.sparse_cache import quantize_and_insert_k_cache
from .communicator import Communicator
from .context import ContextAttention, local_window
from .rank_rows import ShardedCompressedCache
from .validation import check_sparse_step


class ShardedSparseMLALayer:
    """`SparseMLALayer` of one rank: the same step, over the rank's part of the compressed rows.

    Args:
        layer: of any ratio
        comm: the rank's communicator
        split_heads: whether q has the rank's own heads only
    """

    def __init__(
        self, layer: SparseMLALayer, comm: Communicator, *, split_heads: bool = False, backend: str | None = None
    ) -> None:
        check_kind(SparseMLALayer, layer=layer)
        self.layer, self.comm, self.backend = layer, comm, backend
        self._attention = ContextAttention(comm, split_heads=split_heads, backend=backend)

    def step(
        self,
        q: Any,
        k: Any,
        swa_cache: Any,
        metadata: DeepseekSparseSWAMetadata,
        compressed: ShardedCompressedCache | None = None,
        *,
        out: Any = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert this step's rows and attend.

        Args:
            q: [num_tokens, h, 512] bfloat16, RoPE applied; on the host also float32, without k
            k: [num_tokens, 512] bfloat16, RoPE applied; None: the cache contains the rows already
            swa_cache: the window cache, replicated on every rank
            metadata: of the step's batch, the same on every rank
            compressed: for a layer with compressed rows, else None
            out: [num_tokens, h, 512] to write instead of allocating
            observe: called with an op's name around each op ("insert", "map", "decode", "prefill", "exchange", "merge")

        Returns out, of the rank's own heads with split_heads. Rows of padding tokens are not defined.
        Raises TypeError or ValueError, before anything is written or sent, for an argument that does not fit.
        """
        layer = self.layer
        check_sparse_step(
            layer, self.comm, self._attention.split_heads, q, k, swa_cache, metadata, compressed, out, self.backend
        )
        framework, native = dlpack.framework_of(q), dlpack.borrow(q, "q")
        result = None if out is None else dlpack.borrow(out, "out", writable=True)
        with streams.callers(native, framework, stream):
            if result is None:
                result = dlpack.empty((*native.shape[:2], V_DIM), native.dtype, native)
            with observe("insert"):
                self._insert(k, swa_cache, layer.layout, metadata.slot_mapping, metadata.block_size)
                if compressed is not None:
                    cache, layout = compressed.cache, layer.compressed_layout
                    self._insert(compressed.k, cache, layout, compressed.slot_mapping, cache.shape[1])
            decodes = metadata.num_decode_tokens
            used = decodes + metadata.num_prefill_tokens
            for kind, tokens, indices, lens in (
                ("decode", slice(0, decodes), metadata.decode_swa_indices, metadata.decode_swa_lens),
                ("prefill", slice(decodes, used), metadata.prefill_swa_indices, metadata.prefill_swa_lens),
            ):
                if tokens.start < tokens.stop:
                    self._attend(kind, native, tokens, swa_cache, indices, lens, metadata, compressed, result, observe)
        return dlpack.give(result, framework) if out is None else out

    def _insert(self, k: Any, cache: Any, layout: CacheLayout, slot_mapping: Any, block_size: int) -> None:
        if k is None:
            return
        k = dlpack.borrow(k, "k")
        slots = dlpack.borrow(slot_mapping, "slot_mapping")[: len(k)]
        quantize_and_insert_k_cache(k, cache, slots, block_size, layout=layout, backend=self.backend)

    def _attend(
        self,
        kind: str,
        q: Any,
        tokens: slice,
        swa_cache: Any,
        swa_indices: Any,
        swa_lens: Any,
        metadata: DeepseekSparseSWAMetadata,
        compressed: ShardedCompressedCache | None,
        out: Any,
        observe: Observer,
    ) -> None:
        count = tokens.stop - tokens.start
        comm, extra = self.comm, {}
        with observe("map"):
            window, lens = (dlpack.borrow(x, "swa")[:count] for x in (swa_indices, swa_lens))
            window, lens = local_window(window, lens, comm.rank, comm.size, backend=self.backend)
            if compressed is not None:
                slots, counts = localise_indices(
                    self._selected(compressed, tokens, metadata), self._of(metadata.token_to_req_indices, tokens),
                    compressed.block_table, compressed.cache.shape[1], compressed.shard,
                    self._of(metadata.is_valid_token, tokens), backend=self.backend,
                )  # fmt: skip
                extra = {
                    "extra_k_cache": compressed.cache, "extra_indices": slots, "extra_topk_length": counts,
                    "extra_layout": self.layer.compressed_layout,
                }  # fmt: skip
        self._attention.observe = lambda part: observe(kind if part == "attend" else part)
        self._attention.sparse_decode(
            q[tokens], swa_cache, window, lens, **extra, attn_sink=self.layer.attn_sink,
            softmax_scale=self.layer.softmax_scale, layout=self.layer.layout, block_size=metadata.block_size,
            batch_invariant=self.layer.batch_invariant, out=out[tokens],
        )  # fmt: skip

    def _selected(self, compressed: ShardedCompressedCache, tokens: slice, metadata: DeepseekSparseSWAMetadata) -> Any:
        """Compressed rows that these tokens attend to, counted over all ranks; incomplete rows are absent."""
        positions = self._of(metadata.positions, tokens)
        xp, ratio = dlpack.namespace_of(positions), self.layer.compress_ratio
        complete = ((positions + 1) // ratio)[:, None]
        if ratio == C128A_RATIO:
            width = metadata.c128a_global_decode_topk_indices.shape[-1]  # depends on the step's longest sequence
            rows = xp.arange(width, dtype=positions.dtype)[None]
        else:
            rows = self._of(compressed.topk_indices, tokens)
        return xp.where(rows < complete, rows, -1).astype("int32")

    def _of(self, per_token: Any, tokens: slice) -> Any:
        return dlpack.borrow(per_token, "per_token")[tokens]
