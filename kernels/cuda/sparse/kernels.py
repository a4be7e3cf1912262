"""Which kernel attends: the one place where that is decided, by layout, alignment and the device's capability."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cupy

from ....layout import DSV4_FP8, V32_FP8, CacheLayout
from ..compile import kernel
from ..device import capability, device_sms, has_clusters, is_hopper
from ..launch import Kernel, is_aligned, most_clusters, pointer, recorded_launches, strides
from ..tma import NO_MAP, Words, map_of_pages
from . import portable as sparse_portable
from .division import COSTS, HOPPER_COSTS, UNDIVIDED, Costs, Division
from .work import EXACT_SLOTS, HEADS, V_DIM, Memory, Work, tile_heads

CLUSTERS = (2, 3, 4, 5, 6)  # thread blocks that share a tile: what Hopper's decode kernel can be compiled for
HOPPER_THREADS, HOPPER_SHARED_BYTES = 512, 232448  # all there is; sm90/decode/memory.cuh says what for
PREFILL_THREADS, FEW_HEADS_THREADS = 384, 512  # sm90/prefill/memory.cuh, sm90/few_heads/memory.cuh
PREFILL_HEADS = (16, 32, HEADS)  # of a tile there
PREFILL_WAVES = 8  # shares of the portable kernel for each thread block that runs at a time: lengths grow with position
COMBINE_VALUES = 128  # values that a warp puts together at a time, as in common/sparse/combine.cuh
EXACT_ROWS, EXACT_THREADS, EXACT_BLOCKS_PER_SM = 16, 256, 2  # as in common/sparse/exact_mma_scores.cuh
EXACT_MOST_PARTS = 64  # of a tile, that one thread block puts together

KERNELS = ("hopper", "portable", "exact")
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("forced attention kernel", default=None)


class FastKernel(NamedTuple):
    """A kernel for all but values outside its range.

    tile_heads  heads of a tile of its work
    max_shares  thread blocks that run at a time
    costs       what its work is divided by
    maps        what it takes beside the problem: the words of tensor maps
    clusters    how many thread blocks may share a tile as a cluster, and how many such clusters run at a time
    of_cluster  the function by which so many do
    """

    function: Any
    threads: int
    shared_bytes: int
    tile_heads: int
    max_shares: int
    costs: Costs = COSTS
    maps: Callable[[Work], Words] = lambda work: ()
    clusters: tuple[tuple[int, int], ...] = ()
    of_cluster: Callable[[int], Kernel] | None = None

    def launch(self, division: Division, work: Work, problem: tuple[Any, ...]) -> None:
        function, arguments = self.function, (*problem, *self.maps(work))
        if division.together and self.of_cluster is not None:
            function = self.of_cluster(division.parts)
        function((division.shares,), (self.threads,), arguments, shared_mem=self.shared_bytes, overlap=True)


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


def choose(work: Work, may_cut: bool = True) -> FastKernel | None:
    """The fast kernel for this work on paged caches, or None for the exact one.

    may_cut  whether results may depend on what else there is to do
    """
    device = work.q.device.id
    layout = work.segments[0].pages.layout
    name = _name(work, _fastest(device, layout))
    if name == "exact":
        return None
    if name == "hopper":
        return _hopper(device, layout, tile_heads(work, may_cut, device_sms(device), _clusters(device)))
    return _portable(device, layout, int(work.q.shape[2]))


def choose_for_prefill(work: Work) -> FastKernel | None:
    """The same for whole tiles over gathered rows; its `max_shares` are those that the work is best divided into."""
    device = work.q.device.id
    layout = work.segments[0].pages.layout
    name = _name(work, _fastest_prefill(device))
    if name == "exact":
        return None
    if name == "hopper":
        fast, heads = _hopper_prefill(device, layout, HEADS), int(work.q.shape[2])
        few = min(height for height in PREFILL_HEADS if height >= min(heads, HEADS))
        if few < HEADS and map_of_queries(work, few) != NO_MAP:
            return _hopper_prefill(device, layout, few)
        return fast
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
def _hopper_prefill(device: int, layout: CacheLayout, heads: int) -> FastKernel:
    """For tiles of so many heads. Of fewer than HEADS q has to have a map."""
    if heads == HEADS:
        function = kernel("sm90/prefill/prefill.cu", "sparse_mla_prefill", arch="sm_90a", LAYOUT=layout.name)
    else:
        macros = {"LAYOUT": layout.name, "TILE_HEADS": heads}
        function = kernel("sm90/few_heads/prefill.cu", "sparse_mla_prefill_few_heads", arch="sm_90a", **macros)
    function.max_dynamic_shared_size_bytes = HOPPER_SHARED_BYTES
    return FastKernel(
        function, PREFILL_THREADS if heads == HEADS else FEW_HEADS_THREADS, HOPPER_SHARED_BYTES, heads,
        device_sms(device), maps=lambda work: map_of_queries(work, heads),
    )  # fmt: skip


def map_of_queries(work: Work, tile_heads: int) -> Words:
    """The words of q's TensorMap, by boxes of so many heads; NO_MAP where heads are nearer than they are long."""
    (tokens, _, heads, width), (token_stride, _, head_stride, _) = work.q.shape, strides(work.q)
    if head_stride < width or token_stride < 0:
        return NO_MAP
    return map_of_pages(work.q.data.ptr, tokens, 2 * token_stride, heads, 2 * head_stride, tile_heads)


