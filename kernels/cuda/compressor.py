"""The compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types.compressor import Compression, CompressorRows
from .compile import kernel
from .device import has_clusters
from .launch import C_NAMES, is_aligned, strides

MOST_AHEAD = 8  # positions that a thread reads before it needs the first
MOST_GROUPS = 8  # threads that share a window's positions
CLUSTER = 4  # thread blocks that share a long window's channels, where there are clusters
MOST_THREADS = 512
FEW_TOKENS = 256  # a thread block each


def compress_and_insert(
    compressors: Sequence[CompressorRows],
    state_slots: Any,
    state_block_table: Any,
    slot_mapping: Any,
    positions: Any,
    token_to_req: Any,
    query_start_loc: Any,
    compression: Compression,
) -> None:
    step = state_slots, state_block_table, slot_mapping, positions, token_to_req, query_start_loc, compression
    first = compressors[0]
    window = first.position_bias.shape[1] // first.pages.layout.head_dim * compression.compress_ratio
    if len(compressors) == 2 and window <= MOST_AHEAD and first.pages.layout.head_dim == 512:
        _launch(first, compressors[1], *step)
        return
    for rows in compressors:
        _launch(rows, None, *step)


def _launch(
    rows: CompressorRows,
    second: CompressorRows | None,
    state_slots: Any,
    state_block_table: Any,
    slot_mapping: Any,
    positions: Any,
    token_to_req: Any,
    query_start_loc: Any,
    compression: Compression,
) -> None:
    tokens, ratio, dim = len(rows.kv_score), compression.compress_ratio, rows.pages.layout.head_dim
    cos_sin, window = compression.cos_sin, rows.position_bias.shape[1] // dim * ratio
    ahead = min(MOST_AHEAD, window)
    groups = min(MOST_GROUPS, -(-window // ahead))
    parts = CLUSTER if groups > 1 and dim == 512 and has_clusters(rows.kv_score.device.id) else 1
    if groups * dim // (4 * parts) > MOST_THREADS:
        groups, ahead = MOST_THREADS * 4 // dim, ahead // 2
    # Of a prompt's tokens one in `ratio` completes a row.
    together = 1 if tokens <= FEW_TOKENS else min(ratio, 32)
    blocks = -(-tokens // together)
    saving = -(-len(state_slots) // (together * parts)) * parts  # whole clusters
    both = [rows] if second is None else [rows, second]
    kernel(
        "common/compressor.cu",
        "compress_and_insert",
        LAYOUT=rows.pages.layout.name,
        SECOND=both[-1].pages.layout.name,
        INPUT=C_NAMES[rows.kv_score.dtype.name],
        WEIGHT=C_NAMES[rows.norm_weight.dtype.name],
        STATE_SLOT=C_NAMES[state_slots.dtype.name],
        SLOT=C_NAMES[slot_mapping.dtype.name],
        POSITION=C_NAMES[positions.dtype.name],
        PARTS=parts,
        GROUPS=groups,
        AHEAD=ahead,
        TOKENS=together,
        WIDE=int(is_aligned(*(array for own in both for array in (own.kv_score, own.state, own.position_bias)))),
        ALIGNED=int(is_aligned(*(own.pages.bytes for own in both))),
    )(
        (blocks * parts + (len(both) - 1) * blocks + len(both) * saving,),
        (groups * dim // (4 * parts),),
        (
            *_struct(rows), *_struct(both[-1]),
            state_slots, slot_mapping, positions, token_to_req, query_start_loc, state_block_table,
            strides(state_block_table)[0], cos_sin, strides(cos_sin)[0], tokens, len(state_slots), len(slot_mapping),
            len(query_start_loc) - 1, len(state_block_table), state_block_table.shape[1], rows.state.shape[1],
            len(cos_sin), cos_sin.shape[1], ratio, compression.eps, 0,
            blocks * parts, (len(both) - 1) * blocks, saving,
        ),
        overlap=True,
    )  # fmt: skip


def _struct(own: CompressorRows) -> tuple[Any, ...]:
    """`Rows` of the source."""
    state_page, state_row, _ = strides(own.state)
    pages, dim = own.pages, own.pages.layout.head_dim
    return (
        own.kv_score, strides(own.kv_score)[0], own.position_bias, strides(own.position_bias)[0], own.norm_weight,
        own.state, state_page, state_row, len(own.state) * own.state.shape[1], pages.bytes, pages.bytes.strides[0],
        pages.num_slots, pages.block_size, own.kv_score.shape[1] // (2 * dim),
    )  # fmt: skip
