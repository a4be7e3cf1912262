"""FlashMLA's module on cumla: `import cumla.interop.flash_mla as flash_mla` in place of `import flash_mla`.

The same names, argument names and positions, return shapes and conventions: lse is a natural logarithm
without the sink, +inf for a query without keys, whose output is 0. Arguments are tensors or any other arrays.
docs/guide/from-flash-mla.md lists the differences; most important, FlashMLA's restrictions (head counts, block sizes,
widths, strides) do not apply, and a wrong argument raises ValueError or TypeError instead of AssertionError.

If q is a tensor, torch allocates the results and the memory of schedules, as for FlashMLA: inside torch.cuda.graph
both come from the graph's memory pool.
"""

from __future__ import annotations

import contextvars
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dlpack, streams
from ..arrays.array import Array
from ..dispatch.values import check_choice, check_flags, in_float32
from ..kernels.types.plan import DecodePlan, DenseDecodePlan, Workspace
from ..layout import DSV41_FP8
from ..ops.dense_attention import dense_mla_decode
from ..ops.sparse_attention import V_DIM, sparse_mla_decode, sparse_mla_prefill
from .ops import OPS

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


class Config(NamedTuple):
    """The shapes and options that calls with the same schedule must share."""

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


_tensor: contextvars.ContextVar[Any] = contextvars.ContextVar("the tensor q of a call, or None", default=None)


def _allocate(size: int, like: Any) -> Any:
    """Memory of a schedule, uint8 [size]: torch's in a call on tensors."""
    q = _tensor.get()
    if q is None:
        return dlpack.empty((size,), np.dtype(np.uint8), like)
    return _torch_bytes(size, q)


def _torch_bytes(size: int, q: Any) -> Any:
    return dlpack.borrow(q.new_empty((size,), dtype=sys.modules["torch"].uint8), "workspace", writable=True)


def _decode_plan() -> DecodePlan:
    return DecodePlan(Workspace(allocate=_allocate))


def _dense_plan() -> DenseDecodePlan:
    return DenseDecodePlan(Workspace(allocate=_allocate))


