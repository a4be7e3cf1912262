"""The work of one attention call as csrc/common/sparse/work.cuh sees it, and its division among thread blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np

from ...types.plan import DecodePlan
from ...types.segments import Segment
from ..compile import kernel
from ..launch import pointer, strides

HEADS, BLOCK, V_DIM = 64, 64, 512  # of a tile (unless a kernel's are lower), as in common/sparse/work.cuh
LOWEST_HEADS = 16  # of a tile
MAX_SHARES = 512  # as in common/sparse/combine.cu
PLAN_THREADS = 1024

# What the division is made by, in blocks, as in common/sparse/plan.cu (NOTES.md): reading a tile's Q and writing its
# result; writing a part and launching what puts parts together, which does so many a block's time; and the same where a
# share has parts of two tiles.
TILE_COST, CUT_COST, STRADDLE_COST = 2, 2, 5
PARTS_A_BLOCK = 64
LEAST_TILES = 1 << 14  # to have room for, so that a plan's memory need not grow
INT32_LIMIT = 2**31 - 1

NO_LIST = (0,) * 8 + (0, 1, 0, 0)


class Division(NamedTuple):
    """Who does what.

    shares   thread blocks, each with a run of blocks of work
    planned  lengths differ: where shares begin is decided on the device
    cut      shares may begin inside a tile
    parts    shares of each tile, where all have as many and no share has two; or 0
    """

    shares: int
    planned: bool
    cut: bool
    parts: int = 0


UNDIVIDED = Division(0, False, False)


class Memory(NamedTuple):
    """What the kernels of one call use beside its arguments.

    starts       int32 [shares + 1, 2]: tile and block at which each share of the work begins
    partial_out  float32 [2 * shares, tile_heads * 512], parts of tiles that are cut; None until one may be
    partial_lse  float32 [2 * shares, tile_heads]
    unsafe       int32 [tiles]: which the exact kernel must do; zero between calls
    """

    starts: Any
    partial_out: Any
    partial_lse: Any
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
    def most_blocks(self) -> int:
        """Blocks of a tile whose lists are as long as they can be."""
        return max(1, sum(-(-segment.indices.shape[2] // BLOCK) for segment in self.segments))

    def numbers(self, memory: Memory | None, division: Division = UNDIVIDED) -> tuple[Any, ...]:
        """A SparseProblem of sparse/work.cuh, member after member; without memory and division for the exact one."""
        batch, s_q, heads, _ = self.q.shape
        lists = [value for segment in self.segments for value in _list(segment)]
        if len(self.segments) == 1:
            lists.extend(NO_LIST)
        buffers = (0, 0, 0, 0)
        if memory is not None:
            starts = pointer(memory.starts) if division.planned else 0
            buffers = (starts, pointer(memory.partial_out), pointer(memory.partial_lse), pointer(memory.unsafe))
        return (
            self.q.data.ptr, *strides(self.q)[:3], *lists, pointer(self.attn_sink),
            self.out.data.ptr, *strides(self.out)[:3], self.lse.data.ptr, *self.lse_strides,
            pointer(self.max_logits), *self.max_strides, *buffers,
            batch, s_q, heads, self.groups, division.shares, *self._cut(division), self.softmax_scale,
        )  # fmt: skip

    def _cut(self, division: Division) -> tuple[int, ...]:
        """The members of a Problem that say where shares begin."""
        _, planned, cut, parts = division
        if planned or not division.shares:
            return (0,) * 6
        tiles, shares = (1, parts) if parts else (self.tiles, division.shares)
        units = self.most_blocks if cut else 1
        return (tiles, shares, *divmod(tiles * units, shares), units, -(-(1 << 32) // shares) if shares > 1 else 0)


def _list(segment: Segment) -> tuple[int, ...]:
    (pages, block_size, _), indices, lengths = segment
    stride_b, stride_s, _ = strides(indices)
    shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1
    return (
        pages.data.ptr, pages.strides[0], indices.data.ptr, stride_b, stride_s,
        pointer(lengths), *((0, 0) if lengths is None else strides(lengths)),
        min(segment.pages.num_slots, INT32_LIMIT), block_size, shift, indices.shape[2],
    )  # fmt: skip


def divide(work: Work, may_cut: bool, max_shares: int) -> Division:
    """How to spread work over at most `max_shares` thread blocks."""
    return _divide(
        work.tiles, work.most_blocks, any(segment.lengths is not None for segment in work.segments), may_cut, max_shares
    )


@functools.lru_cache(maxsize=1024)
def _divide(tiles: int, blocks: int, ragged: bool, may_cut: bool, max_shares: int) -> Division:
    may_cut = may_cut and tiles * blocks <= INT32_LIMIT
    max_shares = min(max_shares, MAX_SHARES)
    if ragged:
        return Division(min(max_shares, tiles * blocks if may_cut else tiles), True, may_cut)
    whole = Division(min(max_shares, tiles), False, False)
    if not may_cut:
        return whole
    cost = -(-tiles // max_shares) * (blocks + TILE_COST)
    # As many parts as make the longest shorter, while that saves more than it costs to put them together.
    parts, parts_cost = 0, math.inf
    for count in range(2, min(max_shares // tiles, blocks) + 1):
        count_cost = -(-blocks // count) + TILE_COST + CUT_COST + count * (tiles + 1) / PARTS_A_BLOCK
        if count_cost < parts_cost:
            parts, parts_cost = count, count_cost
    straddle_cost = tiles * (blocks + TILE_COST) / max_shares + STRADDLE_COST
    straddle_cost += max_shares / tiles * (tiles + 1) / PARTS_A_BLOCK
    if cost <= min(parts_cost, straddle_cost):
        return whole
    if parts_cost <= straddle_cost:
        return Division(tiles * parts, False, True, parts)
    return Division(min(max_shares, tiles * blocks), False, True)


def memory_for(plan: DecodePlan | None, work: Work, division: Division) -> Memory:
    """The plan's memory, made or enlarged where it must be, or memory for this call alone."""
    if plan is None:
        return _allocate(work, work.tiles, division.shares, division.cut)
    memory = plan.memory
    if (
        memory is None
        or memory.starts.data.device_id != work.q.data.device_id
        or len(memory.unsafe) < work.tiles
        or len(memory.starts) <= division.shares
        or (division.cut and _too_small(memory.partial_out, 2 * division.shares * work.tile_heads * V_DIM))
    ):
        plan.renew()
        if memory is not None:
            plan.outgrown.append(memory)
        shares = max(division.shares, device_sms(work.q.device.id))
        if plan.workspace is not None:
            memory = plan.memory = _cut(plan.workspace, work, shares)
        else:
            memory = plan.memory = _allocate(work, max(work.tiles, LEAST_TILES), shares, division.cut)
    return memory


