"""The compressor."""

from __future__ import annotations

from typing import Any

from ..types.compressor import Compression
from ..types.segments import Pages
from .compile import kernel
from .device import has_clusters
from .launch import C_NAMES, is_aligned, strides

MOST_AHEAD = 8  # positions that a thread reads before it needs the first
MOST_GROUPS = 8  # threads that share a window's positions
CLUSTER = 4  # thread blocks that share a long window's channels, where there are clusters
MOST_THREADS = 512
FEW_TOKENS = 256  # a thread block each


def compress_and_insert(
    kv_score: Any,
    state: Any,
    state_slots: Any,
    state_block_table: Any,
    pages: Pages,
    slot_mapping: Any,
    positions: Any,
    token_to_req: Any,
    query_start_loc: Any,
    compression: Compression,
) -> None:
    dim = pages.layout.head_dim
    bias, weight, cos_sin = compression.position_bias, compression.norm_weight, compression.cos_sin
    state_page, state_row, _ = strides(state)
    tokens, ratio, coff = len(kv_score), compression.compress_ratio, kv_score.shape[1] // (2 * dim)
    window = coff * ratio
    ahead = min(MOST_AHEAD, window)
    groups = min(MOST_GROUPS, -(-window // ahead))
    parts = CLUSTER if groups > 1 and dim == 512 and has_clusters(kv_score.device.id) else 1
    if groups * dim // (4 * parts) > MOST_THREADS:
        groups, ahead = MOST_THREADS * 4 // dim, ahead // 2
    # Of a prompt's tokens one in `ratio` completes a row.
    together = 1 if tokens <= FEW_TOKENS else min(ratio, 32)
    pooling = -(-tokens // together) * parts
    saving = -(-len(state_slots) // (together * parts)) * parts  # whole clusters
    kernel(
        "common/compressor.cu",
        "compress_and_insert",
        LAYOUT=pages.layout.name,
        INPUT=C_NAMES[kv_score.dtype.name],
        WEIGHT=C_NAMES[weight.dtype.name],
        STATE_SLOT=C_NAMES[state_slots.dtype.name],
        SLOT=C_NAMES[slot_mapping.dtype.name],
        POSITION=C_NAMES[positions.dtype.name],
        PARTS=parts,
        GROUPS=groups,
        AHEAD=ahead,
        TOKENS=together,
        WIDE=int(is_aligned(kv_score, state, bias)),
        ALIGNED=int(is_aligned(pages.bytes)),
    )(
        (pooling + saving,),
        (groups * dim // (4 * parts),),
        (
            kv_score, strides(kv_score)[0], tokens, bias, strides(bias)[0], weight,
            state, state_page, state_row, len(state) * state.shape[1], state.shape[1], state_slots, len(state_slots),
            state_block_table, strides(state_block_table)[0], len(state_block_table), state_block_table.shape[1],
            pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size, slot_mapping, len(slot_mapping),
            positions, token_to_req, query_start_loc, len(query_start_loc) - 1, cos_sin, strides(cos_sin)[0],
            len(cos_sin), cos_sin.shape[1], ratio, coff, compression.eps,
            pooling,
        ),
        overlap=True,
    )  # fmt: skip
