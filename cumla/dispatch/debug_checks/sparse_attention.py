"""Checks of `cumla.debug` for kernels of sparse attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kernels.types.segments import Pages
from .values import check_indices, check_range, check_scale


def sparse_mla_decode(arguments: Any) -> None:
    check_scale(arguments.softmax_scale, arguments.q.shape[-1])
    for prefix, (pages, indices, lengths) in zip(("", "extra_"), arguments.segments, strict=False):
        batch, queries, entries = indices.shape
        used = np.full((batch, queries), entries)
        if lengths is not None:
            used = check_range(f"{prefix}topk_length", lengths, 0, entries)
        for i in range(queries):
            of = f"query {i} of request" if queries > 1 else "query"
            check_indices(f"{prefix}indices", indices[:, i], used[:, i], pages.num_slots, of)


def sparse_mla_prefill(arguments: Any) -> None:
    check_scale(arguments.softmax_scale, arguments.q.shape[-1])
    used, entries = np.full(len(arguments.indices), arguments.indices.shape[1]), arguments.indices.shape[1]
    if arguments.topk_length is not None:
        used = check_range("topk_length", arguments.topk_length, 0, entries, "query")
    rows = arguments.kv.num_slots if isinstance(arguments.kv, Pages) else len(arguments.kv)
    check_indices("indices", arguments.indices, used, rows)
