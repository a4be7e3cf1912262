"""Sparse multi-head latent attention over paged caches (decode) and dense workspaces (prefill)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array import Array
from ..arrays.dlpack import Argument
from ..dispatch.call import BF16, BYTES, FLOAT32, FLOATS, INT32, Call, without_middle_axis
from ..dispatch.formats import cache_layout, cache_pages, named_layout
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_choice, check_flags, check_kind, check_optional_size, in_float32, shown
from ..kernels.types.plan import DecodePlan, DenseDecodePlan
from ..kernels.types.segments import V_DIM, Pages, Segment, SparseDecode, SparsePrefill, fp8_workspace_bytes
from ..layout import BUILT_IN, DSV41_FP4, DSV41_FP4_SPLIT, CacheLayout

ROWS = (*BF16, *FLOAT32)
HEAD_DIMS = (512, 576)
MAX_HEADS = 128
FEW_HEADS = 32  # with at most this many heads, prefill has no FP8 products
# Formats of a second cache, by the format of the first, if the two differ.
PARTNERS = {"DSV41_FP8": DSV41_FP4, "DSV41_FP8_SPLIT": DSV41_FP4_SPLIT}


@launch_cached
def sparse_mla_decode(
    q: Array,
    k_cache: Array,
    indices: Array,
    *,
    layout: CacheLayout | str | None = None,
    block_size: int | None = None,
    topk_length: Array | None = None,
    extra_k_cache: Array | None = None,
    extra_indices: Array | None = None,
    extra_topk_length: Array | None = None,
    extra_block_size: int | None = None,
    extra_layout: CacheLayout | str | None = None,
    attn_sink: Array | None = None,
    softmax_scale: float | None = None,
    plan: DecodePlan | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention of each query over the listed tokens of one or two paged caches, in one softmax.

    Args:
        q: [b, s_q, h, d] bfloat16; d = 512 or 576, the layout's head_dim, h from 1 to 128. On the host also float32,
            for results without bfloat16's rounding: out is then float32
        k_cache: uint8 [num_blocks, block_size, token_bytes] (or [..., 1, token_bytes], or raw pages [num_blocks,
            page_bytes] with layout and block_size; pages of 64 tokens of DSV4_FP8 need no block_size), or bfloat16
            [num_blocks, block_size, d]
        indices: [b, s_q, topk] int32 slots; -1 and any slot outside the cache is absent. A slot listed twice counts
            twice
        layout: DSV4_FP8, V32_FP8, V32_NOPE_FP8, DSV41_FP8, DSV41_FP4, DSV41_FP8_SPLIT, DSV41_FP4_SPLIT, MLA_BF16 or
            DSV4_BF16, on the host also MLA_F32 or DSV4_F32, or the name of one; None: inferred from the bytes per
            token; 528 and 288 bytes do not identify the format
        topk_length: [b] or [b, s_q] int32, entries of `indices` in use; None: all. A negative length counts as 0, a
            length beyond topk as topk
        extra_k_cache: a second cache, with its own extra_indices [b, s_q, extra_topk], extra_topk_length and
            extra_block_size
        extra_layout: the second cache's format: the same as layout, or with DSV41_FP8 also DSV41_FP4, with
            DSV41_FP8_SPLIT also DSV41_FP4_SPLIT. None: the allowed format with the cache's bytes per token; for raw
            pages the same as layout
        attn_sink: [h] float32: a logit that takes part in the softmax and has no value. None, or -inf for a head: no
            sink. With +inf out is 0
        softmax_scale: 1 / sqrt(d) if None; NaN and infinity are errors
        plan: a DecodePlan that the layers of a step share; None: the call computes one
        batch_invariant: True: a token's result is bit-identical in every batch. The keys of a token are then split by
            its own lists alone, into two halves or not at all, which makes small batches slower; a plan must be created
            with batch_invariant=True. False: on a GPU
            the split of keys depends on the batch, and results of a token in two batches may differ within the same
            bounds as from the exact result (cumla.bounds.DECODE_OUT and DECODE_LSE)
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: [b, s_q, h, 512] of q's dtype to write instead of allocating
        lse: [b, h, s_q] float32 to write instead of allocating

    Returns out and lse. V is the first 512 values of each key. lse is the natural logarithm of the sum of
    exp(softmax_scale * q . k), without the sink. A query without keys gets out 0 and lse +inf. Equal calls return the
    same bits every time. Inside CUDA graph capture pass plan, out and lse: allocating them there raises RuntimeError.
    Source: FlashMLA flash_mla_with_kvcache (sparse, FP8).
    """
    check_optional_size(block_size=block_size, extra_block_size=extra_block_size)
    check_flags(batch_invariant=batch_invariant)
    call = Call(backend, stream, early_release)
    q = call.array("q", q, ROWS, ("b", "s_q", "h", -1))
    cache = call.borrow("k_cache", k_cache)
    layout = attention_layout(cache, layout, q.shape[3])
    scale = scale_or_default(softmax_scale, q.shape[3])
    check_heads(q.shape[2])
    call.check_float32("q", q.dtype.name)
    call.check_float32("k_cache", layout.value_type)
    segments = [segment(call, "", cache, indices, topk_length, layout, block_size)]
    if extra_k_cache is not None and extra_indices is not None:
        cache = call.borrow("extra_k_cache", extra_k_cache)
        second = second_layout(cache, extra_layout, layout)
        segments.append(segment(call, "extra_", cache, extra_indices, extra_topk_length, second, extra_block_size))
    elif not (extra_k_cache is None and extra_indices is None and extra_topk_length is None and extra_layout is None):
        raise ValueError(
            "extra_k_cache: extra_k_cache and extra_indices must be given together, and with extra_topk_length and "
            "extra_layout"
        )
    attn_sink = checked_sink(call, attn_sink)
    check_plan(call, plan, DecodePlan, q, batch_invariant)
    batch, s_q, heads, _ = q.shape
    out_array = call.output("out", out, (q.dtype,), (batch, s_q, heads, V_DIM))
    lse_array = call.output("lse", lse, FLOAT32, (batch, heads, s_q))
    if q.size:
        with call.kernels("sparse_attention") as kernels:
            kernels.sparse_mla_decode(
                SparseDecode(q, segments, attn_sink, scale, out_array, lse_array, plan, batch_invariant)
            )
    return call.results()


