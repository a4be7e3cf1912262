"""Checks the arguments of a rank's layers before anything is written.

A rank that raises an error here has sent nothing yet; the others get the error in their next call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dispatch.call import BF16, INT32, SLOTS, Call, without_middle_axis
from ..dispatch.formats import checked_pages
from ..dispatch.values import check_integers, check_kind
from ..kernels.types.metadata import C128A_RATIO
from ..layers.dense import MLACommonImpl
from ..layers.dense_validation import check_cache
from ..layers.sparse import SparseMLALayer
from ..layers.sparse_validation import check_has_c128a, check_inserted, check_rows, check_window_step, tokens_used
from ..metadata.builder import check_current, check_mode
from ..metadata.sparse_swa import DeepseekSparseSWAMetadata
from ..metadata.validation import check_columns, check_pages, check_rows_of_longest, check_window_pages
from ..ops.dense_cache import K_PE_DIM, KV_C_DIM
from ..ops.shards import check_shard
from ..ops.sparse_attention import V_DIM, check_heads
from .communicator import Communicator
from .rank_rows import RankRows, ShardedCompressedCache


def check_rank_shard(
    call: Call, comm: Communicator, name: str, rows: Any, cache_name: str, cache: Any,
    metadata: DeepseekSparseSWAMetadata, ratio: int,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless `rows` locates this rank's part of a step's rows in `cache`.

    Args:
        ratio: positions of a row
    """
    shard = check_shard(rows.shard, f"{name}.shard")
    if (shard.rank, shard.size) != (comm.rank, comm.size):
        raise ValueError(
            f"{name}.shard: got rank {shard.rank} of {shard.size}, expected the communicator's, rank {comm.rank} of "
            f"{comm.size}"
        )
    table = call.array(f"{name}.block_table", rows.block_table, INT32, (-1, -1))
    check_rows(f"{name}.block_table", table, metadata.num_decodes + metadata.num_prefills, "requests")
    rows = shard.local_len(metadata.longest // ratio)
    check_columns(f"{name}.block_table", table, cache.shape[1], rows)
    check_rows_of_longest(cache_name, cache, cache.shape[1], rows)


def check_rank_rows(
    call: Call, comm: Communicator, rows: RankRows, name: str, cache: Any, metadata: DeepseekSparseSWAMetadata,
    ratio: int,
) -> None:  # fmt: skip
    """`check_rank_shard` for a model layer, which writes the rows of a step's tokens, padding included."""
    check_rank_shard(call, comm, "rows", rows, name, cache, metadata, ratio)
    tokens = len(metadata.positions)
    slots = call.array("rows.slot_mapping", rows.slot_mapping, SLOTS, (-1,))
    check_rows("rows.slot_mapping", slots, tokens_used(metadata), "tokens")
    if len(slots) > tokens:
        raise ValueError(f"rows.slot_mapping: got {len(slots)} slots, expected at most the step's {tokens} tokens")


def check_sparse_step(
    layer: SparseMLALayer,
    comm: Communicator,
    split_heads: bool,
    q: Any,
    k: Any,
    swa_cache: Any,
    metadata: Any,
    compressed: ShardedCompressedCache | None,
    out: Any,
    backend: str | None,
) -> None:
    """Check the arguments of `ShardedSparseMLALayer.step`."""
    check_kind(DeepseekSparseSWAMetadata, metadata=metadata)
    check_current("metadata", metadata)
    check_mode("metadata", metadata.config.batch_invariant, layer.batch_invariant)
    ratio = layer.compress_ratio
    has_rows = metadata.config.has_compressed_rows(ratio)
    if has_rows != (compressed is not None):
        got, expected = ("None", "rows") if compressed is None else ("rows", "None")
        raise ValueError(f"compressed: got {got}, expected {expected} at compress_ratio {ratio}")
    check_window_pages("swa_cache", swa_cache, metadata.longest)
    call, used = Call(backend), tokens_used(metadata)
    q = check_window_step(call, layer, q, k, swa_cache, metadata, used, comm.size if split_heads else 1)
    call.optional("out", out, (q.dtype,), (len(q), q.shape[1], V_DIM), writable=True)
    if compressed is None:
        return
    checked_pages(call, "compressed.cache", compressed.cache, layer.compressed_layout)
    check_rank_shard(call, comm, "compressed", compressed, "compressed.cache", compressed.cache, metadata, ratio)
    check_inserted(call, "compressed.k", compressed.k, BF16, V_DIM, compressed.slot_mapping)
    if (compressed.topk_indices is None) != (ratio == C128A_RATIO):
        got, expected = "an array", "None: all rows are taken"
        if compressed.topk_indices is None:
            got, expected = "None", "int32 [num_tokens, topk]"
        raise ValueError(f"compressed.topk_indices: got {got}, expected {expected} at compress_ratio {ratio}")
    if ratio == C128A_RATIO:
        check_has_c128a(metadata)
    else:
        selected = call.array("compressed.topk_indices", compressed.topk_indices, INT32, (-1, -1))
        check_rows("compressed.topk_indices", selected, used, "tokens")


def check_dense_forward(
    layer: MLACommonImpl,
    comm: Communicator,
    split_heads: bool,
    q: Any,
    k_c_normed: Any,
    k_pe: Any,
    kv_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    slot_mapping: Any,
    output: Any,
    k_scale: Any,
    max_seqlen: Any,
) -> None:
    """Check the arguments of `ShardedMLALayer.forward`."""
    if not hasattr(layer, "W_UV"):
        raise ValueError("layer: not processed, expected process_weights_after_loading to be called first")
    call = Call(layer.backend)
    same = (np.dtype(layer.W_UV.dtype),)
    tokens = len(call.array("q", q, same, (-1, layer.num_heads, layer.qk_head_dim)))
    check_heads(layer.num_heads * (comm.size if split_heads else 1))
    call.check_place("layer", layer.W_UV)
    call.array("k_c_normed", k_c_normed, same, (tokens, KV_C_DIM))
    call.checked(without_middle_axis(call.borrow("k_pe", k_pe)), same, (tokens, K_PE_DIM))
    check_cache(call, layer, kv_cache, same[0], k_scale)
    check_pages("kv_cache", call.borrow("kv_cache", kv_cache).native, min(tokens, 1), "the tokens of a step")
    for name, value, shape in (("block_table", block_table, (-1, -1)), ("cache_seqlens", cache_seqlens, (-1,))):
        array = call.array(name, value, INT32, shape)
        if len(array) < tokens:
            raise ValueError(f"{name}: got {len(array)} rows, expected at least {tokens}, one a token of q")
    slots = call.array("slot_mapping", slot_mapping, SLOTS, (-1,))
    if len(slots) > tokens:
        raise ValueError(f"slot_mapping: got {len(slots)} slots, expected at most {tokens}, one a token of q")
    call.optional("output", output, same, (tokens, layer.num_heads * layer.v_head_dim), writable=True)
    if max_seqlen is not None:
        check_integers(0, max_seqlen=max_seqlen)
