"""Checks of `cumla.debug` for kernels of dense attention."""

from __future__ import annotations

from typing import Any

from .values import check_cached, check_packed, check_range, check_scale


def dense_mla_decode(arguments: Any) -> None:
    check_scale(arguments.softmax_scale, arguments.q.shape[-1])
    check_cached(arguments, 0, check_range("cache_seqlens", arguments.cache_seqlens))


def mha_varlen(arguments: Any) -> None:
    check_scale(arguments.softmax_scale, arguments.q.shape[-1])
    check_packed("cu_seqlens_q", arguments.cu_seqlens_q, len(arguments.q), "q")
    check_packed("cu_seqlens_k", arguments.cu_seqlens_k, len(arguments.k), "k")
