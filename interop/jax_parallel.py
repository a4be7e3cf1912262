"""`cumla.parallel` inside jax.shard_map, with XLA's collectives, on CPUs and GPUs.

    import cumla.interop.jax_parallel as parallel

    @functools.partial(jax.jit)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("cp"), P("cp"), P("cp")), out_specs=P(),
                       check_vma=False)
    def attend(q, cache, block_table, lens):
        out, lse = parallel.dense_decode("cp", q, cache, block_table, lens)
        return out

The ranks are an axis of the mesh; a rank's cache, table and lengths are its part along that axis. The step is one
compiled program: XLA orders its collectives, and captures it on GPUs as any other program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.types.shard import Shard
from ..ops import shards
from ..parallel.context import is_merged_by_heads
from .jax import _traceable, dense_mla_decode, sparse_mla_decode
from .ops import Op, Result, shape


def merged_results(arguments: Any) -> tuple[Result, ...]:
    _, batch, s_q, heads, dim = shape(arguments, "parts", "n", "b", "s_q", "h", "d")
    return Result((batch, s_q, heads, dim), str(arguments["parts"].dtype)), Result((batch, heads, s_q), "float32")


def localised_results(arguments: Any) -> tuple[Result, ...]:
    tokens, width = shape(arguments, "indices", "T", "K")
    return Result((tokens, width), "int32"), Result((tokens,), "int32")


merge_partials = _traceable(Op(shards.merge_partials, results=merged_results, outputs=("out", "lse")))
_localise = _traceable(Op(shards.localise_indices, results=localised_results, outputs=("out",)))


@dataclass(frozen=True)
class AxisCommunicator:
    """A Communicator of the ranks along an axis of the mesh, for arrays inside shard_map. It writes nothing in place:
    there is no `out`, and `stream` is XLA's."""

    axis: str

    @property
    def rank(self) -> Any:
        """A traced integer, as all ranks run the same program."""
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
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    *,
    attn_sink: Any = None,
    split_heads: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """`ContextAttention.dense_decode` of `cumla.parallel`, of the ranks along `axis`."""

    def attend(q: Any) -> tuple[Any, Any]:
        return dense_mla_decode(q[:, None], k_cache, block_table, cache_seqlens, **options)

    return _decode(AxisCommunicator(axis), attend, q, attn_sink, split_heads)


def sparse_decode(
    axis: str,
    q: Any,
    k_cache: Any,
    indices: Any,
    topk_length: Any = None,
    *,
    extra_indices: Any = None,
    attn_sink: Any = None,
    split_heads: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """`ContextAttention.sparse_decode` of `cumla.parallel`, of the ranks along `axis`."""
    if extra_indices is not None:
        options["extra_indices"] = extra_indices[:, None]

    def attend(q: Any) -> tuple[Any, Any]:
        return sparse_mla_decode(q[:, None], k_cache, indices[:, None], topk_length=topk_length, **options)

    return _decode(AxisCommunicator(axis), attend, q, attn_sink, split_heads)


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


def local_seq_lens(axis: str, seq_lens: Any, *, interleave: int = 1, s_q: int = 1) -> Any:
    """`cumla.parallel.local_seq_lens` of the rank along `axis`; plain arithmetic, which XLA fuses."""
    comm = AxisCommunicator(axis)
    lens = jnp.maximum(seq_lens[:, None] - s_q + 1 + jnp.arange(s_q, dtype=seq_lens.dtype), 0).reshape(-1)
    rounds, rest = lens // (comm.size * interleave), lens % (comm.size * interleave)
    return rounds * interleave + jnp.clip(rest - comm.rank.astype(lens.dtype) * interleave, 0, interleave)


def localise_indices(
    axis: str,
    indices: Any,
    token_to_req_indices: Any,
    block_table: Any,
    block_size: int,
    *,
    interleave: int = 1,
    is_valid_token: Any = None,
) -> tuple[Any, Any]:
    """`cumla.parallel.localise_indices` of the rank along `axis`."""
    comm = AxisCommunicator(axis)
    arrays = [indices, token_to_req_indices, block_table]
    valid = [] if is_valid_token is None else [is_valid_token]

    def on(rank: int, indices: Any, token_to_req: Any, table: Any, *valid: Any) -> Any:
        return _localise(indices, token_to_req, table, block_size, Shard(rank, comm.size, interleave), *valid)

    ranks = [functools.partial(on, rank) for rank in range(comm.size)]
    return lax.switch(comm.rank, ranks, *arrays, *valid)