def _too_small(array: Any | None, size: int) -> bool:
    return array is None or int(array.size) < size


@functools.lru_cache(maxsize=1024)
def workspace_bytes(tiles: int, shares: int) -> int:
    """What a call of `tiles` tiles (tokens times groups of 64 heads) on a device of `shares` SMs needs at most.

    Kernels whose tiles are lower have more of them and up to two thread blocks an SM.
    """
    lowest = _bytes(tiles * (HEADS // LOWEST_HEADS), 2 * shares, LOWEST_HEADS)
    return max(_bytes(tiles, shares, HEADS), _bytes(2 * tiles, shares, HEADS // 2), lowest)


def _bytes(tiles: int, shares: int, heads: int) -> int:
    return sum(_aligned(4 * math.prod(shape)) for shape in _shapes(tiles, shares, heads))


def _shapes(tiles: int, shares: int, heads: int) -> Memory:
    """Of a Memory's arrays, whose elements have four bytes, for tiles of `heads` heads."""
    return Memory((shares + 1, 2), (2 * shares, heads * V_DIM), (2 * shares, heads), (tiles,))


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _cut(workspace: Any, work: Work, shares: int) -> Memory:
    """A Memory in a piece of memory that is given."""
    memory, needed = _cut_at(workspace.data.ptr, workspace.data.device_id, work.tiles, shares, work.tile_heads)
    if workspace.nbytes < needed:
        raise ValueError(f"workspace: got {workspace.nbytes} bytes, expected at least {needed}")
    memory.unsafe.data.memset_async(0, memory.unsafe.nbytes)
    return memory


@functools.lru_cache(maxsize=256)
def _cut_at(address: int, device: int, tiles: int, shares: int, heads: int) -> tuple[Memory, int]:
    """A Memory at an address, and its bytes. Kept: frameworks give the same memory again and again."""
    needed = _bytes(tiles, shares, heads)
    place = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, needed, None, device), 0)
    arrays = []
    for shape, dtype in zip(_shapes(tiles, shares, heads), (np.int32, np.float32, np.float32, np.int32), strict=True):
        arrays.append(cupy.ndarray(shape, dtype, place))
        place = place + _aligned(arrays[-1].nbytes)
    return Memory(*arrays), needed


def _allocate(work: Work, tiles: int, shares: int, cut: bool) -> Memory:
    stream = cupy.cuda.get_current_stream()
    if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
        raise RuntimeError(
            "plan: memory would have to be allocated while a CUDA graph is captured; "
            "give plan=, a DecodePlan that has served a call of this shape before"
        )
    shapes = _shapes(tiles, shares, work.tile_heads)
    return Memory(
        cupy.empty(shapes.starts, np.int32),
        cupy.empty(shapes.partial_out, np.float32) if cut else None,
        cupy.empty(shapes.partial_lse, np.float32) if cut else None,
        cupy.zeros(shapes.unsafe, np.int32),
    )


def plan_shares(
    plan: DecodePlan | None, work: Work, division: Division, memory: Memory, problem: tuple[Any, ...]
) -> None:
    """Decide on the device where shares begin, unless it follows from the shape or the plan has it already."""
    if plan is not None:
        widths = (segment.indices.shape[2] for segment in work.segments)
        shape = (*work.q.shape[:2], work.groups, *division, *widths)
        if plan.made_for == shape:
            return
        plan.made_for = shape
    if division.planned:
        kernel("common/sparse/plan.cu", "plan_decode")((1,), (PLAN_THREADS,), (*problem, memory.starts, division.cut))


@functools.cache
def device_sms(device: int) -> int:
    """Multiprocessors of a device."""
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