@launch_cached
def sparse_mla_prefill(
    q: Array,
    kv: Array,
    indices: Array,
    *,
    softmax_scale: float | None = None,
    d_v: int = V_DIM,
    attn_sink: Array | None = None,
    topk_length: Array | None = None,
    precision: str | None = None,
    layout: CacheLayout | str | None = None,
    block_size: int | None = None,
    workspace: Array | None = None,
    out: tuple[Array, Array, Array] | None = None,
    early_release: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Attention of each query over the listed rows of a dense workspace.

    Args:
        q: [s_q, h, d] bfloat16, d = 512 or 576, h from 1 to 128; on the host also float32
        kv: [s_kv, d] or [s_kv, 1, d] of q's dtype; with precision="fp8" also quantised rows: uint8 pages as
            sparse_mla_decode takes them, or gathered rows [s_kv, token_bytes] as raw pages of block_size 1
        indices: [s_q, topk] or [s_q, 1, topk] int32 rows of kv, slots of pages; an index outside kv is absent
        softmax_scale: 1 / sqrt(d) if None; NaN and infinity are errors
        d_v: 512: V is the first 512 values of each row
        attn_sink: [h] float32, as in sparse_mla_decode
        topk_length: [s_q] int32, entries of `indices` in use; None: all. A negative length counts as 0, a length beyond
            topk as topk
        precision: "fp8": rows of kv and heads of q, each with a power-of-two scale, and weights may be multiplied in
            e4m3. Each has 2.6% RMS error, `out` 4 to 5%: cumla.bounds has PREFILL_FP8_OUT and PREFILL_FP8_LOGITS.
            Hopper has such a kernel for 512 values and more than 32 heads, and the reference rounds queries and rows
            for these sizes; otherwise "fp8" changes nothing. Tokens with values that are not finite or beyond 2^52 are
            computed without it. None: products of bfloat16 values
        layout: format of quantised rows, as in sparse_mla_decode; V32_NOPE_FP8 for 512 e4m3 values
        block_size: tokens of a page of raw pages
        workspace: uint8 [516 * s_kv], for quantised rows [2 * d * s_kv], to use instead of allocating, with
            precision="fp8" on a GPU. Every row of kv is converted, listed or not: kv should be the rows of a chunk, not
            a serving cache
        early_release: False: no later kernel starts before the results are stored (docs/interop.md)
        out: (out, max_logits, lse) to write instead of allocating

    Returns out [s_q, h, 512] of q's dtype, max_logits [s_q, h] float32 (largest scaled logit, -inf without keys) and
    lse [s_q, h] float32 (+inf without keys; the sink is left out). A query's results do not depend on the other
    queries of the call.
    Source: FlashMLA flash_mla_sparse_fwd.
    """
    check_choice((V_DIM,), d_v=d_v)
    check_choice((None, "fp8"), precision=precision)
    call = Call(backend, stream, early_release)
    q = call.array("q", q, ROWS, ("s_q", "h", "d"))
    call.check_float32("q", q.dtype.name)
    check_heads(q.shape[1])
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"q: got {q.shape[2]} values a head, expected 512 or 576")
    kv = rows_of_prefill(call, kv, q, layout, block_size, precision)
    indices = call.checked(without_middle_axis(call.borrow("indices", indices)), INT32, ("s_q", -1))
    topk_length = call.optional("topk_length", topk_length, INT32, ("s_q",))
    attn_sink = checked_sink(call, attn_sink)
    tokens, heads, head_dim = q.shape
    scale = scale_or_default(softmax_scale, head_dim)
    outputs = (None, None, None) if out is None else out
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 3:
        raise TypeError(f"out: got {shown(out)}, expected (out, max_logits, lse)")
    out_array = call.output("out[0] (out)", outputs[0], (q.dtype,), (tokens, heads, V_DIM))
    max_logits = call.output("out[1] (max_logits)", outputs[1], FLOAT32, (tokens, heads))
    lse = call.output("out[2] (lse)", outputs[2], FLOAT32, (tokens, heads))
    memory = fp8_memory(call, workspace, precision, q, kv)
    if q.size:
        with call.kernels("sparse_attention") as kernels:
            results, fp8 = (out_array, max_logits, lse), precision is not None
            kernels.sparse_mla_prefill(
                SparsePrefill(q, kv, indices, topk_length, attn_sink, scale, *results, fp8, memory)
            )
    return call.results()


def rows_of_prefill(call: Call, kv: Any, q: Any, layout: Any, block_size: int | None, precision: str | None) -> Any:
    """kv [s_kv, d] of q's dtype, or Pages of quantised rows."""
    check_optional_size(block_size=block_size)
    argument = call.borrow("kv", kv)
    if argument.native.dtype not in BYTES or precision is None:
        if layout is not None or block_size is not None:
            name = "block_size" if layout is None else "layout"
            raise ValueError(f'{name}: expected None, except for quantised rows of kv with precision="fp8"')
        return call.checked(without_middle_axis(argument), (q.dtype,), (-1, "d"))
    layout = cache_layout(argument, layout, block_size, q.shape[2])
    if layout not in BUILT_IN or layout.head_dim != q.shape[2] or not layout.num_scales:
        values = f"rows of q's {q.shape[2]} values"
        raise ValueError(f"layout: got {layout.name}, expected a quantised format of cumla with {values}")
    return cache_pages(call, argument, layout, block_size)


def workspace_bytes(precision: str | None, rows: int, heads: int, width: int, quantized: bool) -> int:
    """Bytes of the workspace of sparse_mla_prefill over `rows` rows on a GPU."""
    if precision is None:
        return 0
    if quantized:
        return 2 * width * rows  # more than fp8_workspace_bytes
    return fp8_workspace_bytes(rows) if width == V_DIM and heads > FEW_HEADS else 0


def fp8_memory(call: Call, workspace: Any, precision: str | None, q: Any, kv: Any) -> Any:
    """The workspace that sparse_mla_prefill needs for this precision, allocated if `workspace` is None; else None."""
    quantized = isinstance(kv, Pages)
    rows = kv.num_slots if quantized else len(kv)
    _, heads, width = q.shape
    size = 0 if isinstance(q, np.ndarray) else workspace_bytes(precision, rows, heads, width, quantized)
    if workspace is not None:
        workspace = call.array("workspace", workspace, BYTES[:1], (-1,), writable=True)
        if len(workspace) < size:
            raise ValueError(f"workspace: got {len(workspace)} bytes, expected at least {size}")
    if size == 0:
        return None
    return call.scratch("workspace", size) if workspace is None else workspace


@launch_cached
def merge_attn_states(
    output: Array,
    prefix_output: Array,
    prefix_lse: Array,
    suffix_output: Array,
    suffix_lse: Array,
    output_lse: Array | None = None,
    *,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Combine attention over two sets of keys into attention over their union.

    Args:
        output: [T, h, d] bfloat16, float16 or float32, written
        prefix_output: [T, h, d], suffix_output likewise, of output's dtype
        prefix_lse: [h, T] float32, suffix_lse likewise; -inf or +inf: no key was attended, and the part's output is
            ignored
        output_lse: [h, T] float32, written unless None: +inf where neither part had a key (output is 0 there)

    Source: vLLM merge_attn_states.
    """
    call = Call(backend, stream)
    output = call.array("output", output, FLOATS, ("T", "h", "d"), writable=True)
    same = (output.dtype,)
    prefix_output = call.array("prefix_output", prefix_output, same, ("T", "h", "d"))
    prefix_lse = call.array("prefix_lse", prefix_lse, FLOAT32, ("h", "T"))
    suffix_output = call.array("suffix_output", suffix_output, same, ("T", "h", "d"))
    suffix_lse = call.array("suffix_lse", suffix_lse, FLOAT32, ("h", "T"))
    output_lse = call.optional("output_lse", output_lse, FLOAT32, ("h", "T"), writable=True)
    if output.size:
        with call.kernels("sparse_attention") as kernels:
            kernels.merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)


def checked_sink(call: Call, attn_sink: Any) -> Any:
    """attn_sink [h] or None. Raises ValueError for NaN in host memory; reading device memory would synchronise."""
    attn_sink = call.optional("attn_sink", attn_sink, FLOAT32, ("h",))
    if isinstance(attn_sink, np.ndarray) and np.isnan(attn_sink).any():
        raise ValueError(f"attn_sink: got NaN for head {int(np.isnan(attn_sink).argmax())}, expected numbers")
    return attn_sink


def attention_layout(k_cache: Argument, layout: Any, head_dim: int) -> CacheLayout:
    """The layout of a cache, named by `layout` or inferred from the cache, checked against q's head_dim."""
    layout = cache_layout(k_cache, layout)
    if not HEAD_DIMS[0] <= layout.head_dim <= HEAD_DIMS[-1]:
        raise ValueError(f"layout: got {layout.name}, expected one for attention")
    if layout.head_dim != head_dim:
        raise ValueError(f"q: got {head_dim} values a head, expected {layout.head_dim} for a {layout.name} cache")
    return layout


def second_layout(extra_k_cache: Argument, extra_layout: Any, layout: CacheLayout) -> CacheLayout:
    """The format of the second cache, named or inferred: the first cache's `layout`, or its partner."""
    named = named_layout(extra_layout, "extra_layout")
    if named is not None:
        check_pair(layout, named)
        return named
    native = extra_k_cache.native
    if native.ndim in (3, 4):
        return next((x for x in second_layouts(layout) if x.token_bytes == native.shape[-1]), layout)
    return layout


def second_layouts(layout: CacheLayout) -> list[CacheLayout]:
    """The formats that a second cache may have if the first has `layout`."""
    return [layout, *filter(None, [PARTNERS.get(layout.name)])]


def check_pair(layout: CacheLayout, extra_layout: CacheLayout) -> None:
    """Raise ValueError for caches of two formats that attention does not take together."""
    allowed = [x.name for x in second_layouts(layout)]
    if extra_layout.name not in allowed:
        expected = " or ".join(allowed)
        raise ValueError(f"extra_layout: got {extra_layout.name}, expected {expected} with a {layout.name} cache")


def segment(
    call: Call, prefix: str, k_cache: Argument, indices: Any, lengths: Any, layout: CacheLayout, block_size: int | None
) -> Segment:
    """Check one cache with its indices and lengths."""
    pages: Pages = cache_pages(call, k_cache, layout, block_size)
    indices = call.array(f"{prefix}indices", indices, INT32, ("b", "s_q", -1))
    if lengths is not None:
        argument = call.borrow(f"{prefix}topk_length", lengths)
        per_query = argument.native.ndim != 1
        lengths = call.checked(argument, INT32, ("b", "s_q") if per_query else ("b",))
        lengths = lengths if per_query else broadcast_lengths(lengths, indices.shape[1])
    return Segment(pages, indices, lengths)


def broadcast_lengths(lengths: Any, s_q: int) -> Any:
    """[b] as [b, s_q] with a stride of 0, no copy."""
    if isinstance(lengths, np.ndarray):
        return np.broadcast_to(lengths[:, None], (len(lengths), s_q))
    return type(lengths)((len(lengths), s_q), lengths.dtype, lengths.data, (lengths.strides[0], 0))


def check_heads(heads: int) -> None:
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q: got {heads} heads, expected 1 to {MAX_HEADS}")


def check_plan(
    call: Call, plan: Any, kind: type[DecodePlan | DenseDecodePlan], q: Any, batch_invariant: bool
) -> None:  # fmt: skip
    """Raise TypeError for a plan that is not a `kind`, ValueError for a plan with memory on another device than q, and
    for a plan that was created for the other value of batch_invariant."""
    if plan is None:
        return
    check_kind(kind, plan=plan)
    if plan.batch_invariant != batch_invariant:
        raise ValueError(
            f"plan: got a {kind.__name__} created with batch_invariant={plan.batch_invariant}, expected "
            f"{bool(batch_invariant)}, as in the call"
        )
    plan.workspace.check_place(q)
    if plan.workspace.memory is not None:
        call.uses("plan", plan.workspace.memory, writable=True)


def scale_or_default(softmax_scale: float | None, head_dim: int) -> float:
    """softmax_scale or its default. Raises TypeError for no number, ValueError for a number beyond float32."""
    return head_dim**-0.5 if softmax_scale is None else in_float32("softmax_scale", softmax_scale)
