"""A context sharded across ranks: the tokens of a rank, and the merge of all ranks' partial results.

`Shard` describes how tokens are sharded. All functions compute on the arrays' device and read no values on the host:
they can be captured in a CUDA graph if they get their outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array import Array
from ..dispatch.call import BOOL, FLOAT32, FLOATS, INT32, Call
from ..dispatch.values import check_integers, check_kind, plain_integers, shown
from ..kernels.types.shard import Shard, ShardedIndices, ShardedSlots
from .indices import pair, per_token, request_arrays
from .sparse_attention import checked_sink

SLOT_MAPPING = (np.dtype(np.int64),)
MAX_RANKS = 1 << 16


def check_shard(shard: Any, name: str = "shard") -> Shard:
    """Raises TypeError unless it is a Shard, ValueError for an impossible rank, size or interleave."""
    check_kind(Shard, **{name: shard})
    numbers = {f"{name}.{field}": value for field, value in shard._asdict().items()}
    check_integers(0, MAX_RANKS, **{f"{name}.rank": numbers[f"{name}.rank"]})
    check_integers(1, MAX_RANKS, **{f"{name}.size": numbers[f"{name}.size"]})
    check_integers(1, **{f"{name}.interleave": numbers[f"{name}.interleave"]})
    if shard.rank >= shard.size:
        raise ValueError(f"{name}.rank: got {shown(shard.rank)}, expected 0 to {shard.size - 1}")
    return Shard(*(int(value) for value in shard))


@plain_integers
def local_seq_lens(
    seq_lens: Array,
    shard: Shard,
    *,
    s_q: int = 1,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """The number of the rank's tokens that each query sees.

    Args:
        seq_lens: [R] int32, tokens of each request, its queries' own included
        shard: how tokens are sharded across ranks
        s_q: queries of each request: query i sees all tokens except the last s_q - 1 - i
        out: [R * s_q] int32 to write instead of allocating

    Returns out, the queries of a request in order: cache_seqlens for a `dense_mla_decode` in which each query is a
    separate request. Each query has its own count because counts of consecutive queries need not differ by one.
    Source: vLLM get_dcp_local_seq_lens.
    """
    check_integers(1, s_q=s_q)
    shard = check_shard(shard)
    call = Call(backend, stream)
    seq_lens = call.array("seq_lens", seq_lens, INT32, ("R",))
    out_array = call.output("out", out, INT32, (len(seq_lens) * s_q,))
    if out_array.size:
        with call.kernels("shards") as kernels:
            kernels.local_seq_lens(seq_lens, s_q, shard, out_array)
    return call.results()


@plain_integers
def local_block_table(
    block_table: Array,
    shard: Shard | None = None,
    *,
    s_q: int = 1,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """The rank's columns of a block table of whole sequences with sharded pages; a row for each query.

    Args:
        block_table: [R, B] int32, pages of each request in the order of its tokens: column c is a page of rank c %
            size, numbered in that rank's cache
        shard: with the block size as its interleave; None: the table already has only the rank's columns
        s_q: queries of each request; each query gets a row
        out: [R * s_q, C] int32 to write instead of allocating; columns that the table lacks are -1

    Returns out. An allocated out has ceil((B - rank) / size) columns.
    """
    check_integers(1, s_q=s_q)
    rank, size = (0, 1) if shard is None else check_shard(shard)[:2]
    call = Call(backend, stream)
    block_table = call.array("block_table", block_table, INT32, ("R", "B"))
    rows, columns = block_table.shape
    width = max(0, -(-(columns - rank) // size)) if out is None else -1
    out_array = call.output("out", out, INT32, (rows * s_q, width))
    if out_array.size:
        with call.kernels("shards") as kernels:
            kernels.local_block_table(block_table, s_q, rank, size, out_array)
    return call.results()


@plain_integers
def local_slot_mapping(
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Array,
    block_size: int,
    shard: Shard,
    *,
    num_tokens: int,
    compress_ratio: int = 1,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """The slots to which the rank writes the rows of a step's tokens; -1 for rows of other ranks.

    Args:
        query_start_loc: [R + 1] int32, the tokens of request i are [query_start_loc[i], query_start_loc[i + 1])
        seq_lens: [R] int32, tokens of each request, the step's included
        block_table: [R, B] int32, the rank's pages of each request
        block_size: rows of a page
        shard: how rows are sharded across ranks
        num_tokens: tokens of the step; a token without a request gets -1
        compress_ratio: tokens of a row: a row is written with its last token, the others get -1
        out: [num_tokens] int64 to write instead of allocating

    Returns out, for the functions that insert into caches.
    """
    check_integers(1, block_size=block_size, compress_ratio=compress_ratio)
    check_integers(0, num_tokens=num_tokens)
    shard = check_shard(shard)
    call = Call(backend, stream)
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    block_table = call.array("block_table", block_table, INT32, ("R", "B"))
    out_array = call.output("out", out, SLOT_MAPPING, (num_tokens,))
    if num_tokens:
        with call.kernels("shards") as kernels:
            kernels.local_slot_mapping(
                ShardedSlots(query_start_loc, seq_lens, block_table, block_size, compress_ratio, shard, out_array)
            )
    return call.results()


@plain_integers
def localise_indices(
    indices: Array,
    token_to_req_indices: Array,
    block_table: Array,
    block_size: int,
    shard: Shard,
    is_valid_token: Array | None = None,
    *,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """The rank's part of the rows that each token selected, as slots of the rank's cache.

    Args:
        indices: [T, K] int32 rows of the token's request, counted over all ranks; -1: none
        token_to_req_indices: [>= T] int32
        block_table: [R, B] int32, the rank's pages of each request
        block_size: rows of a page
        shard: how rows are sharded across ranks
        is_valid_token: [>= T] bool: a padding token (False) gets a length of 0. None: no token is padding
        out: (slots, lens) to write instead of allocating

    Returns slots [T, K] int32, the rank's rows in the order of `indices` and then -1, and lens [T] int32. Rows of other
    ranks, and rows that the table lacks, are left out.
    """
    check_integers(1, block_size=block_size)
    shard = check_shard(shard)
    call = Call(backend, stream)
    indices = call.array("indices", indices, INT32, ("T", "K"))
    tokens = len(indices)
    token_to_req = per_token(call, "token_to_req_indices", token_to_req_indices, INT32, tokens)
    valid = None if is_valid_token is None else per_token(call, "is_valid_token", is_valid_token, BOOL, tokens)
    block_table = call.array("block_table", block_table, INT32, ("R", "B"))
    outputs = pair("out", out, "(slots, lens)")
    slots = call.output("out[0] (slots)", outputs[0], INT32, indices.shape)
    lens = call.output("out[1] (lens)", outputs[1], INT32, (tokens,))
    if tokens:
        with call.kernels("shards") as kernels:
            kernels.localise_indices(
                ShardedIndices(indices, token_to_req, valid, block_table, block_size, shard, slots, lens)
            )
    return call.results()


@plain_integers
def merge_partials(
    parts: Array,
    lses: Array,
    attn_sink: Array | None = None,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge the partial attention results of n ranks, each over its own keys, by their LSE.

    Args:
        parts: [n, b, s_q, h, d] bfloat16, float16 or float32: results without a sink; last axis contiguous
        lses: [n, b, h, s_q] float32, any strides: natural logarithm of the sum of weights; -inf or +inf: no key was
            attended, and the part's values are ignored
        attn_sink: [h] float32: a logit that takes part in the softmax and has no value; None: no sink
        out: [b, s_q, h, d] of parts' dtype to write instead of allocating
        lse: [b, h, s_q] float32 to write instead of allocating

    Returns out and lse; lse is without the sink, as in `sparse_mla_decode`. A query without keys gets out 0 and lse
    +inf.
    """
    call = Call(backend, stream)
    parts = call.array("parts", parts, FLOATS, ("n", "b", "s_q", "h", "d"))
    lses = call.borrow("lses", lses).native
    if lses.dtype not in FLOAT32:
        raise TypeError(f"lses: got dtype {lses.dtype}, expected float32")
    call.check_shape("lses", lses.shape, ("n", "b", "h", "s_q"))
    if not len(parts):
        raise ValueError("parts: got results of 0 ranks, expected at least one")
    attn_sink = checked_sink(call, attn_sink)
    _, batch, s_q, heads, dim = parts.shape
    out_array = call.output("out", out, (parts.dtype,), (batch, s_q, heads, dim))
    lse_array = call.output("lse", lse, FLOAT32, (batch, heads, s_q))
    if lse_array.size:
        with call.kernels("shards") as kernels:
            kernels.merge_partials(parts, lses, attn_sink, out_array, lse_array)
    return call.results()
