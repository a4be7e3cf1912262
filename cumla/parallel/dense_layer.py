"""One step of a dense MLA layer on one of several ranks: latent rows are sharded, tokens attend to all ranks' rows.

Prefills take the decode path, in the latent space: each token has its own count of the rank's rows, including new rows.
Prefills then need no gather, but read 576 values a key and head where projected keys have 192.
"""

from __future__ import annotations

from typing import Any

from ..arrays import dlpack, streams
from ..dispatch.values import check_kind
from ..layers.dense import MLACommonImpl, Observer, not_observed
from ..layers.products import batched_product, bits_of
from ..ops.dense_cache import concat_and_cache_mla
from .communicator import Communicator
from .context import ContextAttention
from .validation import check_dense_forward


class ShardedMLALayer:
    """`MLACommonImpl` of one rank: it has the heads of its weights, and the cache has the rank's part of the rows.

    Args:
        layer: after process_weights_after_loading
        comm: the rank's communicator
        split_heads: whether the layer and q have the rank's own heads only
    """

    def __init__(self, layer: MLACommonImpl, comm: Communicator, *, split_heads: bool = False) -> None:
        check_kind(MLACommonImpl, layer=layer)
        self.layer, self.comm = layer, comm
        self._attention = ContextAttention(comm, split_heads=split_heads, backend=layer.backend)

    def forward(
        self,
        q: Any,
        k_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        slot_mapping: Any,
        output: Any = None,
        *,
        k_scale: Any = None,
        max_seqlen: int | None = None,
        stream: Any = None,
        observe: Observer = not_observed,
    ) -> Any:
        """Insert a step's rows and attend.

        Args:
            q: [T, num_heads, P + 64] bfloat16 or float16, RoPE applied to the last 64 of each head
            k_c_normed: [T, 512] of q's dtype
            k_pe: [T, 64] of q's dtype, RoPE applied
            kv_cache: [num_blocks, block_size, 576], the rank's, written
            block_table: [T, B] int32, for each token the rank's pages of its request
            cache_seqlens: [T] int32, the rank's rows that each token sees (`local_seq_lens` of its position + 1)
            slot_mapping: [T] int64 in the rank's cache, -1 for rows of other ranks (`local_slot_mapping`)
            output: [T, num_heads * V] of q's dtype to write instead of allocating
            k_scale: of an FP8 cache, as in MLACommonImpl
            max_seqlen: an upper bound of cache_seqlens known on the host
            observe: called with an op's name around each op ("insert", "absorb", "decode", "exchange", "merge")

        Returns output.
        Raises TypeError or ValueError, before anything is written or sent, for an argument that does not fit.
        """
        layer = self.layer
        check_dense_forward(
            layer, self.comm, self._attention.split_heads, q, k_c_normed, k_pe, kv_cache, block_table, cache_seqlens,
            slot_mapping, output, k_scale, max_seqlen,
        )  # fmt: skip
        framework, q = dlpack.framework_of(q), dlpack.borrow(q, "q")
        shape = (len(q), layer.num_heads, layer.qk_head_dim)
        with streams.callers(q, framework, stream):
            size = (len(q), layer.num_heads * layer.v_head_dim)
            result = dlpack.empty(size, q.dtype, q) if output is None else dlpack.borrow(output, "output", True)
            with observe("insert"):
                concat_and_cache_mla(
                    k_c_normed, k_pe, kv_cache, slot_mapping, layer.kv_cache_dtype, k_scale, backend=layer.backend
                )
            nope, rank = layer.qk_nope_head_dim, layer.kv_lora_rank
            latent_q = layer.workspace.shaped("latent_q", (*shape[:2], layer.head_size), q.dtype, q)
            latent_out = layer.workspace.shaped("latent_out", (*shape[:2], rank), q.dtype, q)
            with observe("absorb"):
                self._product(q[..., :nope].transpose(1, 0, 2), layer.W_UK_T, latent_q[..., :rank].transpose(1, 0, 2))
                bits_of(latent_q)[..., rank:] = bits_of(q)[..., nope:]
            self._attention.observe = lambda part: observe("decode" if part == "attend" else part)
            self._attention.dense_decode(
                latent_q, kv_cache, block_table, cache_seqlens, scale=k_scale, softmax_scale=layer.scale,
                batch_invariant=layer.batch_invariant, max_seqlen=max_seqlen, out=latent_out,
            )  # fmt: skip
            heads_out = result.reshape(len(q), layer.num_heads, layer.v_head_dim)
            with observe("absorb"):
                self._product(latent_out.transpose(1, 0, 2), layer.W_UV, heads_out.transpose(1, 0, 2))
        return dlpack.give(result, framework) if output is None else output

    def _product(self, a: Any, b: Any, out: Any) -> None:
        """out = a b, batches of matrices."""
        layer = self.layer
        batched_product(a, b, out, layer.backend, layer.workspace if layer.batch_invariant else None)
