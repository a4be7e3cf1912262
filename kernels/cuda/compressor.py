"""The compressor."""

from collections.abc import Sequence
from typing import Any

from ..types.compressor import Compression, CompressorRows
from .compile import kernel
from .constants import constant
from .device import has_clusters
from .launch import C_NAMES, is_aligned, strides

MOST_AHEAD = 8  # positions that a thread loads before it uses the first
# CTAs that split a long window's channels, and groups in each that split its positions: for few rows, and for many (at
# a time an H200 runs 30 clusters of 8 with two CTAs per SM, or 60 clusters of 4). Rows are bit-identical.
CLUSTER_OF_FEW, CLUSTER_OF_MANY = (8, 16), (4, 8)
MOST_CLUSTERS_OF_FEW = 16
SOURCE = "common/compressor.cu"
MOST_THREADS, MOST_GROUPS = 512, 8  # per CTA
MOST_TOGETHER, MOST_TOGETHER_OF_MANY = 32, 128  # tokens of a pooling CTA (at most 128), and of a cluster for many rows
MOST_SAVED_TOGETHER = 4  # tokens of a warp
# Pooling CTAs (or clusters) up to which each takes one token.
FEW_OF_SHORT, FEW_OF_LONG = 256, 16
FEW_SAVING = 128  # saving CTAs for long windows: they run at the same time as the pooling CTAs


def compress_and_insert(compressors: Sequence[CompressorRows], step: Compression) -> None:
    first = compressors[0]
    window = first.position_bias.shape[1] // first.pages.layout.head_dim * step.compress_ratio
    if len(compressors) == 2 and window <= MOST_AHEAD and first.pages.layout.head_dim == 512:
        _launch(first, compressors[1], step)
        return
    for rows in compressors:
        _launch(rows, None, step)


def _launch(rows: CompressorRows, second: CompressorRows | None, step: Compression) -> None:
    tokens, ratio, dim = len(rows.kv_score), step.compress_ratio, rows.pages.layout.head_dim
    state_slots, table, slots, positions = step.state_slots, step.state_block_table, step.slots, step.positions
    cos_sin, starts, coff = step.cos_sin, step.query_start_loc, rows.position_bias.shape[1] // dim
    ahead = min(MOST_AHEAD, coff * ratio)
    rounds, parts = -(-coff * ratio // ahead), 1
    most_together = MOST_TOGETHER
    if rounds > 1 and dim == 512 and has_clusters(rows.kv_score.device.id):
        one_wave = -(-tokens // min(ratio, MOST_TOGETHER)) <= MOST_CLUSTERS_OF_FEW
        parts, groups = CLUSTER_OF_FEW if one_wave else CLUSTER_OF_MANY
        most_together = MOST_TOGETHER if one_wave else MOST_TOGETHER_OF_MANY
    else:
        groups = min(MOST_GROUPS, MOST_THREADS * 4 // dim, 1 << (rounds - 1).bit_length())
        if groups > 1:  # the merge takes registers
            ahead //= 2
    # In a prompt, one token in `ratio` completes a row.
    together = min(ratio, most_together, -(-tokens // (FEW_OF_SHORT if rounds == 1 else FEW_OF_LONG)))
    threads = groups * dim // (4 * parts)
    warps = threads // 32
    saved_together = max(
        1, min(MOST_SAVED_TOGETHER, len(state_slots) // ((FEW_OF_SHORT if parts == 1 else FEW_SAVING) * warps))
    )
    blocks = -(-tokens // together)
    saving = -(-len(state_slots) // (saved_together * warps * parts)) * parts  # whole clusters
    both = [rows] if second is None else [rows, second]
    kernel(
        SOURCE,
        "compress_and_insert",
        LAYOUT=rows.pages.layout.name,
        SECOND=both[-1].pages.layout.name,
        INPUT=C_NAMES[rows.kv_score.dtype.name],
        WEIGHT=C_NAMES[rows.norm_weight.dtype.name],
        STATE_SLOT=C_NAMES[state_slots.dtype.name],
        SLOT=C_NAMES[slots.dtype.name],
        POSITION=C_NAMES[positions.dtype.name],
        RATIO=ratio,
        COFF=coff,
        PARTS=parts,
        GROUPS=groups,
        AHEAD=ahead,
        WIDE=int(is_aligned(*(array for own in both for array in (own.kv_score, own.state, own.position_bias)))),
        ALIGNED=int(is_aligned(*(own.pages.bytes for own in both))),
    )(
        (blocks * parts + (len(both) - 1) * blocks + len(both) * saving,),
        (threads,),
        (
            *_struct(rows), *_struct(both[-1]),
            state_slots, slots, positions, step.token_to_req, starts, table, strides(table)[0], cos_sin,
            strides(cos_sin)[0], tokens, len(state_slots), len(slots), len(starts) - 1, len(table), table.shape[1],
            rows.state.shape[1], len(cos_sin), cos_sin.shape[1], together, saved_together, step.eps, saving,
            (len(both) - 1) * saving, blocks * parts,
        ),
        shared_mem=constant(SOURCE, "SHARED_BYTES", LAYOUT=rows.pages.layout, PARTS=parts, GROUPS=groups),
        overlap=True,
    )  # fmt: skip


def _struct(own: CompressorRows) -> tuple[Any, ...]:
    """`Rows` of common/compressor.cu."""
    state_page, state_row, _ = strides(own.state)
    pages = own.pages
    return (
        own.kv_score, strides(own.kv_score)[0], own.position_bias, strides(own.position_bias)[0], own.norm_weight,
        own.state, state_page, state_row, len(own.state) * own.state.shape[1], pages.bytes, pages.bytes.strides[0],
        pages.num_slots, pages.block_size, 0,
    )  # fmt: skip
