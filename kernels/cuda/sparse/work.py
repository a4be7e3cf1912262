"""The work of one attention call as csrc/common/sparse/work.cuh sees it, and its division among thread blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...types.plan import DecodePlan, Workspace, aligned_bytes
from ...types.segments import V_DIM, Segment
from ..compile import kernel
from ..device import device_sms
from ..launch import pointer, strides
from . import division as dividing
from .division import COSTS, MAX_SHARES, MOST_DEALT, UNDIVIDED, Costs, Division
from .problem import NO_LIST, List, SparseProblem

HEADS, BLOCK = 64, 64  # of a tile (unless a kernel's are lower), as in common/sparse/work.cuh
LOWEST_HEADS = 16  # of a tile
PLAN_THREADS = 1024

STARTS = ("starts", "starts of graphs")  # names of `starts`, outside of a capture and in one
# Parts of tiles that the exact kernel has room for, their size (Part of common/sparse/exact_mma.cuh), and its counters.
EXACT_SLOTS, EXACT_PART_BYTES = 128, 33024
EXACT_COUNTERS = EXACT_SLOTS + 3  # its participants, the parts of each slot, its next item, whether any tile is marked
LEAST_TILES = 1 << 14  # to have room for, so that a plan's memory need not grow


class Memory(NamedTuple):
    """What the kernels of one call use beside its arguments: flat arrays that are at least as large as said.

    starts       int32 [2 * (MAX_SHARES + 1) + MOST_DEALT + 1]: tile and block at which each share begins; tiles in the
                 order in which shares have them; whether any tile is split
    partial_out  float32 [2 * shares, tile_heads * 512], parts of tiles that are cut; None where none is
    partial_lse  float32 [2 * shares, tile_heads]
    exact_parts  float32 [EXACT_SLOTS, EXACT_PART_BYTES / 4]: of tiles that the exact kernel does
    unsafe       int32 [EXACT_COUNTERS + tiles], zero between calls: the exact kernel's counters, which tiles it must do
    """

    starts: Any
    partial_out: Any
    partial_lse: Any
    exact_parts: Any
    unsafe: Any


class Work(NamedTuple):
    """The arguments of one call: q [b, s_q, h, d], out [b, s_q, h, 512], strides in elements.

    tile_heads  heads that the kernel chosen for it takes at a time
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
    def groups(self) -> int:
        return -(-int(self.q.shape[2]) // self.tile_heads)

    @property
    def tiles(self) -> int:
        return int(self.q.shape[0]) * int(self.q.shape[1]) * self.groups

    @property
    def ragged(self) -> bool:
        """Whether lists may have fewer keys than they have room for."""
        return any(segment.lengths is not None for segment in self.segments)

    @property
    def most_blocks(self) -> int:
        """Blocks of a tile whose lists are as long as they can be."""
        return max(1, sum(-(-segment.indices.shape[2] // BLOCK) for segment in self.segments))

    def numbers(self, memory: Memory | None, division: Division = UNDIVIDED) -> tuple[Any, ...]:
        """A SparseProblem of sparse/work.cuh, member after member; without memory and division for the exact one."""
        batch, s_q, heads, _ = self.q.shape
        first, *rest = (_list(segment) for segment in self.segments)
        q_strides, out_strides = strides(self.q), strides(self.out)
        return SparseProblem(
            q=self.q.data.ptr, q_stride_b=q_strides[0], q_stride_s=q_strides[1], q_stride_h=q_strides[2],
            lists=(first, rest[0] if rest else NO_LIST),
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
            shares=division.shares, **self._cut(division),
            softmax_scale=self.softmax_scale,
        ).numbers()  # fmt: skip

    def _cut(self, division: Division) -> dict[str, int]:
        """The members of a SparseProblem that say where shares begin."""
        names = ("cut_tiles", "cut_shares", "cut_length", "cut_rest", "cut_units", "cut_inverse")
        _, planned, cut, parts, together = division
        if planned or not division.shares:
            return dict.fromkeys(names, 0)
        tiles, shares = (1, parts) if parts else (self.tiles, division.shares)
        if not parts and self.max_logits is None and shares % self.groups == 0:
            # Alike for each group of heads (SparseProblem::by_group): their shares read the same rows at the same time.
            tiles, shares = tiles // self.groups, shares // self.groups
        units = self.most_blocks if cut or together else 1
        length, rest = divmod(tiles * units, shares)
        inverse = -(-(1 << 32) // shares) if shares > 1 else 0
        return dict(zip(names, (tiles, shares, length, rest, units, inverse), strict=True))


def _list(segment: Segment) -> List:
    (pages, block_size, _), indices, lengths = segment
    stride_b, stride_s, _ = strides(indices)
    length_stride_b, length_stride_s = (0, 0) if lengths is None else strides(lengths)
    return List(
        pages=pages.data.ptr, page_stride=pages.strides[0],
        indices=indices.data.ptr, indices_stride_b=stride_b, indices_stride_s=stride_s,
        lengths=pointer(lengths), lengths_stride_b=length_stride_b, lengths_stride_s=length_stride_s,
        num_slots=min(segment.pages.num_slots, dividing.INT32_LIMIT), block_size=block_size,
        block_shift=block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1, topk=indices.shape[2],
    )  # fmt: skip


def divide(
    work: Work, may_cut: bool, max_shares: int, costs: Costs = COSTS, clusters: tuple[tuple[int, int], ...] = ()
) -> Division:
    """How to spread work over at most `max_shares` thread blocks."""
    return dividing.divide(work.tiles, work.most_blocks, work.ragged, may_cut, max_shares, costs, clusters)[0]


def tile_heads(work: Work, may_cut: bool, max_shares: int, clusters: tuple[tuple[int, int], ...] = ()) -> int:
    """How many heads Hopper's decode kernel takes at a time: fewer tiles of more heads, or more that are done sooner.

    may_cut  whether results may depend on what else there is to do; of tiles of other heights they do
    """
    batch, s_q, heads, _ = work.q.shape
    return dividing.tile_heads(batch * s_q, heads, work.most_blocks, may_cut, max_shares, clusters)


def memory_for(plan: DecodePlan | None, work: Work, division: Division, capture: int) -> Memory:
    """The plan's memory, made or enlarged where it must be, or memory for this call alone.

    capture  the graph that is being captured, or 0: graphs plan for themselves, in a place that no eager call uses
    """
    device = work.q.device.id
    if plan is None:
        workspace, tiles, rows, cut = Workspace(), work.tiles, division.shares * work.tile_heads, division.cut
    else:
        # As much for tiles of any height; and what is given is used in one order: more tiles than before are more
        # of the same place.
        workspace, rows = plan.workspace, max(division.shares * work.tile_heads, device_sms(device) * HEADS)
        given = workspace.memory is not None
        tiles, cut = work.tiles if given else max(work.tiles, LEAST_TILES), division.cut or given
    sizes = _sizes(tiles, rows)
    starts = [workspace.array(name, sizes.starts, np.int32, work.q) for name in STARTS]
    return Memory(
        starts[capture > 0],
        workspace.array("partial_out", sizes.partial_out, np.float32, work.q) if cut else None,
        workspace.array("partial_lse", sizes.partial_lse, np.float32, work.q) if cut else None,
        workspace.array("exact_parts", sizes.exact_parts, np.float32, work.q),
        workspace.array("unsafe", sizes.unsafe, np.int32, work.q, clear),
    )


def clear(words: Any) -> None:
    """Make an int32 array zero."""
    kernel("common/clear.cu", "clear")((-(-len(words) // 256),), (256,), (words, len(words)), overlap=True)


@functools.lru_cache(maxsize=1024)
def workspace_bytes(tiles: int, shares: int) -> int:
    """What a call of `tiles` tiles (tokens times groups of 64 heads) on a device of `shares` SMs needs at most.

    Kernels whose tiles are lower have more of them and up to two thread blocks an SM.
    """
    sizes = _sizes(tiles * (HEADS // LOWEST_HEADS), shares * HEADS)
    return sum(aligned_bytes(4 * size) for size in (*sizes, *[sizes.starts] * (len(STARTS) - 1)))


@functools.lru_cache(maxsize=1024)
def _sizes(tiles: int, rows: int) -> Memory:
    """Elements, of four bytes, of a Memory's arrays, for so many heads of all shares."""
    starts, parts = 2 * (MAX_SHARES + 1) + MOST_DEALT + 1, EXACT_SLOTS * EXACT_PART_BYTES // 4
    return Memory(starts, 2 * rows * V_DIM, 2 * rows, parts, EXACT_COUNTERS + tiles)


def plan_shares(
    plan: DecodePlan | None, work: Work, division: Division, memory: Memory, problem: tuple[Any, ...], capture: int
) -> None:
    """Decide on the device where shares begin, unless it follows from the shape or the plan has it already."""
    if plan is not None:
        widths = (segment.indices.shape[2] for segment in work.segments)
        shape, name = (*work.q.shape[:2], work.groups, *division, *widths), STARTS[capture > 0]
        if plan.made_for == shape and plan.is_made(name, capture):
            return
        plan.made(shape, name, capture)
    if division.planned:
        kernel("common/sparse/plan.cu", "plan_decode")((1,), (PLAN_THREADS,), (*problem, memory.starts, division.cut))
