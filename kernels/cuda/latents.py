"""The compressor of V4.1."""

from ..types.compressor import LatentRows
from .compile import kernel
from .constants import constant
from .launch import C_NAMES, is_aligned, pointer, strides

THREADS = constant("common/latents.cu", "THREADS")


def compress_latents(rows: LatentRows) -> None:
    state, slots = rows.state, rows.slots
    requests, ratio = 0 if rows.query_start_loc is None else len(rows.query_start_loc) - 1, 1 if state is None else 2
    rings = (0, 0, 0, 0, 1)
    if state is not None:
        ring_stride, row_stride, _ = strides(state)
        rings = (state.data.ptr, ring_stride, row_stride, len(state) * state.shape[1], max(state.shape[1], 1))
    restart = () if rows.restart_rows is None else (rows.restart_rows,)
    kernel(
        "common/latents.cu",
        "compress_latents",
        INPUT=C_NAMES[rows.kv_score.dtype.name],
        WEIGHT=C_NAMES[rows.norm_weight.dtype.name],
        OUTPUT=C_NAMES[rows.latents.dtype.name],
        SLOT=C_NAMES[slots.dtype.name],
        POSITION="int64" if rows.positions is None else C_NAMES[rows.positions.dtype.name],
        RATIO=ratio,
        ROUND_POOLED=int(rows.round_pooled),
        WIDE=int(
            is_aligned(rows.kv_score, rows.norm_weight, rows.latents, *(() if state is None else (state,)), *restart)
        ),
    )(
        (requests + -(-len(slots) // ratio),),
        (THREADS,),
        (
            rows.kv_score, strides(rows.kv_score)[0], rows.norm_weight, slots, len(slots),
            rows.latents, strides(rows.latents)[0], pointer(rows.positions), pointer(rows.query_start_loc), requests,
            *rings, pointer(rows.restart_rows), strides(restart[0])[0] if restart else 0,
            pointer(rows.restart_positions), rows.eps,
        ),
        overlap=True,
    )  # fmt: skip
