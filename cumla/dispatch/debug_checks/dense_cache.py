"""Checks of `cumla.debug` for kernels of the dense caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from .values import check_cached, check_packed, check_range, check_slots


def concat_and_cache_mla(arguments: Any) -> None:
    check_slots("slot_mapping", arguments.slot_mapping, arguments.pages.num_slots)


def gather_cache(arguments: Any) -> None:
    lens = np.diff(check_packed("cu_seq_lens", arguments.cu_seq_lens, len(arguments.dst), "dst"))
    begin = np.zeros_like(lens) if arguments.seq_starts is None else check_range("seq_starts", arguments.seq_starts)
    check_cached(arguments, begin, begin + lens)
