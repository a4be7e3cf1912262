"""Inputs of a prefill over gathered rows: rows in a workspace, and each token's list of rows."""

from ..types.prefill_rows import PrefillRows
from .indices import combine_topk_swa_indices
from .sparse_cache import dequantize_and_gather_k_cache


def gather_prefill_rows(args: PrefillRows) -> None:
    if args.compressed is not None:
        dequantize_and_gather_k_cache(args.compressed)
    dequantize_and_gather_k_cache(args.windows)
    combine_topk_swa_indices(args.lists)
