"""Hidden states of an attention layer: checked, borrowed, and returned in the caller's framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import dlpack, streams


def attend(
    run: Callable[[Any, Any, Any], None],
    hidden_states: Any,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    topk_indices: Any,
    out: Any,
    stream: Any,
) -> Any:
    """Call run(hidden_states, topk_indices, out) with NumPy or CuPy arrays on the caller's stream; returns out.

    shape, dtype  of hidden_states and of out, which is allocated if None
    topk_indices  any array, or None

    Raises TypeError or ValueError for hidden states or an out of another shape or dtype.
    """
    x = dlpack.borrow(hidden_states, "hidden_states")
    framework = dlpack.framework_of(hidden_states)
    if x.dtype != dtype:
        raise TypeError(f"hidden_states: got dtype {x.dtype}, expected {dtype}")
    if x.shape != shape:
        raise ValueError(f"hidden_states: got shape {tuple(x.shape)}, expected {list(shape)}")
    result = None if out is None else dlpack.borrow(out, "out", writable=True)
    if result is not None and (result.shape != x.shape or result.dtype != x.dtype):
        raise ValueError(f"out: got {result.dtype} {list(result.shape)}, expected {x.dtype} {list(x.shape)}")
    with streams.callers(x, framework, stream):
        if result is None:
            result = dlpack.empty(x.shape, x.dtype, x)
        given = None if topk_indices is None else dlpack.borrow(topk_indices, "topk_indices")
        run(x, given, result)
    return dlpack.give(result, framework) if out is None else out
