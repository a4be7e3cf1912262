"""Gathers the rows of a chunk of prefills into a workspace and lists each token's rows, in one launch."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import FLOATS, INT32, Call
from ..dispatch.formats import cache_layout, cache_pages, check_row_width, named_layout
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_flags, check_given, check_integers
from ..kernels.types.indices import CombinedIndices
from ..kernels.types.prefill_rows import PrefillRows
from ..kernels.types.segments import GatheredRows
from ..layout import CacheLayout
from .indices import request_arrays


@launch_cached
def gather_prefill_rows(
    out: Array,
    swa_cache: Array,
    swa_block_table: Array,
    swa_block_size: int,
    seq_lens: Array,
    gather_lens: Array,
    query_start_loc: Array,
    topk_indices: Array,
    topk: int,
    window_size: int,
    compress_ratio: int,
    N: int,
    *,
    compact: bool,
    layout: CacheLayout,
    compressed_cache: Array | None = None,
    compressed_block_table: Array | None = None,
    compressed_layout: CacheLayout | None = None,
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Gather the rows of R requests, and list the rows that each of their T tokens attends to.

    Args:
        out: [R, M, 512], written: at most N compressed rows of each request and, from row N on, its last gather_lens
            rows
        swa_cache: of `layout`; swa_block_table [R, B] int32, pages of swa_block_size positions
        seq_lens, gather_lens: [R] int32
        query_start_loc: [R + 1] int32
        topk_indices: [T, >= topk] int32; this, topk, window_size, compress_ratio and compact as in
            combine_topk_swa_indices
        compressed_cache: of compressed_layout, with compressed_block_table [R, C] int32; None: no compressed rows

    Rows are the same as dequantize_and_gather_k_cache's. Returns the results of combine_topk_swa_indices: lists
    [T, pad128(topk + window_size)] int32 and their lengths [T] int32.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    """
    check_integers(1, window_size=window_size, swa_block_size=swa_block_size)
    check_integers(0, topk=topk, N=N, compress_ratio=compress_ratio)
    check_flags(compact=compact)
    call = Call(backend)
    out = call.array("out", out, FLOATS, ("R", "M", -1), writable=True)
    of_window = named_layout(layout)
    if of_window is None:
        raise TypeError("layout: got None, expected a CacheLayout")
    compressed_layout = named_layout(compressed_layout, "compressed_layout")
    check_row_width("out", out.shape[2], of_window)
    query_start_loc, seq_lens = request_arrays(call, query_start_loc, seq_lens)
    gather_lens = call.array("gather_lens", gather_lens, INT32, ("R",))
    topk_indices = call.array("topk_indices", topk_indices, INT32, ("T", -1))
    if topk_indices.shape[1] < topk:
        raise ValueError(f"topk_indices: got {topk_indices.shape[1]} columns, expected at least topk = {topk}")
    if out.shape[1] < N:
        raise ValueError(f"N: got {N}, expected at most {out.shape[1]}, the rows of a request")
    windows = _gathered(
        call, "swa", out, swa_cache, of_window, swa_block_size, seq_lens, gather_lens, swa_block_table, N, 1
    )
    compressed = None
    if compressed_cache is not None and compressed_layout is not None and N:
        check_given("with compressed_cache", compressed_block_table=compressed_block_table)
        # Limited to N rows: the same launch writes window rows from row N on.
        compressed = _gathered(
            call, "compressed", out[:, :N], compressed_cache, compressed_layout, None, seq_lens, None,
            compressed_block_table, 0, max(compress_ratio, 1),
        )  # fmt: skip
    width, tokens = -(-(topk + window_size) // 128) * 128, call.size("T")
    indices = call.output("indices", None, INT32, (tokens, width))
    lens = call.output("lens", None, INT32, (tokens,))
    with call.kernels("prefill_rows") as kernels:
        kernels.gather_prefill_rows(PrefillRows(windows, compressed, CombinedIndices(
            topk_indices, query_start_loc, seq_lens, gather_lens, window_size, max(compress_ratio, 1),
            topk if compress_ratio else 0, out.shape[1], N, compact, indices, lens,
        )))  # fmt: skip
    return call.results()


def _gathered(
    call: Call, name: str, out: Any, cache: Any, layout: CacheLayout, block_size: int | None, seq_lens: Any,
    gather_lens: Any, table: Any, offset: int, ratio: int,
) -> GatheredRows:  # fmt: skip
    argument = call.borrow(f"{name}_cache", cache)
    layout = cache_layout(argument, layout, block_size, out.shape[2])
    pages = cache_pages(call, argument, layout, block_size)
    call.check_float32("layout", layout.value_type)
    table = call.array(f"{name}_block_table", table, INT32, ("R", -1))
    return GatheredRows(out, pages, seq_lens, gather_lens, table, offset, ratio)
