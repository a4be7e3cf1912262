"""FlashMLA's module on cumla: `import cumla.interop.flash_mla as flash_mla` in place of `import flash_mla`.

The same names, argument names and positions, return shapes and conventions: lse is a natural logarithm
without the sink, +inf for a query without keys, whose output is 0. Tensors or any other arrays. What differs
is in docs/guide/from-flash-mla.md; above all, what FlashMLA restricts (head counts, block sizes, widths, strides) is
not restricted here, and a wrong argument raises ValueError or TypeError instead of AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..arrays import dlpack
from ..kernels.types.plan import DecodePlan, DenseDecodePlan
from ..ops.dense_attention import dense_mla_decode
from ..ops.sparse_attention import V_DIM, sparse_mla_decode, sparse_mla_prefill

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


class Config(NamedTuple):
    """What the calls that share a schedule must have in common."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool
    topk: int | None
    extra_page_block_size: int | None
    extra_topk: int | None


@dataclass
class FlashMLASchedMeta:
    """A schedule: made by the first call that is given it, for calls of the same shapes and the same lengths.

    have_initialized         whether a call has made it
    config                   the shapes of that call
    tile_scheduler_metadata  the plan of sparse decode, which FlashMLA keeps in two tensors
    num_splits               None: it is part of the plan
    dense                    the plan of dense decode
    """

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: DecodePlan = field(default_factory=DecodePlan)
    num_splits: None = None
    dense: DenseDecodePlan = field(default_factory=DenseDecodePlan)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule, and None where FlashMLA once had num_splits. The arguments are not looked at."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | DecodePlan,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any | None = None,
    attn_sink: Any | None = None,
    extra_k_cache: Any | None = None,
    extra_indices_in_kvcache: Any | None = None,
    topk_length: Any | None = None,
    extra_topk_length: Any | None = None,
    out: Any | None = None,
) -> tuple[Any, Any]:
    """Decode: sparse over `indices` if they are given, else over all tokens of the block tables.

    q                        [b, s_q, h_q, d] bfloat16; d = 576 or 512
    k_cache                  [num_blocks, page_block_size, 1, bytes or d]: FP8 tokens of 656 (d = 576) or 584
                             (d = 512) bytes if is_fp8_kvcache, else bfloat16 rows
    block_table              [b, max_blocks] int32; not looked at by sparse decode, nor is cache_seqlens
    cache_seqlens            [b] int32
    head_dim_v               512
    tile_scheduler_metadata  from get_mla_metadata; or, for sparse decode, a DecodePlan: the tile_sched_* of cumla's
                             metadata are such
    softmax_scale            1 / sqrt(d) if None
    causal                   dense decode only
    indices                  [b, s_q, topk] int32 slots, -1 is absent
    attn_sink                [h_q] float32, sparse decode only, as is what follows
    extra_*                  a second cache, its indices and lengths
    topk_length              [b] int32; [b, s_q] is taken, too
    out                      [b, s_q, h_q, 512] to write instead of allocating

    Returns out [b, s_q, h_q, 512] and softmax_lse [b, h_q, s_q] float32.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: FlashMLA flash_mla_with_kvcache.
    """
    schedule = tile_scheduler_metadata
    if isinstance(schedule, DecodePlan) and indices is not None:
        schedule = FlashMLASchedMeta(tile_scheduler_metadata=schedule)
    if not isinstance(schedule, FlashMLASchedMeta):
        raise TypeError(f"tile_scheduler_metadata: got {type(schedule).__name__}, expected a FlashMLASchedMeta")
    if num_splits is not None:
        raise ValueError("num_splits: got a value, expected None")
    if head_dim_v != V_DIM:
        raise ValueError(f"head_dim_v: got {head_dim_v}, expected {V_DIM}")
    _check_ranks(q=q, k_cache=k_cache, extra_k_cache=extra_k_cache)
    if bool(is_fp8_kvcache) != (dlpack.borrow(k_cache, "k_cache").itemsize == 1):
        raise ValueError(f"is_fp8_kvcache: got {is_fp8_kvcache} with a k_cache of {k_cache.dtype}")
    b, s_q, h_q, _ = q.shape
    _, page_block_size, h_k, _ = k_cache.shape
    config = Config(
        b, s_q, h_q, page_block_size, h_k, bool(causal), bool(is_fp8_kvcache), _width(indices),
        None if extra_k_cache is None else extra_k_cache.shape[1], _width(extra_indices_in_kvcache),
    )  # fmt: skip
    _check_config(schedule, config)
    if indices is not None:
        if causal:
            raise ValueError("causal: got True, expected False with indices")
        results = sparse_mla_decode(
            q, k_cache, indices, topk_length=topk_length, extra_k_cache=extra_k_cache,
            extra_indices=extra_indices_in_kvcache, extra_topk_length=extra_topk_length, attn_sink=attn_sink,
            softmax_scale=softmax_scale, plan=schedule.tile_scheduler_metadata, out=out,
        )  # fmt: skip
    else:
        for name, value in (
            ("attn_sink", attn_sink), ("extra_k_cache", extra_k_cache), ("topk_length", topk_length),
            ("extra_indices_in_kvcache", extra_indices_in_kvcache), ("extra_topk_length", extra_topk_length),
        ):  # fmt: skip
            if value is not None:
                raise ValueError(f"{name}: got an array, expected None without indices (dense decode)")
        for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if value is None:
                raise ValueError(f"{name}: got None, expected an array without indices (dense decode)")
        results = dense_mla_decode(
            q, k_cache, block_table, cache_seqlens, softmax_scale=softmax_scale, causal=bool(causal),
            plan=schedule.dense, out=out,
        )  # fmt: skip
    schedule.have_initialized, schedule.config = True, config
    return results


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = V_DIM,
    attn_sink: Any | None = None,
    topk_length: Any | None = None,
    out: Any | None = None,
) -> tuple[Any, Any, Any]:
    """Sparse prefill.

    q            [s_q, h_q, d] bfloat16
    kv           [s_kv, 1, d] bfloat16
    indices      [s_q, 1, topk] int32; outside of kv is absent
    sm_scale     scale of the logits
    d_v          512
    attn_sink    [h_q] float32
    topk_length  [s_q] int32
    out          [s_q, h_q, 512] bfloat16 to write instead of allocating

    Returns out [s_q, h_q, 512], max_logits [s_q, h_q] and lse [s_q, h_q] float32.
    Source: FlashMLA flash_mla_sparse_fwd.
    """
    return sparse_mla_prefill(
        q, kv, indices, softmax_scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length,
        out=None if out is None else (out, None, None),
    )  # fmt: skip


def _check_ranks(**arrays: Any) -> None:
    for name, array in arrays.items():
        if array is None:
            continue
        if len(getattr(array, "shape", ())) != 4:
            raise ValueError(f"{name}: got shape {tuple(getattr(array, 'shape', ()))}, expected four axes")
        if name != "q" and array.shape[2] != 1:
            raise ValueError(f"{name}: got {array.shape[2]} heads, expected 1")


def _check_config(schedule: FlashMLASchedMeta, config: Config) -> None:
    """Raise ValueError if a schedule was made for other shapes."""
    if not schedule.have_initialized or schedule.config is None:
        return
    for name, made_for, got in zip(Config._fields, schedule.config, config, strict=True):
        if made_for != got:
            raise ValueError(
                f"tile_scheduler_metadata: got one made for {name} = {made_for}, expected {got}; "
                "get_mla_metadata() makes a new one"
            )


def _width(indices: Any | None) -> int | None:
    return None if indices is None else int(indices.shape[-1])
