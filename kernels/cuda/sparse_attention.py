"""Sparse MLA decode and prefill, and merging of partial results."""

from __future__ import annotations

from typing import Any

from ...arrays.streams import capture_id
from ...layout import DSV4_BF16, MLA_BF16
from ..types.plan import DecodePlan
from ..types.segments import Pages, Segment, SparseDecode, SparsePrefill
from .compile import kernel
from .launch import C_NAMES, int32, pointer, strides
from .sparse import kernels as sparse_kernels
from .sparse import work as sparse_work
from .sparse.division import Division
from .sparse.work import AttentionCall


def sparse_mla_decode(given: SparseDecode) -> None:
    q, segments, attn_sink, softmax_scale, out, lse, plan, batch_invariant = given
    work = AttentionCall(q, segments, attn_sink, softmax_scale, out, None, (0, 0), lse, strides(lse))
    _attend(work, plan, not batch_invariant)


def sparse_mla_prefill(given: SparsePrefill) -> None:
    q, kv, indices, topk_length, attn_sink, softmax_scale, out, max_logits, lse = given
    # A workspace row is a page of one token.
    row_bytes = kv.shape[1] * kv.dtype.itemsize
    rows = type(kv)((len(kv), row_bytes), "uint8", kv.data, (kv.strides[0], 1))
    pages = Pages(rows, 1, {512: DSV4_BF16, 576: MLA_BF16}[kv.shape[1]])
    lengths = None if topk_length is None else topk_length[:, None]
    lse_stride_s, lse_stride_h = strides(lse)
    work = AttentionCall(
        q[:, None], [Segment(pages, indices[:, None], lengths)], attn_sink, softmax_scale, out[:, None],
        max_logits, strides(max_logits), lse, (lse_stride_s, lse_stride_h, 0),
    )  # fmt: skip
    fast = sparse_kernels.choose_for_prefill(work)
    if fast is None:
        sparse_kernels.launch_epilogue(work, work.packed_arguments(None), everything=True)
        return
    # Whole tiles, several per CTA, and no memory beside the arguments: tiles are flagged in max_logits and lse.
    work = work._replace(tile_heads=fast.tile_heads)
    division = Division(min(work.tiles, fast.max_ranges), planned=False, split=False)
    problem = work.packed_arguments(None, division)
    fast.launch(division, work, problem)
    sparse_kernels.launch_epilogue(work, problem)


def _attend(work: AttentionCall, plan: DecodePlan | None, may_split: bool) -> None:
    """Run the fast kernel, if one supports these arrays, then the epilogue kernel."""
    fast = sparse_kernels.choose(work, may_split)
    if fast is None:
        sparse_kernels.launch_epilogue(work, work.packed_arguments(None), everything=True)
        return
    work = work._replace(tile_heads=fast.tile_heads)
    division = sparse_work.divide(work, may_split, fast.max_ranges, fast.costs, fast.clusters)
    capture = capture_id()
    memory = sparse_work.memory_for(plan, work, division, capture)
    problem = work.packed_arguments(memory, division)
    sparse_work.plan_ranges(plan, work, division, memory, problem, capture)
    fast.launch(division, work, problem)
    sparse_kernels.launch_epilogue(work, problem, memory=memory, division=division, may_split=may_split)


def merge_attn_states(
    output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, output_lse: Any | None
) -> None:
    tokens, heads, dim = output.shape
    kernel("common/merge.cu", "merge_attn_states", VALUE=C_NAMES[output.dtype.name])(
        (tokens * heads,),
        (128,),
        (
            output, *strides(output)[:2], prefix_output, *strides(prefix_output)[:2], prefix_lse, *strides(prefix_lse),
            suffix_output, *strides(suffix_output)[:2], suffix_lse, *strides(suffix_lse),
            pointer(output_lse), *((0, 0) if output_lse is None else strides(output_lse)), int32(heads), int32(dim),
        ),
    )  # fmt: skip
