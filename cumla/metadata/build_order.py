"""The two orders of a builder's arguments: `build(common_prefix_len, batch)`, as in vLLM, or `build(batch)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..dispatch.values import check_flags, check_integers, check_kind
from .batch import CommonAttentionMetadata

R = TypeVar("R")


def batch_of(common_prefix_len: Any, common_attn_metadata: Any) -> CommonAttentionMetadata:
    """The batch of a call in either order. Raises TypeError or ValueError for other arguments."""
    if isinstance(common_prefix_len, CommonAttentionMetadata):
        if common_attn_metadata is not None:
            kind = type(common_attn_metadata).__name__
            raise TypeError(f"common_attn_metadata: got {kind} after a batch, expected build(batch) or build(0, batch)")
        return common_prefix_len
    check_is_batch("common_attn_metadata", common_attn_metadata)
    check_integers(0, common_prefix_len=common_prefix_len)
    return common_attn_metadata


def takes_prefix_len(build: Callable[..., R]) -> Callable[..., R]:
    """Let `build(batch, ...)` of a step's builder be called as `build(common_prefix_len, batch, ...)`, too."""

    @functools.wraps(build)
    def call(builder: Any, *arguments: Any, **options: Any) -> R:
        if "common_attn_metadata" in options:
            options["batch"] = options.pop("common_attn_metadata")
        check_flags(fast_build=options.pop("fast_build", False))
        prefix = options.pop("common_prefix_len", 0)
        named = "batch" in options
        if (named and arguments) or (len(arguments) > 1 and is_prefix(*arguments[:2])):
            prefix, *arguments = arguments
        check_integers(0, common_prefix_len=prefix)
        check_is_batch("batch", options["batch"] if named else arguments[0] if arguments else None)
        return build(builder, *arguments, **options)

    return call


def is_prefix(first: Any, second: Any) -> bool:
    """Whether the first two arguments are a prefix's length and a batch."""
    return isinstance(first, (int, np.integer)) or isinstance(second, CommonAttentionMetadata)


def check_is_batch(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a CommonAttentionMetadata of cumla."""
    if not isinstance(value, CommonAttentionMetadata) and hasattr(value, "query_start_loc"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{name}: got {kind}, expected cumla's CommonAttentionMetadata, as from cumla.interop.vllm.from_vllm"
        )
    check_kind(CommonAttentionMetadata, **{name: value})
