"""The compressor of V4.1."""

from typing import Any

from .compile import kernel
from .launch import C_NAMES, pointer, strides

WARPS = 4  # per CTA, as in common/latents.cu


def compress_latents(
    kv_score: Any,
    norm_weight: Any,
    slots: Any,
    latents: Any,
    positions: Any | None,
    query_start_loc: Any | None,
    state: Any | None,
    eps: float,
    round_pooled: bool,
) -> None:
    requests = 0 if query_start_loc is None else len(query_start_loc) - 1
    rings = (0, 0, 0, 0, 1)
    if state is not None:
        ring_stride, row_stride, _ = strides(state)
        rings = (state.data.ptr, ring_stride, row_stride, len(state) * state.shape[1], max(state.shape[1], 1))
    kernel(
        "common/latents.cu",
        "compress_latents",
        INPUT=C_NAMES[kv_score.dtype.name],
        WEIGHT=C_NAMES[norm_weight.dtype.name],
        OUTPUT=C_NAMES[latents.dtype.name],
        SLOT=C_NAMES[slots.dtype.name],
        POSITION="int64" if positions is None else C_NAMES[positions.dtype.name],
        RATIO=1 if state is None else 2,
        ROUND_POOLED=int(round_pooled),
    )(
        (requests + -(-len(slots) // WARPS),),
        (32 * WARPS,),
        (
            kv_score, strides(kv_score)[0], norm_weight, slots, len(slots), latents, strides(latents)[0],
            pointer(positions), pointer(query_start_loc), requests, *rings, eps,
        ),
        overlap=True,
    )  # fmt: skip
