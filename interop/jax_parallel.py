"""`cumla.parallel` inside jax.shard_map, with XLA's collectives, on CPUs and GPUs.

    import cumla.interop.jax_parallel as parallel

    @functools.partial(jax.jit)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("cp"), P("cp"), P("cp")), out_specs=P(),
                       check_vma=False)
    def attend(q, cache, block_table, lens):
        out, lse = parallel.dense_decode("cp", q, cache, block_table, lens)
        return out

The ranks are an axis of the mesh; a rank's cache, table and lengths are its part along that axis. The step is one
compiled program: XLA orders its collectives, and captures it on GPUs as any other program. Results that are replicated
need check_vma=False, because JAX cannot know that all ranks' results are equal.

Shapes are one rank's, as inside of shard_map: T queries, h heads, d values of a query. Errors for shapes and dtypes are
raised when a function is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.array import Array
from ..dispatch.values import check_flags, check_integers
from ..kernels.types.shard import Shard
from ..parallel.context import is_merged_by_heads
from ..specs import SPECS
from ..specs.spec import shape
from .jax import _traceable, dense_mla_decode, sparse_mla_decode
from .jax_arguments import array_of
from .ops import Op

merge_partials, _localise = (_traceable(Op.of(SPECS[name])) for name in ("merge_partials", "localise_indices"))


@dataclass(frozen=True)
class AxisCommunicator:
    """A Communicator of the ranks along an axis of the mesh, for arrays inside shard_map.

    Attributes:
        axis: the axis' name

    The collectives take an array, or a tuple of arrays, and return new arrays: all_gather [...] -> [size, ...],
    reduce_scatter [size, ...] -> [...], all_to_all [size, ...] -> [size, ...]. There is no `out`; `stream` is XLA's.
    """

    axis: str

    @property
    def rank(self) -> Any:
        """A traced integer, because all ranks run the same program."""
        return lax.axis_index(self.axis)

    @property
    def size(self) -> int:
        return int(lax.axis_size(self.axis))

    def all_gather(self, x: Any, out: None = None, stream: None = None) -> Any:
        return jax.tree.map(lambda part: lax.all_gather(part, self.axis), x)

    def reduce_scatter(self, x: Any, out: None = None, stream: None = None) -> Any:
        return jax.tree.map(lambda part: lax.psum_scatter(part, self.axis), x)

    def all_to_all(self, x: Any, out: None = None, stream: None = None) -> Any:
        return jax.tree.map(lambda part: lax.all_to_all(part, self.axis, 0, 0, tiled=True), x)


def dense_decode(
    axis: str,
    q: Array,
    k_cache: Array,
    block_table: Array,
    cache_seqlens: Array,
    *,
    attn_sink: Array | None = None,
    split_heads: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """`dense_mla_decode` over the tokens of all ranks along an axis.

    Args:
        axis: the axis' name
        q: [T, h, 576], the same on every rank; with split_heads the rank's own heads, in the order of ranks
        k_cache: [num_blocks, block_size, 576], the rank's cache
        block_table: [>= T, B] int32, for each query the rank's pages
        cache_seqlens: [>= T] int32, number of the rank's tokens that each query sees (`local_seq_lens`)
        attn_sink: [h] float32, of the heads of q, or None
        split_heads: whether q has the rank's own heads only
        options: scale, softmax_scale and max_seqlen (of the rank's tokens) as in dense_mla_decode

    Returns out [T, h, 512] of q's dtype and lse [T, h] float32, of the heads of q.
    """
    q, attn_sink = _queries(q, attn_sink, split_heads)

    def attend(q: Any) -> tuple[Any, Any]:
        return dense_mla_decode(q[:, None], k_cache, block_table, cache_seqlens, **options)

    return _decode(AxisCommunicator(axis), attend, q, attn_sink, split_heads)


def sparse_decode(
    axis: str,
    q: Array,
    k_cache: Array,
    indices: Array,
    topk_length: Array | None = None,
    *,
    extra_indices: Array | None = None,
    attn_sink: Array | None = None,
    split_heads: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """`sparse_mla_decode` over the rows of all ranks along an axis.

    Args:
        axis: the axis' name
        q: [T, h, d], the same on every rank; with split_heads the rank's own heads, in the order of ranks
        k_cache: the rank's cache, as sparse_mla_decode takes it
        indices: [T, topk] int32, the rank's part of the rows that each query attends to, as slots of its cache
            (`localise_indices`)
        topk_length: [T] int32, or None
        extra_indices: [T, extra_topk] int32, of extra_k_cache, or None
        attn_sink: [h] float32, of the heads of q, or None
        split_heads: whether q has the rank's own heads only
        options: layout, block_size, softmax_scale, batch_invariant, extra_k_cache, extra_topk_length ([T] int32),
            extra_block_size and extra_layout as in sparse_mla_decode

    Returns out [T, h, 512] of q's dtype and lse [T, h] float32, of the heads of q.
    """
    q, attn_sink = _queries(q, attn_sink, split_heads)
    indices = _array("indices", indices, "T", "topk")
    if extra_indices is not None:
        options["extra_indices"] = _array("extra_indices", extra_indices, "T", "extra_topk")[:, None]

    def attend(q: Any) -> tuple[Any, Any]:
        return sparse_mla_decode(q[:, None], k_cache, indices[:, None], topk_length=topk_length, **options)

    return _decode(AxisCommunicator(axis), attend, q, attn_sink, split_heads)


def _array(name: str, value: Any, *axes: str) -> Any:
    """`value` as an array of JAX with these axes. Raises as `jax_arguments.array_of`, and ValueError for other axes."""
    array = array_of(name, value)
    shape({name: array}, name, *axes)
    return array


def _queries(q: Any, attn_sink: Any, split_heads: Any) -> tuple[Any, Any]:
    """q [T, h, d] and its sink [h] or None. Raises TypeError or ValueError."""
    check_flags(split_heads=split_heads)
    q = _array("q", q, "T", "h", "d")
    if attn_sink is not None:
        attn_sink = array_of("attn_sink", attn_sink)
        if attn_sink.shape != q.shape[1:2]:
            raise ValueError(f"attn_sink: got shape {attn_sink.shape}, expected [h] with h = {q.shape[1]}")
    return q, attn_sink


def _decode(
    comm: AxisCommunicator, attend: Callable[[Any], tuple[Any, Any]], q: Any, attn_sink: Any, split_heads: bool
) -> tuple[Any, Any]:
    size = comm.size
    if split_heads:
        q = comm.all_gather(q.transpose(1, 0, 2)).reshape(-1, q.shape[0], q.shape[2]).transpose(1, 0, 2)
    out, lse = attend(q)
    out, lse = out[:, 0], lse[..., 0]
    tokens, heads, _ = out.shape
    if not (split_heads or is_merged_by_heads(size, heads, out.nbytes)):
        parts, lses = comm.all_gather((out, lse))
        return _merge(parts, lses, attn_sink)
    own = heads // size
    parts, lses = comm.all_to_all(
        (out.transpose(1, 0, 2).reshape(size, own, tokens, -1), lse.T.reshape(size, own, tokens))
    )
    if attn_sink is not None and not split_heads:
        attn_sink = lax.dynamic_slice(attn_sink, (comm.rank * own,), (own,))
    out, lse = _merge(parts.transpose(0, 2, 1, 3), lses.transpose(0, 2, 1), attn_sink)
    if split_heads:
        return out, lse
    out, lse = comm.all_gather((out.transpose(1, 0, 2), lse.T))
    return out.reshape(heads, tokens, -1).transpose(1, 0, 2), lse.reshape(heads, tokens).T


def _merge(parts: Any, lses: Any, attn_sink: Any) -> tuple[Any, Any]:
    """parts [n, T, h, 512], lses [n, T, h] -> out [T, h, 512], lse [T, h]."""
    out, lse = merge_partials(parts[:, :, None], lses[..., None], attn_sink)
    return out[:, 0], lse[..., 0]


def local_seq_lens(axis: str, seq_lens: Array, *, interleave: int = 1, s_q: int = 1) -> Any:
    """The number of the rank's tokens that each query sees.

    Args:
        axis: the axis' name
        seq_lens: [R] int32, tokens of each request, its queries' own included
        interleave: consecutive tokens on the same rank
        s_q: queries of each request: query i sees all tokens except the last s_q - 1 - i

    Returns [R * s_q] int32, the queries of a request in order. XLA fuses this arithmetic.
    """
    check_integers(1, interleave=interleave, s_q=s_q)
    seq_lens = _array("seq_lens", seq_lens, "R")
    if seq_lens.dtype != jnp.int32:
        raise TypeError(f"seq_lens: got dtype {seq_lens.dtype}, expected int32")
    comm = AxisCommunicator(axis)
    lens = jnp.maximum(seq_lens[:, None] - s_q + 1 + jnp.arange(s_q, dtype=seq_lens.dtype), 0).reshape(-1)
    rounds, rest = lens // (comm.size * interleave), lens % (comm.size * interleave)
    return rounds * interleave + jnp.clip(rest - comm.rank.astype(lens.dtype) * interleave, 0, interleave)


def localise_indices(
    axis: str,
    indices: Array,
    token_to_req_indices: Array,
    block_table: Array,
    block_size: int,
    *,
    interleave: int = 1,
    is_valid_token: Array | None = None,
) -> tuple[Any, Any]:
    """The rank's part of the rows that each token selected, as slots of the rank's cache.

    Args:
        axis: the axis' name
        indices: [T, K] int32 rows of the token's request, counted over all ranks; -1: none
        token_to_req_indices: [>= T] int32
        block_table: [R, B] int32, the rank's pages of each request
        block_size: rows of a page
        interleave: consecutive rows on the same rank
        is_valid_token: [>= T] bool: a padding token (False) gets a length of 0. None: no token is padding

    Returns slots [T, K] int32, the rank's rows in the order of `indices` and then -1, and lens [T] int32.
    """
    comm = AxisCommunicator(axis)
    arguments = {"indices": indices, "token_to_req_indices": token_to_req_indices, "block_table": block_table}
    if is_valid_token is not None:
        arguments["is_valid_token"] = is_valid_token
    arrays = [array_of(name, value) for name, value in arguments.items()]

    def on(rank: int, indices: Any, token_to_req: Any, table: Any, *valid: Any) -> Any:
        return _localise(indices, token_to_req, table, block_size, Shard(rank, comm.size, interleave), *valid)

    ranks = [functools.partial(on, rank) for rank in range(comm.size)]
    return lax.switch(comm.rank, ranks, *arrays)
