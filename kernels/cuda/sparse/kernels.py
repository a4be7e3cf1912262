"""Which kernel attends: the one place where that is decided, by layout, alignment and the device's capability."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy

from ....layout import DSV4_FP8, V32_FP8, CacheLayout
from ..compile import kernel
from ..device import capability, device_sms, is_hopper
from ..launch import is_aligned, pointer, recorded_launches
from . import portable as sparse_portable
from .work import EXACT_SLOTS, HEADS, V_DIM, Division, Memory, Work

HOPPER_THREADS, HOPPER_SHARED_BYTES = 512, 232448  # all there is; sm90/decode/memory.cuh says what for
PREFILL_THREADS = 384  # sm90/prefill/memory.cuh
PREFILL_WAVES = 8  # shares of the portable kernel for each thread block that runs at a time: lengths grow with position
COMBINE_WARPS, COMBINE_VALUES = 8, 128  # values that a warp puts together, as in common/sparse/combine.cu
COMBINE_BLOCKS = {4: 5, 8: 4, 16: 2}  # thread blocks a multiprocessor, by parts that are loaded together
EXACT_ROWS, EXACT_THREADS, EXACT_BLOCKS_PER_SM = 16, 256, 2  # as in common/sparse/exact_mma_scores.cuh
EXACT_MOST_PARTS = 64  # of a tile, that one thread block puts together

KERNELS = ("hopper", "portable", "exact")
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("forced attention kernel", default=None)


class FastKernel(NamedTuple):
    """A kernel for all but values outside its range.

    tile_heads  heads of a tile of its work
    max_shares  thread blocks that run at a time
    """

    function: Any
    threads: int
    shared_bytes: int
    tile_heads: int
    max_shares: int

    def launch(self, shares: int, problem: tuple[Any, ...]) -> None:
        self.function((shares,), (self.threads,), problem, shared_mem=self.shared_bytes, overlap=True)


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """For tests: attend with the kernel `name`, one of KERNELS, whatever would be chosen or was noted before."""
    if name not in KERNELS:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(KERNELS)}")
    token = _forced.set(name)
    try:
        with recorded_launches():  # in which no call is made from the launch cache
            yield
    finally:
        _forced.reset(token)


def choose(work: Work) -> FastKernel | None:
    """The fast kernel for this work on paged caches, or None for the exact one."""
    device = work.q.device.id
    layout = work.segments[0].pages.layout
    name = _name(work, _fastest(device, layout))
    if name == "exact":
        return None
    return _hopper(device, layout) if name == "hopper" else _portable(device, layout, int(work.q.shape[2]))


def choose_for_prefill(work: Work) -> FastKernel | None:
    """The same for whole tiles over gathered rows; its `max_shares` are those that the work is best divided into."""
    device = work.q.device.id
    layout = work.segments[0].pages.layout
    name = _name(work, _fastest_prefill(device))
    if name == "exact":
        return None
    if name == "hopper":
        return _hopper_prefill(device, layout)
    fast = _portable(device, layout, int(work.q.shape[2]))
    return fast._replace(max_shares=PREFILL_WAVES * fast.max_shares)


def _name(work: Work, fastest: str) -> str:
    aligned = is_aligned(work.q, work.out, *(segment.pages.bytes for segment in work.segments))
    return (_forced.get() or fastest) if aligned else "exact"


@functools.cache
def _fastest_prefill(device: int) -> str:
    capability = int(cupy.cuda.Device(device).compute_capability)
    return "hopper" if capability == 90 else "portable" if capability >= 80 else "exact"


@functools.cache
def _hopper_prefill(device: int, layout: CacheLayout) -> FastKernel:
    function = kernel("sm90/prefill/prefill.cu", "sparse_mla_prefill", arch="sm_90a", LAYOUT=layout.name)
    function.max_dynamic_shared_size_bytes = HOPPER_SHARED_BYTES
    return FastKernel(function, PREFILL_THREADS, HOPPER_SHARED_BYTES, HEADS, device_sms(device))


@functools.cache
def _fastest(device: int, layout: CacheLayout) -> str:
    if is_hopper(device) and layout in (DSV4_FP8, V32_FP8):
        return "hopper"
    return "portable" if capability(device) >= 80 else "exact"


@functools.cache
def _hopper(device: int, layout: CacheLayout) -> FastKernel:
    function = kernel("sm90/decode/decode.cu", "sparse_mla_decode", arch="sm_90a", LAYOUT=layout.name)
    function.max_dynamic_shared_size_bytes = HOPPER_SHARED_BYTES
    return FastKernel(function, HOPPER_THREADS, HOPPER_SHARED_BYTES, HEADS, device_sms(device))


@functools.cache
def _portable(device: int, layout: CacheLayout, heads: int) -> FastKernel:
    limits = cupy.cuda.Device(device).attributes
    size = sparse_portable.choose(
        layout, heads, limits["MaxSharedMemoryPerBlockOptin"], limits["MaxSharedMemoryPerMultiprocessor"]
    )
    function = kernel("sm80/sparse/attention.cu", "sparse_mla_mma", **sparse_portable.macros(layout, size))
    shared_bytes = sparse_portable.shared_bytes(layout, size)
    function.max_dynamic_shared_size_bytes = shared_bytes
    max_shares = size.blocks * device_sms(device)
    return FastKernel(function, sparse_portable.THREADS, shared_bytes, size.heads, max_shares)


def combine(work: Work, problem: tuple[Any, ...], division: Division) -> None:
    """Put the parts of cut tiles together."""
    sms = device_sms(work.q.device.id)
    parts = division.parts or division.shares // work.tiles + 2  # of a tile: not many more
    at_once = next((number for number in COMBINE_BLOCKS if number >= parts), max(COMBINE_BLOCKS))
    pieces = work.tile_heads * V_DIM // COMBINE_VALUES
    macros = {"TILE_HEADS": work.tile_heads, "AT_ONCE": at_once}
    if division.parts:
        # All multiprocessors, if there is only one tile.
        warps = next((warps for warps in (4, 2) if work.tiles * pieces >= warps * sms), 1)
        batch, s_q = work.q.shape[:2]
        grid = (work.groups * pieces // warps, s_q, batch)
        kernel("common/sparse/combine.cu", "combine_equal_cuts", **macros)(grid, (32 * warps,), problem, overlap=True)
    else:
        blocks = -(-min(work.tiles, division.shares) * pieces // COMBINE_WARPS)
        blocks = min(blocks, COMBINE_BLOCKS[at_once] * sms)
        kernel("common/sparse/combine.cu", "combine_cuts", **macros)(
            (blocks,), (32 * COMBINE_WARPS,), problem, overlap=True
        )


def attend_exactly(
    work: Work, problem: tuple[Any, ...], everything: bool, memory: Memory | None = None, may_cut: bool = False
) -> None:
    """Attend, whatever the values, to the tiles that a fast kernel marked (in `memory`, or in max_logits), or to all.

    may_cut  whether thread blocks may share the keys of a marked tile: how many tiles are marked then decides in which
             order keys are added up
    """
    device = work.q.device.id
    layout = work.segments[0].pages.layout
    aligned = is_aligned(work.q, work.out, *(segment.pages.bytes for segment in work.segments))
    parts, counters, slots, most_parts = 0, 0, 0, 1
    if memory is not None:
        parts, counters = pointer(memory.exact_parts), pointer(memory.unsafe)
        if may_cut:
            slots, most_parts = EXACT_SLOTS, min(work.most_blocks, EXACT_MOST_PARTS)
    units = work.tiles * -(-work.tile_heads // EXACT_ROWS) * most_parts
    function = kernel(
        "common/sparse/exact.cu", "attend_exactly_where_unsafe",
        LAYOUT=layout.name, ALIGNED=int(aligned), TILE_HEADS=work.tile_heads,
    )  # fmt: skip
    grid = (min(units, EXACT_BLOCKS_PER_SM * device_sms(device)),)
    function(grid, (EXACT_THREADS,), (*problem, everything, parts, counters, slots, most_parts), overlap=True)
