"""Inputs of a prefill over gathered rows: rows in a workspace, and each token's list of rows."""

from ..types.prefill_rows import PrefillRows
from .compile import kernel
from .indices import combine_topk_swa_indices, combined_arguments, takes_four
from .launch import is_aligned
from .sparse_cache import TOKENS, WARPS, dequantize_and_gather_k_cache, gather_arguments, gather_macros

MOST_BLOCKS = 2**31 - 1


def gather_prefill_rows(args: PrefillRows) -> None:
    windows, compressed, lists = args
    gathers = [windows] if compressed is None else [windows, compressed]
    requests, tokens = len(windows.out), len(lists.combined_lens)
    rows = [x.out.shape[1] - x.offset for x in gathers]
    of_gathers = [-(-count // (WARPS * TOKENS)) for count in rows]
    of_lists = -(-tokens // WARPS)
    blocks = of_lists + requests * sum(of_gathers)
    if blocks > MOST_BLOCKS or not is_aligned(*(array for x in gathers for array in (x.out, x.pages.bytes))):
        for x in reversed(gathers):
            dequantize_and_gather_k_cache(x)
        combine_topk_swa_indices(lists)
        return
    last = gathers[-1]
    kernel(
        "common/prefill_rows.cu", "prefill_rows", LAYOUT=windows.pages.layout.name, EXTRA_LAYOUT=last.pages.layout.name,
        COMPACT=int(lists.compact), ALIGNED=1, WIDE_ENTRIES=int(takes_four(lists)),
        **gather_macros(windows.out, requests * max(rows)),
    )(
        (blocks,),
        (32 * WARPS,),
        (
            *combined_arguments(lists), *gather_arguments(windows), *gather_arguments(last), of_lists, of_gathers[0],
            max(of_gathers[-1], 1),
        ),
        overlap=True,
    )  # fmt: skip
