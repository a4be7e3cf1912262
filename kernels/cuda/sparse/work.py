"""The work of one attention call in the structs of csrc/common/sparse/work.cuh, and its division among CTAs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...types.plan import DecodePlan, aligned_bytes
from ...types.segments import V_DIM, Segment
from ..compile import kernel
from ..constants import constant
from ..device import device_sms
from ..launch import pointer, strides
from . import division as dividing
from .division import COSTS, UNDIVIDED, Costs, Division
from .formats import LATENT, Formats

HEADS = 64  # heads of a tile; some kernels' tiles have fewer
BLOCK, SPLITS_AT = (constant("common/sparse/work.cuh", name) for name in ("BLOCK", "SPLITS_AT"))
LOWEST_HEADS = 16  # heads of the smallest tile
PLAN_THREADS = constant("common/sparse/plan.cu", "THREADS")

STARTS = DecodePlan.arrays  # names of `starts`, outside a capture and inside
# The exact kernel's partial results, their size, and its counters.
EXACT_SLOTS, EXACT_PART_BYTES = 128, constant("common/sparse/exact_mma.cuh", "PART_BYTES")
EXACT_COUNTERS = EXACT_SLOTS + 3  # participants, parts of each slot, next work item, whether any tile is flagged
LEAST_TILES = 1 << 14  # least tiles to allocate for, so that a plan's memory rarely grows


class PackedSegment(NamedTuple):
    """The keys of one cache; addresses, strides in elements, counts. NO_SEGMENT: none."""

    pages: int
    page_stride: int
    indices: int
    indices_stride_b: int
    indices_stride_s: int
    lengths: int
    lengths_stride_b: int
    lengths_stride_s: int
    num_slots: int
    block_size: int
    block_shift: int
    topk: int


NO_SEGMENT = PackedSegment(
    pages=0, page_stride=0, indices=0, indices_stride_b=0, indices_stride_s=0, lengths=0, lengths_stride_b=0,
    lengths_stride_s=0, num_slots=0, block_size=1, block_shift=0, topk=0,
)  # fmt: skip


class SparseProblem(NamedTuple):
    """The struct of csrc/common/sparse/work.cuh, members in the struct's order: addresses, strides in elements, counts,
    and starts of work ranges.
    """

    q: int
    q_stride_b: int
    q_stride_s: int
    q_stride_h: int
    segments: tuple[PackedSegment, PackedSegment]
    attn_sink: int
    out: int
    out_stride_b: int
    out_stride_s: int
    out_stride_h: int
    lse: int
    lse_stride_b: int
    lse_stride_h: int
    lse_stride_s: int
    max_logits: int
    max_stride_b: int
    max_stride_h: int
    starts: int
    partial_out: int
    partial_lse: int
    unsafe: int
    batch: int
    s_q: int
    heads: int
    groups: int
    ranges: int
    period_tiles: int
    period_ranges: int
    range_length: int
    range_rest: int
    tile_units: int
    period_inverse: int
    softmax_scale: float

    def packed_arguments(self) -> tuple[Any, ...]:
        """All members in one tuple, the arguments of a launch."""
        at = self._fields.index("segments")
        first, second = self.segments
        return (*self[:at], *first, *second, *self[at + 1 :])


class Buffers(NamedTuple):
    """Memory that the kernels of one call use in addition to its arguments: flat arrays of at least these sizes.

    Attributes:
        starts: int32 [SPLITS_AT + 1]: tile and block at which each work range begins; tiles in the order of the ranges;
            whether any tile is split
        partial_out: float32 [2 * ranges, tile_heads * 512], partial results of split tiles; None if no tile is split
        partial_lse: float32 [2 * ranges, tile_heads]
        exact_parts: float32 [EXACT_SLOTS, EXACT_PART_BYTES / 4]: partial results of tiles that the exact kernel
            computes
        unsafe: int32 [EXACT_COUNTERS + tiles], zero between calls: the exact kernel's counters, flags of tiles
    """

    starts: Any
    partial_out: Any
    partial_lse: Any
    exact_parts: Any
    unsafe: Any


class AttentionCall(NamedTuple):
    """The arguments of one call: q [b, s_q, h, d], out [b, s_q, h, 512], strides in elements.

    Attributes:
        tile_heads: heads per tile of the chosen kernel
    """

    q: Any
    segments: Sequence[Segment]
    attn_sink: Any | None
    softmax_scale: float
    out: Any
    max_logits: Any | None
    max_strides: tuple[int, ...]
    lse: Any
    lse_strides: tuple[int, ...]
    tile_heads: int = HEADS

    @property
    def formats(self) -> Formats:
        """The formats of both caches; with one list, the list's format twice."""
        return self.segments[0].pages.layout, self.segments[-1].pages.layout

    @property
    def groups(self) -> int:
        return -(-int(self.q.shape[2]) // self.tile_heads)

    @property
    def tiles(self) -> int:
        return int(self.q.shape[0]) * int(self.q.shape[1]) * self.groups

    @property
    def has_selection(self) -> bool:
        """Whether lists have selected rows, in addition to a window or without one."""
        return len(self.segments) > 1 or self.formats[0] in LATENT

    @property
    def ragged(self) -> bool:
        """Whether lists may have fewer keys than their width."""
        return any(segment.lengths is not None for segment in self.segments)

    @property
    def most_blocks(self) -> int:
        """Blocks of a tile whose lists have maximum length."""
        return max(1, sum(-(-segment.indices.shape[2] // BLOCK) for segment in self.segments))

    def packed_arguments(self, memory: Buffers | None, division: Division = UNDIVIDED) -> tuple[Any, ...]:
        """Packed members of a SparseProblem (sparse/work.cuh). The exact kernel needs neither memory nor division."""
        batch, s_q, heads, _ = self.q.shape
        first, *rest = (_segment(segment) for segment in self.segments)
        q_strides, out_strides = strides(self.q), strides(self.out)
        return SparseProblem(
            q=self.q.data.ptr, q_stride_b=q_strides[0], q_stride_s=q_strides[1], q_stride_h=q_strides[2],
            segments=(first, rest[0] if rest else NO_SEGMENT),
            attn_sink=pointer(self.attn_sink),
            out=self.out.data.ptr,
            out_stride_b=out_strides[0], out_stride_s=out_strides[1], out_stride_h=out_strides[2],
            lse=self.lse.data.ptr,
            lse_stride_b=self.lse_strides[0], lse_stride_h=self.lse_strides[1], lse_stride_s=self.lse_strides[2],
            max_logits=pointer(self.max_logits), max_stride_b=self.max_strides[0], max_stride_h=self.max_strides[1],
            starts=pointer(memory.starts) if memory is not None and division.planned else 0,
            partial_out=0 if memory is None else pointer(memory.partial_out),
            partial_lse=0 if memory is None else pointer(memory.partial_lse),
            unsafe=0 if memory is None else pointer(memory.unsafe) + 4 * EXACT_COUNTERS,
            batch=batch, s_q=s_q, heads=heads, groups=self.groups,
            ranges=division.ranges, **self._period(division),
            softmax_scale=self.softmax_scale,
        ).packed_arguments()  # fmt: skip

    def _period(self, division: Division) -> dict[str, int]:
        """The members of a SparseProblem that define where work ranges begin."""
        names = ("period_tiles", "period_ranges", "range_length", "range_rest", "tile_units", "period_inverse")
        _, planned, split, parts, cluster = division
        if planned or not division.ranges:
            return dict.fromkeys(names, 0)
        tiles, ranges = (1, parts) if parts else (self.tiles, division.ranges)
        if not parts and self.max_logits is None and ranges % self.groups == 0:
            # Equal ranges for each group of heads (SparseProblem::by_group): their CTAs read the same rows in parallel.
            tiles, ranges = tiles // self.groups, ranges // self.groups
        units = self.most_blocks if split or cluster else 1
        length, rest = divmod(tiles * units, ranges)
        inverse = -(-(1 << 32) // ranges) if ranges > 1 else 0
        return dict(zip(names, (tiles, ranges, length, rest, units, inverse), strict=True))


def _segment(segment: Segment) -> PackedSegment:
    (pages, block_size, _), indices, lengths = segment
    stride_b, stride_s, _ = strides(indices)
    length_stride_b, length_stride_s = (0, 0) if lengths is None else strides(lengths)
    return PackedSegment(
        pages=pages.data.ptr, page_stride=pages.strides[0],
        indices=indices.data.ptr, indices_stride_b=stride_b, indices_stride_s=stride_s,
        lengths=pointer(lengths), lengths_stride_b=length_stride_b, lengths_stride_s=length_stride_s,
        num_slots=min(segment.pages.num_slots, dividing.INT32_LIMIT), block_size=block_size,
        block_shift=block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1, topk=indices.shape[2],
    )  # fmt: skip


def divide(
    work: AttentionCall,
    may_split: bool,
    max_ranges: int,
    costs: Costs = COSTS,
    clusters: tuple[tuple[int, int], ...] = (),
) -> Division:
    """The division of a call over at most `max_ranges` CTAs. Without may_split no tile's splits depend on the batch."""
    if not may_split:
        fixed = dividing.invariant(work.tiles, work.has_selection, clusters)
        if fixed is not None:
            return fixed
    return dividing.divide(work.tiles, work.most_blocks, work.ragged, may_split, max_ranges, costs, clusters)[0]


def tile_heads(
    work: AttentionCall, may_split: bool, max_ranges: int, clusters: tuple[tuple[int, int], ...] = ()
) -> int:
    """Heads per tile of Hopper's decode kernel: fewer tiles of more heads, or more tiles that end earlier.

    Args:
        may_split: whether results may depend on the rest of the batch; the tile height changes them
    """
    batch, s_q, heads, _ = work.q.shape
    return dividing.tile_heads(batch * s_q, heads, work.most_blocks, may_split, max_ranges, clusters)


def memory_for(plan: DecodePlan, work: AttentionCall, division: Division, capture: int) -> Buffers:
    """The plan's memory, allocated or enlarged if necessary.

    Args:
        capture: the graph that is being captured, or 0: graphs have their own plan, in memory that no eager call uses
    """
    device = work.q.device.id
    # The size is independent of the tiles' height. Buffers are taken from the workspace in a fixed order: more tiles
    # use more of the same memory.
    with_parts = 0 if division.cluster else division.ranges
    workspace, rows = plan.workspace, max(with_parts * work.tile_heads, device_sms(device) * HEADS)
    is_bounded = workspace.memory is not None
    tiles, split = work.tiles if is_bounded else max(work.tiles, LEAST_TILES), division.split or is_bounded
    sizes = _sizes(tiles, rows)
    starts = [workspace.array(name, sizes.starts, np.int32, work.q) for name in STARTS]
    return Buffers(
        starts[capture > 0],
        workspace.array("partial_out", sizes.partial_out, np.float32, work.q) if split else None,
        workspace.array("partial_lse", sizes.partial_lse, np.float32, work.q) if split else None,
        workspace.array("exact_parts", sizes.exact_parts, np.float32, work.q),
        workspace.array("unsafe", sizes.unsafe, np.int32, work.q, clear),
    )


def clear(words: Any) -> None:
    """Set an int32 array to zero."""
    kernel("common/clear.cu", "clear")((-(-len(words) // 256),), (256,), (words, len(words)), overlap=True)


@functools.lru_cache(maxsize=1024)
def workspace_bytes(tiles: int, ranges: int) -> int:
    """Most bytes for a call of `tiles` tiles (tokens times groups of 64 heads) on a device of `ranges` SMs.

    Kernels whose tiles have fewer heads have more tiles and up to two CTAs per SM.
    """
    sizes = _sizes(tiles * (HEADS // LOWEST_HEADS), ranges * HEADS)
    return sum(aligned_bytes(4 * size) for size in (*sizes, *[sizes.starts] * (len(STARTS) - 1)))


@functools.lru_cache(maxsize=1024)
def _sizes(tiles: int, rows: int) -> Buffers:
    """Four-byte elements of the arrays in Buffers, for `rows` heads of all work ranges."""
    starts, parts = SPLITS_AT + 1, EXACT_SLOTS * EXACT_PART_BYTES // 4
    return Buffers(starts, 2 * rows * V_DIM, 2 * rows, parts, EXACT_COUNTERS + tiles)


def plan_ranges(
    plan: DecodePlan,
    work: AttentionCall,
    division: Division,
    memory: Buffers,
    problem: tuple[Any, ...],
    capture: int,
) -> None:
    """Compute the starts of work ranges on the device, unless the shape implies them or the plan has them already."""
    widths = (segment.indices.shape[2] for segment in work.segments)
    shape, name = (*work.q.shape[:2], work.groups, *division, *widths), STARTS[capture > 0]
    if plan.made_for == shape and plan.is_made(name, capture):
        return
    plan.made(shape, name, capture)
    if division.planned:
        kernel("common/sparse/plan.cu", "plan_decode")((1,), (PLAN_THREADS,), (*problem, memory.starts, division.split))