@functools.cache
def _fastest(device: int, layout: CacheLayout) -> str:
    if is_hopper(device) and layout in (DSV4_FP8, V32_FP8):
        return "hopper"
    return "portable" if capability(device) >= 80 else "exact"


@functools.cache
def _hopper(device: int, layout: CacheLayout, heads: int) -> FastKernel:
    of_cluster = functools.partial(_hopper_function, layout, heads)
    return FastKernel(
        of_cluster(1), HOPPER_THREADS, HOPPER_SHARED_BYTES, heads, device_sms(device), HOPPER_COSTS[heads],
        clusters=_clusters(device), of_cluster=of_cluster,
    )  # fmt: skip


@functools.cache
def _hopper_function(layout: CacheLayout, heads: int, parts: int) -> Kernel:
    macros = {"LAYOUT": layout.name, "TILE_HEADS": heads, "PARTS": parts}
    function = kernel("sm90/decode/decode.cu", "sparse_mla_decode", arch="sm_90a", **macros)
    function.max_dynamic_shared_size_bytes = HOPPER_SHARED_BYTES
    return function


@functools.cache
def _clusters(device: int) -> tuple[tuple[int, int], ...]:
    """Sizes of clusters that decode kernels of one thread block an SM come in, and how many run at a time."""
    if not (is_hopper(device) and has_clusters(device)):
        return ()
    probe = kernel("common/hold.cu", "hold")
    probe.max_dynamic_shared_size_bytes = HOPPER_SHARED_BYTES
    return tuple((size, most_clusters(probe, size, HOPPER_THREADS, HOPPER_SHARED_BYTES)) for size in CLUSTERS)


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


def finishers(units: int, device: int) -> int:
    """Thread blocks for so much that may be left to do behind a fast kernel."""
    return min(units, EXACT_BLOCKS_PER_SM * device_sms(device))


def finish(
    work: Work,
    problem: tuple[Any, ...],
    everything: bool = False,
    memory: Memory | None = None,
    division: Division = UNDIVIDED,
    may_cut: bool = False,
) -> None:
    """Put the parts of cut tiles together, and attend to tiles that a fast kernel marked, or to all.

    memory   where it marked them; if None, in max_logits
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
    units, combined = work.tiles * -(-work.tile_heads // EXACT_ROWS) * most_parts, 0
    if division.cut:
        combined = division.parts or division.shares // work.tiles + 2  # of a tile: not many more
        pieces = min(work.tiles, division.shares) * work.tile_heads * V_DIM // COMBINE_VALUES
        units = max(units, pieces // 2)  # all multiprocessors, if there is only one tile
    macros = {"LAYOUT": layout.name, "ALIGNED": int(aligned), "TILE_HEADS": work.tile_heads}
    function = kernel("common/sparse/exact.cu", "finish_attention", **macros)
    grid = (finishers(units, device),)
    function(grid, (EXACT_THREADS,), (*problem, everything, parts, counters, slots, most_parts, combined), overlap=True)
