"""Decodes over a context sharded across ranks: each rank attends to its tokens, partial results are merged by LSE.

q has one of two forms. Either every rank has q of all heads and gets `out` of all heads; or the heads are sharded, too,
as by the projections: then q is gathered over heads first, and each rank gets the results of its own heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import capsule, dlpack, streams
from ..dispatch.backends import BACKENDS
from ..dispatch.values import check_choice, check_flags
from ..kernels.types.plan import DecodePlan, DenseDecodePlan, Workspace, aligned_bytes, piece
from ..kernels.types.shard import Shard
from ..layers.sparse import Observer, not_observed
from ..ops.dense_attention import dense_mla_decode
from ..ops.shards import local_seq_lens, merge_partials
from ..ops.sparse_attention import V_DIM, sparse_mla_decode
from .communicator import Communicator, copy

FLOAT32, BYTE = np.dtype(np.float32), np.dtype(np.uint8)
WORTH_A_CALL = 4 << 20  # additional bytes that a rank may send to save one of two exchanges

Attend = Callable[[Any, Any, Any], None]


class ContextAttention:
    """The decode attention of one of several ranks.

    Args:
        comm: the rank's communicator
        split_heads: whether q has the rank's own heads only: h / size heads, ordered by rank
        observe: called with a part's name around each part of a call ("attend", "exchange", "merge")

    The buffers have the same addresses in every call. So a call with out and lse can be captured in a CUDA graph after
    a call with the same shapes (all ranks capture and replay together). An instance serves one stream at a time, and
    may serve all layers of a model.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        split_heads: bool = False,
        backend: str | None = None,
        observe: Observer = not_observed,
    ) -> None:
        check_flags(split_heads=split_heads)
        check_choice((*BACKENDS, None), backend=backend)
        self.comm, self.split_heads, self.backend, self.observe = comm, split_heads, backend, observe
        self._gathered_arrays = Workspace(owner="ContextAttention", allocate=comm.memory)
        self._exchanged_arrays = Workspace(owner="ContextAttention")
        self._dense_plans = {x: DenseDecodePlan(batch_invariant=x) for x in (False, True)}
        self._sparse_plans = {x: DecodePlan(batch_invariant=x) for x in (False, True)}

    def queries(self, tokens: int, heads: int, dim: int, like: Any) -> Any:
        """A buffer [tokens, heads, dim] of `like`'s dtype for q of the rank's own heads. q in this buffer is gathered
        without a copy, any other q is copied first. Later calls return the same memory."""
        native = dlpack.borrow(like, "like")
        memory = self._array("q", (heads, tokens, dim), native.dtype, native)
        return dlpack.give_shared(memory.transpose(1, 0, 2), dlpack.framework_of(like))

    def dense_decode(
        self,
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        *,
        attn_sink: Any | None = None,
        out: Any | None = None,
        lse: Any | None = None,
        plan: DenseDecodePlan | None = None,
        stream: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """`dense_mla_decode` over the tokens of all ranks.

        Args:
            q: [T, h, 576], the same on every rank; or the rank's own heads
            k_cache: the rank's cache
            block_table: [>= T, B] int32, for each query the rank's pages (`local_block_table`)
            cache_seqlens: [>= T] int32, number of the rank's tokens that each query sees (`local_seq_lens`)
            attn_sink: float32, of the heads of the result, or None
            out: [T, h, 512] of q's dtype to write instead of allocating
            lse: [T, h] float32 to write instead of allocating
            plan: as in dense_mla_decode, computed for these lengths; None: computed here
            options: scale, softmax_scale, batch_invariant, max_seqlen (of the rank's tokens) and early_release (for the
                next exchange of a communicator that is not cumla's) as in dense_mla_decode

        Returns out and lse, of the rank's own heads where heads are split.
        """
        if plan is None:
            plan = self._dense_plans[bool(options.get("batch_invariant", False))]
            plan.renew()

        def attend(q: Any, part: Any, part_lse: Any) -> None:
            dense_mla_decode(
                q[:, None], k_cache, block_table, cache_seqlens, out=part[:, None], lse=part_lse[..., None],
                plan=plan, backend=self.backend, **options,
            )  # fmt: skip

        return self._decode(attend, q, attn_sink, out, lse, stream)

    def sparse_decode(
        self,
        q: Any,
        k_cache: Any,
        indices: Any,
        topk_length: Any = None,
        *,
        extra_indices: Any = None,
        attn_sink: Any | None = None,
        out: Any | None = None,
        lse: Any | None = None,
        plan: DecodePlan | None = None,
        stream: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """`sparse_mla_decode` over the rows of all ranks.

        Args:
            q: [T, h, d], the same on every rank; or the rank's own heads
            k_cache: the rank's cache
            indices: [T, topk] int32, the rank's part of the rows that each query attends to, as slots of its cache
                (`localise_indices`; `local_window` for a cache that every rank has)
            topk_length: [T] int32 or None
            extra_indices: [T, extra_topk] int32 or None, of extra_k_cache
            attn_sink: float32, of the heads of the result, or None
            out, lse: as in dense_decode
            plan: as in sparse_mla_decode, computed for these lengths; None: computed here
            options: layout, block_size, softmax_scale, batch_invariant, extra_k_cache, extra_topk_length,
                extra_block_size and extra_layout as in sparse_mla_decode; early_release as in dense_decode

        Returns out [T, h, 512] and lse [T, h], of the rank's own heads where heads are split.
        """
        if extra_indices is not None:
            options["extra_indices"] = of_one_query("extra_indices", extra_indices)
        indices = of_one_query("indices", indices)
        if plan is None:
            plan = self._sparse_plans[bool(options.get("batch_invariant", False))]
            plan.renew()

        def attend(q: Any, part: Any, part_lse: Any) -> None:
            sparse_mla_decode(
                q[:, None], k_cache, indices, topk_length=topk_length,
                out=part[:, None], lse=part_lse[..., None], plan=plan, backend=self.backend, **options,
            )  # fmt: skip

        return self._decode(attend, q, attn_sink, out, lse, stream)

    def _decode(self, attend: Attend, q: Any, attn_sink: Any, out: Any, lse: Any, stream: Any) -> tuple[Any, Any]:
        framework, native = dlpack.framework_of(q), dlpack.borrow(q, "q")
        if native.ndim != 3:
            raise ValueError(f"q: got shape {tuple(native.shape)}, expected [T, h, d]")
        size = self.comm.size
        sink = None if attn_sink is None else dlpack.borrow(attn_sink, "attn_sink")
        if sink is not None and sink.dtype != FLOAT32:
            raise TypeError(f"attn_sink: got dtype {sink.dtype}, expected float32")
        if sink is not None and sink.shape != native.shape[1:2]:
            raise ValueError(f"attn_sink: got shape {tuple(sink.shape)}, expected [h] with h = {native.shape[1]}")
        with streams.callers(native, framework, stream):
            shape = (*native.shape[:2], V_DIM)  # of out
            out_array, lse_array = outputs(native, shape, out, lse)
            if self.split_heads:
                self._by_heads(attend, self._gathered(native), sink, out_array, lse_array)
            elif is_merged_by_heads(size, shape[1], out_array.nbytes):
                self._merge_by_heads(attend, native, sink, out_array, lse_array)
            else:
                self._everything_to_all(attend, native, sink, out_array, lse_array)
        return dlpack.give(out_array, framework) if out is None else out, (
            dlpack.give(lse_array, framework) if lse is None else lse
        )

    def _gathered(self, q: Any) -> Any:
        """q of all ranks' heads, [T, h, d]."""
        by_head = q.transpose(1, 0, 2)
        if not by_head.flags.c_contiguous:
            by_head = self._array("q", by_head.shape, q.dtype, q)
            copy(by_head, q.transpose(1, 0, 2))
        heads, tokens, dim = by_head.shape
        everyones = self._array("all_q", (self.comm.size, heads, tokens, dim), q.dtype, q)
        with self.observe("exchange"):
            self.comm.all_gather(by_head, everyones)
        return everyones.reshape(-1, tokens, dim).transpose(1, 0, 2)

    def _everything_to_all(self, attend: Attend, q: Any, sink: Any, out: Any, lse: Any) -> None:
        """Every rank receives all partial results, and merges all heads."""
        rows, size = math.prod(out.shape[:-1]), self.comm.size
        at_lse = rows * V_DIM * q.dtype.itemsize  # offset in a rank's piece: out, then lse, sent together
        nbytes = aligned_bytes(at_lse + rows * FLOAT32.itemsize)
        memory = self._array("pieces", (size * nbytes,), BYTE, q)

        def pieces(first: int, shape: tuple[int, ...], dtype: Any) -> Any:
            inner = capsule.row_major(shape, dtype.itemsize)
            return piece(memory, first, (size, *shape), dtype, (nbytes, *inner))

        parts, lses = pieces(0, out.shape, q.dtype), pieces(at_lse, out.shape[:-1], FLOAT32)
        with self.observe("attend"):
            attend(q, parts[self.comm.rank], lses[self.comm.rank])
        everyones = memory.reshape(size, nbytes)
        with self.observe("exchange"):
            self.comm.all_gather(everyones[self.comm.rank], everyones)
        self._merge(parts, lses, sink, out, lse)

    def _by_heads(self, attend: Attend, q: Any, sink: Any, out: Any, lse: Any) -> None:
        """Every rank receives the partial results of its own heads and merges them; out and lse have these heads."""
        size = self.comm.size
        tokens, heads, _ = q.shape
        # Heads are the first axis, so that a rank's heads are contiguous.
        part, part_lse = self._arrays(self._exchanged_arrays, "part", (heads, tokens, V_DIM), q)
        with self.observe("attend"):
            attend(q, part.transpose(1, 0, 2), part_lse.T)
        by_rank = (size, heads // size, tokens)
        parts, parts_lse = self._arrays(self._exchanged_arrays, "parts", (*by_rank, V_DIM), q)
        with self.observe("exchange"):
            self.comm.all_to_all((part.reshape(*by_rank, V_DIM), part_lse.reshape(by_rank)), (parts, parts_lse))
        self._merge(parts.transpose(0, 2, 1, 3), parts_lse.transpose(0, 2, 1), sink, out, lse)

    def _merge_by_heads(self, attend: Attend, q: Any, sink: Any, out: Any, lse: Any) -> None:
        """Every rank merges some heads, then all ranks gather them: fewer bytes than sending everything to all."""
        size = self.comm.size
        tokens, heads, _ = q.shape
        own = heads // size
        merged, merged_lse = self._arrays(self._gathered_arrays, "merged", (own, tokens, V_DIM), q)
        own_sink = None if sink is None else sink[self.comm.rank * own : (self.comm.rank + 1) * own]
        self._by_heads(attend, q, own_sink, merged.transpose(1, 0, 2), merged_lse.T)
        everyones, everyones_lse = self._arrays(self._gathered_arrays, "all_merged", (size, own, tokens, V_DIM), q)
        with self.observe("exchange"):
            self.comm.all_gather((merged, merged_lse), (everyones, everyones_lse))
        copy(out, everyones.reshape(heads, tokens, V_DIM).transpose(1, 0, 2))
        copy(lse, everyones_lse.reshape(heads, tokens).T)

    def _merge(self, parts: Any, lses: Any, sink: Any, out: Any, lse: Any) -> None:
        """parts [n, T, h, 512], lses [n, T, h]; out [T, h, 512] and lse [T, h] written."""
        with self.observe("merge"):
            merge_partials(
                parts[:, :, None], lses[..., None], sink, out=out[:, None], lse=lse[..., None], backend=self.backend
            )

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        return self._gathered_arrays.shaped(name, shape, dtype, like)

    @staticmethod
    def _arrays(workspace: Workspace, name: str, shape: tuple[int, ...], like: Any) -> tuple[Any, Any]:
        """Arrays for results of this shape, of `like`'s dtype, and for their lse."""
        lse = workspace.shaped(f"{name}_lse", shape[:-1], FLOAT32, like)
        return workspace.shaped(name, shape, like.dtype, like), lse


def of_one_query(name: str, indices: Any) -> Any:
    """Indices [T, K] of T queries as [T, 1, K], of T requests with one query. Raises ValueError for another shape."""
    native = dlpack.borrow(indices, name)
    if native.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(native.shape)}, expected [T, topk]")
    return native[:, None]


def is_merged_by_heads(size: int, heads: int, result_bytes: int) -> bool:
    """Whether ranks that need all heads should each merge some heads and then gather them, in two exchanges."""
    all_to_all, by_heads = result_bytes * (size - 1), 2 * result_bytes * (size - 1) // size
    return heads % size == 0 and all_to_all - by_heads > WORTH_A_CALL


def outputs(q: Any, shape: tuple[int, ...], out: Any, lse: Any) -> tuple[Any, Any]:
    """out and lse, checked, or new arrays in place of None. Raises TypeError or ValueError."""
    arrays = []
    for name, argument, dtype, size in (("out", out, q.dtype, shape), ("lse", lse, FLOAT32, shape[:-1])):
        if argument is None:
            if not isinstance(q, np.ndarray) and streams.is_capturing():
                raise ValueError(
                    f"{name}: got None while a CUDA graph is being captured, expected {dtype} {list(size)}"
                )
            arrays.append(dlpack.empty(size, dtype, q))
            continue
        array = dlpack.borrow(argument, name, writable=True)
        if array.dtype != dtype:
            raise TypeError(f"{name}: got dtype {array.dtype}, expected {dtype}")
        if array.shape != size:
            raise ValueError(f"{name}: got shape {tuple(array.shape)}, expected {list(size)}")
        arrays.append(array)
    return arrays[0], arrays[1]


def local_window(
    swa_indices: Any, swa_lens: Any, rank: int, size: int, *, out: Any = None, backend: str | None = None
) -> tuple[Any, Any]:
    """A rank's part of the windows in a cache that every rank has in full: all ranks take equally many columns.

    Args:
        swa_indices: [T, W] or [T, 1, W] int32 slots
        swa_lens: [T] int32
        out: [T] int32 to write instead of allocating

    Returns the rank's columns of swa_indices, [T, W / size] without a copy, and the number of used entries of each row.
    Raises ValueError for swa_indices of another shape.
    """
    columns = dlpack.borrow(swa_indices, "swa_indices")
    if columns.ndim == 3 and columns.shape[1] == 1:
        columns = columns[:, 0]
    if columns.ndim != 2:
        raise ValueError(f"swa_indices: got shape {tuple(columns.shape)}, expected [T, W] or [T, 1, W]")
    width = max(1, -(-columns.shape[1] // size))
    lens = local_seq_lens(swa_lens, Shard(rank, size, width), out=out, backend=backend)
    return columns[:, rank * width : (rank + 1) * width], lens
