"""Sparse MLA decode and prefill, and merging of partial results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...layout import DSV4_BF16
from ..check_results import UNDER_TEST
from ..types.plan import DecodePlan
from ..types.segments import ROW_LAYOUTS, V_DIM, Pages, Segment, SparseDecode, SparsePrefill
from ..types.stream_workspace import workspace_of_call
from .compile import kernel
from .device import capture_id, device_sms
from .launch import C_NAMES, Kernel, int32, is_aligned, pointer, strides
from .sparse import kernels as sparse_kernels
from .sparse import under_test
from .sparse import work as sparse_work
from .sparse.division import Division
from .sparse.work import AttentionCall

ROWS_OF_CTA, CONVERTING_CTAS = 8, 8  # sm90/prefill_fp8_rows.cu, common/sparse/expand_rows.cu: rows a CTA, CTAs an SM


def sparse_mla_decode(args: SparseDecode) -> None:
    q, segments, attn_sink, softmax_scale, out, lse, plan, batch_invariant = args
    work = AttentionCall(q, segments, attn_sink, softmax_scale, out, None, (0, 0), lse, strides(lse))
    _attend(work, plan, not batch_invariant)


def sparse_mla_prefill(args: SparsePrefill) -> None:
    q, kv, indices, topk_length, attn_sink, softmax_scale, out, max_logits, lse, _, workspace = args
    pages = args.pages(None if isinstance(kv, Pages) else row_bytes_of(kv))
    lengths = None if topk_length is None else topk_length[:, None]
    lse_stride_s, lse_stride_h = strides(lse)
    work = AttentionCall(
        q[:, None], [Segment(pages, indices[:, None], lengths)], attn_sink, softmax_scale, out[:, None],
        max_logits, strides(max_logits), lse, (lse_stride_s, lse_stride_h, 0),
    )  # fmt: skip
    if workspace is not None and sparse_kernels.takes_fp8(work, workspace):
        _prefill_in_fp8(work, workspace)
        return
    fast = None
    if not isinstance(kv, Pages):
        fast = sparse_kernels.choose_for_prefill(work)
    elif workspace is not None and is_aligned(workspace, pages.bytes):
        (segment,) = work.segments
        work = work._replace(segments=[segment._replace(pages=_expanded(pages, workspace))])
        fast = sparse_kernels.choose_for_prefill(work)
    if fast is None:
        sparse_kernels.launch_epilogue(work, work.packed_arguments(None), everything=True)
        return
    # Whole tiles, several per CTA, and no memory but the arguments: tiles are flagged in max_logits and lse.
    work = work._replace(tile_heads=fast.tile_heads)
    division = Division(min(work.tiles, fast.max_ranges), planned=False, split=False)
    problem = work.packed_arguments(None, division)
    fast.start(division, work)
    fast.launch(division, work, problem)
    if not fast.recomputes:
        sparse_kernels.launch_epilogue(work, problem)


def row_bytes_of(kv: Any) -> Any:
    """A uint8 view [s_kv, 2 d] of 16-bit rows."""
    return type(kv)((len(kv), kv.shape[1] * kv.dtype.itemsize), "uint8", kv.data, (kv.strides[0], 1))


def _expanded(pages: Pages, workspace: Any) -> Pages:
    """The rows of `pages` in bfloat16, as pages of one token."""
    count, width = pages.num_slots, pages.layout.head_dim
    rows = type(workspace)((count, 2 * width), "uint8", workspace.data)
    _convert(kernel("common/sparse/expand_rows.cu", "expand_rows", LAYOUT=pages.layout.name), pages, rows)
    return Pages(rows, 1, ROW_LAYOUTS[width])


def _convert(function: Kernel, pages: Pages, *results: Any) -> None:
    """Launch a kernel whose warps take rows in a grid-stride loop."""
    device, count = pages.bytes.device.id, pages.num_slots
    grid = (max(1, min(-(-count // ROWS_OF_CTA), CONVERTING_CTAS * device_sms(device))),)
    arguments = pages.bytes, pages.bytes.strides[0], int32(pages.block_size), int32(count), *results
    function(grid, (32 * ROWS_OF_CTA,), arguments, overlap=True)


def _prefill_in_fp8(work: AttentionCall, workspace: Any) -> None:
    """Prefill over the call's rows, converted to e4m3 first. Tiles out of range are recomputed from the call's rows."""
    (segment,) = work.segments
    pages, count = segment.pages, segment.pages.num_slots
    e4m3, scales = type(pages.bytes)((count, V_DIM), "uint8", workspace.data), workspace.data.ptr + count * V_DIM
    fast = sparse_kernels.prefill_fp8(work.q.device.id, scales)
    division = Division(min(work.tiles, fast.max_ranges), planned=False, split=False)
    fast.start(division, work)
    function = kernel("sm90/prefill_fp8_rows.cu", "rows_to_e4m3", arch="sm_90a", LAYOUT=pages.layout.name)
    _convert(function, pages, e4m3, scales)
    converted = segment._replace(pages=Pages(e4m3, 1, DSV4_BF16))
    fast.launch(division, work, work._replace(segments=[converted]).packed_arguments(None, division))
    sparse_kernels.launch_epilogue(work, work.packed_arguments(None, division))


KERNEL_FOR: dict[str, Callable[..., str]] = {
    "sparse_mla_decode": lambda args, device: sparse_kernels.kernel_for_decode(
        device, args.segments[0].pages.layout, int(args.q.shape[2])
    ),
    "sparse_mla_prefill": lambda args, device: sparse_kernels.kernel_for_prefill(device),
}


def _attend(work: AttentionCall, plan: DecodePlan | None, may_split: bool) -> None:
    """Run the fast kernel, if one supports these arrays, then the epilogue kernel."""
    fast = sparse_kernels.choose(work, may_split)
    if fast is None:
        sparse_kernels.launch_epilogue(work, work.packed_arguments(None), everything=True)
        return
    work = work._replace(tile_heads=fast.tile_heads)
    division = None
    if may_split and UNDER_TEST.get():
        division = under_test.division(work.tiles, work.most_blocks, fast.max_ranges)
    if division is None:
        division = sparse_work.divide(work, may_split, fast.max_ranges, fast.costs, fast.clusters)
    fast.start(division, work)
    if plan is None:
        with workspace_of_call(work.q) as workspace:
            _attend_by_plan(work, fast, division, DecodePlan(workspace), may_split)
    else:
        _attend_by_plan(work, fast, division, plan, may_split)


def _attend_by_plan(
    work: AttentionCall, fast: sparse_kernels.FastKernel, division: Division, plan: DecodePlan, may_split: bool
) -> None:
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
