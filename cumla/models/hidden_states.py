"""Hidden states of an attention layer: checked, borrowed, and returned in the caller's framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import dlpack, streams
from ..dispatch.call import Call, end_release


def attend(
    run: Callable[[Any, Any, Any], None],
    hidden_states: Any,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    topk_indices: Any,
    out: Any,
    stream: Any,
    early_release: bool = True,
) -> Any:
    """Call run(hidden_states, topk_indices, out) with NumPy or CuPy arrays on the caller's stream; returns out.

    Args:
        hidden_states: of any strides; copied if the last axis is not contiguous, as operations need it
        shape, dtype: of hidden_states and of out, which is allocated if None
        topk_indices: any array, or None
        early_release: whether a later kernel may start before the results are stored

    Raises TypeError or ValueError, before `run` is called, for hidden states or an out of another shape or dtype, and
    for an out that is read-only, on another device, or not contiguous in its last axis.
    """
    call = Call(stream=stream, early_release=early_release)
    argument = call.borrow("hidden_states", hidden_states)
    x, framework = argument.native, argument.framework
    if x.dtype != dtype:
        raise TypeError(f"hidden_states: got dtype {x.dtype}, expected {dtype}")
    call.check_shape("hidden_states", x.shape, shape)
    result = None if out is None else call.array("out", out, (dtype,), shape, writable=True)
    with streams.callers(x, framework, stream):
        if x.strides[-1] != x.itemsize:
            x = x.copy()
        if result is None:
            result = dlpack.empty(x.shape, x.dtype, x)
        indices = None if topk_indices is None else dlpack.borrow(topk_indices, "topk_indices")
        run(x, indices, result)
        if not early_release:
            end_release(x)
    return dlpack.give(result, framework) if out is None else out
