"""Checks of `cumla.debug` for kernels of a prefill's rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .indices import combine_topk_swa_indices
from .sparse_cache import dequantize_and_gather_k_cache


def gather_prefill_rows(arguments: Any) -> None:
    for gather in (arguments.windows, arguments.compressed):
        if gather is not None:
            dequantize_and_gather_k_cache(SimpleNamespace(**gather._asdict(), first=0))
    combine_topk_swa_indices(SimpleNamespace(**arguments.lists._asdict(), first=0))
