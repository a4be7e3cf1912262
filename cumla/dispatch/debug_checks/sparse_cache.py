"""Checks of `cumla.debug` for kernels of the paged caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import check_cached, check_packed, check_range, check_slots


def quantize_and_insert_k_cache(arguments: Any) -> None:
    check_slots("slot_mapping", arguments.slot_mapping, arguments.pages.num_slots)


def dequantize_and_gather_k_cache(arguments: Any) -> None:
    end = check_range("seq_lens", arguments.seq_lens) // arguments.compress_ratio
    lens = end if arguments.gather_lens is None else check_range("gather_lens", arguments.gather_lens, 0, end)
    check_cached(arguments, end - lens, end)


def cp_gather_indexer_k_quant_cache(arguments: Any) -> None:
    check_cached(
        arguments, 0, np.diff(check_packed("cu_seq_lens", arguments.cu_seq_lens, len(arguments.dst_k), "dst_k"))
    )