@dataclass
class FlashMLASchedMeta:
    """A schedule for calls of the same shapes and lengths, built by the first call that gets it.

    Attributes:
        have_initialized: whether a call has built it
        config: the shapes of the call that built it
        tile_scheduler_metadata: the plan of sparse decode, which FlashMLA stores in two tensors
        num_splits: None: the plan includes the number of splits
        dense: the plan of dense decode
    """

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: DecodePlan = field(default_factory=_decode_plan)
    num_splits: None = None
    dense: DenseDecodePlan = field(default_factory=_dense_plan)
    _captured: tuple[int, Any] | None = field(default=None, repr=False)  # the graph of a capture, and its plan


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule, and None in place of FlashMLA's earlier num_splits. The arguments are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Array,
    k_cache: Array,
    block_table: Array,
    cache_seqlens: Array,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | DecodePlan,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Array | None = None,
    attn_sink: Array | None = None,
    extra_k_cache: Array | None = None,
    extra_indices_in_kvcache: Array | None = None,
    topk_length: Array | None = None,
    extra_topk_length: Array | None = None,
    out: Array | None = None,
    *,
    early_release: bool = True,
) -> tuple[Any, Any]:
    """Decode: sparse over `indices`, or over all tokens of the block tables if `indices` is None.

    q                        [b, s_q, h_q, d] bfloat16; d = 576 or 512
    k_cache                  [num_blocks, page_block_size, 1, bytes or d]: FP8 tokens of 656 (V3.2, d = 576), 584
                             (V4, d = 512) or 528 bytes (V4.1, d = 512, scales in the row) if is_fp8_kvcache, else
                             bfloat16 rows
    block_table              [b, max_blocks] int32; sparse decode ignores it and cache_seqlens
    cache_seqlens            [b] int32
    head_dim_v               512
    tile_scheduler_metadata  from get_mla_metadata; or, for sparse decode, a DecodePlan, such as the tile_sched_* of
                             cumla's metadata
    softmax_scale            1 / sqrt(d) if None
    causal                   dense decode only
    indices                  [b, s_q, topk] int32 slots, -1 is absent
    attn_sink                [h_q] float32; this and the following arguments are for sparse decode only
    extra_*                  a second cache, its indices and lengths; with tokens of 528 bytes it may have 288
    topk_length              [b] or [b, s_q] int32
    out                      [b, s_q, h_q, 512] to write instead of allocating
    early_release            only in cumla; False: no later kernel starts before results are stored (docs/interop.md)

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
    check_choice((V_DIM,), head_dim_v=head_dim_v)
    check_flags(causal=causal, is_fp8_kvcache=is_fp8_kvcache, early_release=early_release)
    b, s_q, h_q, _ = _shape("q", q, 4)
    _, page_block_size, h_k, _ = _cache_shape("k_cache", k_cache)
    pages = dlpack.borrow(k_cache, "k_cache")
    if is_fp8_kvcache != (pages.itemsize == 1):
        raise ValueError(f"is_fp8_kvcache: got {is_fp8_kvcache} with a k_cache of {pages.dtype}")
    config = Config(
        b, s_q, h_q, page_block_size, h_k, bool(causal), bool(is_fp8_kvcache),
        _width("indices", indices), None if extra_k_cache is None else _cache_shape("extra_k_cache", extra_k_cache)[1],
        _width("extra_indices_in_kvcache", extra_indices_in_kvcache),
    )  # fmt: skip
    _check_config(schedule, config)
    token = _tensor.set(q if dlpack.framework_of(q) == "torch" else None)
    try:
        out, lse = _results(q, (out, (b, s_q, h_q, V_DIM), None), (None, (b, h_q, s_q), "float32"))
        results = _decode(
            schedule, q, k_cache, block_table, cache_seqlens, softmax_scale, causal, indices, attn_sink, extra_k_cache,
            extra_indices_in_kvcache, topk_length, extra_topk_length, out, lse, early_release,
        )  # fmt: skip
    finally:
        _tensor.reset(token)
    schedule.have_initialized, schedule.config = True, config
    return results


def _decode(
    schedule: FlashMLASchedMeta, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any,
    softmax_scale: float | None, causal: bool, indices: Any, attn_sink: Any, extra_k_cache: Any,
    extra_indices_in_kvcache: Any, topk_length: Any, extra_topk_length: Any, out: Any, lse: Any, early_release: bool,
) -> tuple[Any, Any]:  # fmt: skip
    if indices is not None:
        if causal:
            raise ValueError("causal: got True, expected False with indices")
        plan = _plan(schedule, schedule.tile_scheduler_metadata, "sparse_mla_decode", {"q": q})
        layout = DSV41_FP8 if k_cache.shape[3] == DSV41_FP8.token_bytes else None  # FlashMLA's meaning of that width
        return sparse_mla_decode(
            q, k_cache, indices, layout=layout, topk_length=topk_length, extra_k_cache=extra_k_cache,
            extra_indices=extra_indices_in_kvcache, extra_topk_length=extra_topk_length, attn_sink=attn_sink,
            softmax_scale=softmax_scale, plan=plan, out=out, lse=lse, early_release=early_release,
        )  # fmt: skip
    for name, value in (
        ("attn_sink", attn_sink), ("extra_k_cache", extra_k_cache), ("topk_length", topk_length),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache), ("extra_topk_length", extra_topk_length),
    ):  # fmt: skip
        if value is not None:
            raise ValueError(f"{name}: got an array, expected None without indices (dense decode)")
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if value is None:
            raise ValueError(f"{name}: got None, expected an array without indices (dense decode)")
    arguments = {"q": q, "block_table": block_table, "k_cache": k_cache}
    return dense_mla_decode(
        q, k_cache, block_table, cache_seqlens, softmax_scale=softmax_scale, causal=bool(causal),
        plan=_plan(schedule, schedule.dense, "dense_mla_decode", arguments), out=out, lse=lse,
        early_release=early_release,
    )  # fmt: skip


def _results(q: Any, *wanted: tuple[Any, tuple[int, ...], str | None]) -> list[Any]:
    """The results of a call, from (array or None, shape, dtype; None: q's). If q is a tensor, torch allocates arrays in
    place of None; otherwise the call allocates them."""
    if dlpack.framework_of(q) != "torch":
        return [array for array, _, _ in wanted]
    torch = sys.modules["torch"]
    return [
        q.new_empty(shape, dtype=q.dtype if dtype is None else getattr(torch, dtype)) if array is None else array
        for array, shape, dtype in wanted
    ]


def _plan(schedule: FlashMLASchedMeta, plan: Any, op: str, arguments: dict[str, Any]) -> Any:
    """The schedule's plan. In a torch capture that no eager call preceded: a plan in the graph's memory pool, which the
    calls of this capture share. A plan for eager calls must not be created in a capture: its memory is cleared once,
    which the capture would only record."""
    q = _tensor.get()
    if q is None or not q.is_cuda or plan.workspace.arrays() or plan.workspace.memory is not None:
        return plan
    stream = streams.current("torch", q.device.index)
    if not streams.is_capturing(stream):
        return plan
    graph = streams.capture_id(stream)
    if schedule._captured is None or schedule._captured[0] != graph:
        described = OPS[op]
        assert described.scratch is not None
        assert described.plan is not None
        schedule._captured = graph, described.plan(_torch_bytes(described.scratch(arguments), q))
    return schedule._captured[1]


def flash_mla_sparse_fwd(
    q: Array,
    kv: Array,
    indices: Array,
    sm_scale: float | None,
    d_v: int = V_DIM,
    attn_sink: Array | None = None,
    topk_length: Array | None = None,
    out: Array | None = None,
    *,
    early_release: bool = True,
) -> tuple[Any, Any, Any]:
    """Sparse prefill.

    Args:
        q: [s_q, h_q, d] bfloat16
        kv: [s_kv, 1, d] bfloat16
        indices: [s_q, 1, topk] int32; an index outside kv is absent
        sm_scale: scale of the logits; 1 / sqrt(d) if None
        d_v: 512
        attn_sink: [h_q] float32
        topk_length: [s_q] int32
        out: [s_q, h_q, 512] bfloat16 to write instead of allocating
        early_release: only in cumla, as in flash_mla_with_kvcache

    Returns out [s_q, h_q, 512], max_logits [s_q, h_q] and lse [s_q, h_q] float32.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: FlashMLA flash_mla_sparse_fwd.
    """
    if sm_scale is not None:
        in_float32("sm_scale", sm_scale)
    results = [out, None, None]
    shape: Any = getattr(q, "shape", ())
    if len(shape) == 3:  # otherwise the call below raises the error
        s_q, h_q, _ = shape
        logits = None, (s_q, h_q), "float32"
        results = _results(q, (out, (s_q, h_q, V_DIM), None), logits, logits)
    outs: tuple[Any, Any, Any] = (results[0], results[1], results[2])
    return sparse_mla_prefill(
        q, kv, indices, softmax_scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length, out=outs,
        early_release=early_release,
    )  # fmt: skip


def _shape(name: str, array: Any, axes: int) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if not isinstance(shape, tuple):
        raise TypeError(f"{name}: got {type(array).__name__}, expected an array")
    if len(shape) != axes:
        raise ValueError(f"{name}: got shape {tuple(shape)}, expected {axes} axes")
    return shape


def _cache_shape(name: str, cache: Any) -> tuple[int, ...]:
    shape = _shape(name, cache, 4)
    if shape[2] != 1:
        raise ValueError(f"{name}: got {shape[2]} heads, expected 1")
    return shape


def _check_config(schedule: FlashMLASchedMeta, config: Config) -> None:
    """Raise ValueError if a schedule was built for other shapes."""
    if not schedule.have_initialized or schedule.config is None:
        return
    for name, made_for, got in zip(Config._fields, schedule.config, config, strict=True):
        if made_for != got:
            raise ValueError(
                f"tile_scheduler_metadata: got a schedule built for {name} = {made_for}, expected {got}; "
                "get_mla_metadata() returns a new one"
            )


def _width(name: str, indices: Any | None) -> int | None:
    return None if indices is None else int(_shape(name, indices, 3)[2])
