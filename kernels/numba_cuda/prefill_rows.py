"""Inputs of a prefill over gathered rows: rows in a workspace, and each token's list of rows."""

from ..types.prefill_rows import PrefillRows
from .indices import combine_topk_swa_indices
from .sparse_cache import dequantize_and_gather_k_cache


def gather_prefill_rows(given: PrefillRows) -> None:
    if given.compressed is not None:
        dequantize_and_gather_k_cache(given.compressed)
    dequantize_and_gather_k_cache(given.windows)
    combine_topk_swa_indices(given.lists)
