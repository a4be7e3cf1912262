"""Selects the sparse attention kernel by layout, alignment and the device's capability."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ....layout import BUILT_IN, CacheLayout
from ...check_results import UNDER_TEST
from ..compile import kernel, loaded_now, start
from ..constants import constant
from ..device import (
    Limits,
    cached_by_capability,
    capability,
    device_of,
    device_sms,
    has_clusters,
    is_hopper,
    limits,
)
from ..launch import Kernel, is_aligned, most_clusters, pointer, recorded_launches, strides
from ..tma import NO_MAP, Words, map_of_pages
from . import portable as sparse_portable
from . import under_test
from .division import COSTS, HOPPER_COSTS, UNDIVIDED, Costs, Division
from .formats import HOPPER, HOPPER_BF16, Formats, exact_macros, has_whole_slices, layout_macros
from .work import EXACT_SLOTS, HEADS, V_DIM, AttentionCall, Buffers, tile_heads

CLUSTERS = (2, 3, 4, 5, 6)  # sizes for which Hopper's decode kernel can be compiled
HOPPER_THREADS = constant("sm90/decode/memory.cuh", "THREADS")
PREFILL_THREADS = constant("sm90/prefill/memory.cuh", "THREADS")
FEW_HEADS_THREADS = constant("sm90/few_heads/memory.cuh", "THREADS")
FP8_PREFILL_THREADS = constant("sm90/prefill_fp8/memory.cuh", "THREADS")
HOPPER_SHARED_BYTES = constant("sm90/hopper.cuh", "MOST_SHARED_BYTES")
PREFILL_HEADS = (16, 32, HEADS)  # per tile
LEAST_BF16_HEADS = 32  # with more heads, Hopper's decode kernel is used for bfloat16 rows
PREFILL_WAVES = 8  # work ranges of the portable kernel per resident CTA: lengths grow with position
COMBINE_VALUES = constant("common/sparse/combine.cuh", "PIECE")
EXACT_ROWS = constant("common/sparse/exact_mma_scores.cuh", "ROWS")
EXACT_THREADS = constant("common/sparse/exact.cuh", "EXACT_THREADS")
EXACT_BLOCKS_PER_SM = constant("common/sparse/exact.cu", "CTAS")
EXACT_MOST_PARTS = constant("common/sparse/exact_mma.cuh", "MOST_PARTS")

KERNELS = ("hopper", "portable", "exact")
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("forced attention kernel", default=None)


class Program(NamedTuple):
    """A kernel of csrc/, and the macros with which it is compiled.

    Attributes:
        arch: a target instead of the device's own, or None
        macros: names and values
    """

    file: str
    name: str
    arch: str | None
    macros: tuple[tuple[str, Any], ...]


class FastKernel(NamedTuple):
    """A kernel for values inside its range.

    Attributes:
        program_for: the program for a cluster size, 1 without clusters; compiled at first use
        tile_heads: heads of a tile of its work
        max_ranges: CTAs that run at a time
        costs: costs of the cost model that divides its work
        maps: arguments in addition to the problem: the words of tensor maps
        clusters: sizes of clusters that may split a tile, and the number of such clusters that run at a time
        recomputes: whether the kernel recomputes the tiles that it flags, so that no epilogue kernel has to follow
    """

    program_for: Callable[[int], Program]
    threads: int
    shared_bytes: int
    tile_heads: int
    max_ranges: int
    costs: Costs = COSTS
    maps: Callable[[AttentionCall], Words] = lambda work: ()
    clusters: tuple[tuple[int, int], ...] = ()
    recomputes: bool = False

    def program(self, division: Division) -> Program:
        """The program for a division."""
        return self.program_for(division.parts if division.cluster else 1)

    def start(self, division: Division, work: AttentionCall) -> None:
        """Begin to compile the programs that this call launches, in threads."""
        epilogue = None if self.recomputes else work.formats
        _start(work.q.device.id, self.program(division), epilogue, self.tile_heads, division.split, division.planned)

    def launch(self, division: Division, work: AttentionCall, problem: tuple[Any, ...]) -> None:
        function, arguments = _function(self.program(division), self.shared_bytes), (*problem, *self.maps(work))
        function((division.ranges,), (self.threads,), arguments, shared_mem=self.shared_bytes, overlap=True)


@cached_by_capability
def _function(program: Program, shared_bytes: int) -> Kernel:
    function = kernel(program.file, program.name, arch=program.arch, **dict(program.macros))
    function.max_dynamic_shared_size_bytes = shared_bytes
    return function


@cached_by_capability
def _start(
    device: int, program: Program, epilogue: Formats | None, tile_heads: int, combines: bool, planned: bool
) -> None:
    """Begin to compile, on the current device, `device`: a fast kernel, the epilogue kernel for these formats if one
    follows, and the kernel that plans."""
    start(program.file, program.arch, **dict(program.macros))
    if epilogue is not None:
        start("common/sparse/exact.cu", **exact_macros(epilogue, True, tile_heads, combines))
    if planned:
        start("common/sparse/plan.cu")


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """For tests: attend with the kernel `name`, one of KERNELS, and ignore the selection and earlier self-tests.

    Tiles of the portable kernel have the largest number of heads.
    """
    if name not in KERNELS:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(KERNELS)}")
    token = _forced.set(name)
    try:
        with recorded_launches():  # no call is replayed from the launch cache
            yield
    finally:
        _forced.reset(token)


def choose(work: AttentionCall, may_split: bool = True) -> FastKernel | None:
    """The fast kernel for this work on paged caches, or None for the exact one.

    Args:
        may_split: whether results may depend on the rest of the batch
    """
    device = work.q.device.id
    formats = work.formats
    name = _name(work, kernel_for_decode(device, formats[0], int(work.q.shape[2])))
    if name == "exact":
        return None
    if name == "hopper" and formats[0] in HOPPER_BF16:
        return _hopper(device, formats, HEADS)
    if name == "hopper":
        tested = under_test.tile_heads() if UNDER_TEST.get() else None
        heads = tested or tile_heads(work, may_split, device_sms(device), _clusters(device))
        return _hopper(device, formats, heads)
    return _portable(device, formats, _portable_heads(work, may_split and _forced.get() is None))


def choose_for_prefill(work: AttentionCall) -> FastKernel | None:
    """The fast kernel for whole tiles over gathered rows; its `max_ranges` is the best number of work ranges."""
    device = work.q.device.id
    layout = work.formats[0]
    name = _name(work, kernel_for_prefill(device))
    if name == "exact":
        return None
    if name == "hopper":
        fast, heads = _hopper_prefill(device, layout, HEADS), int(work.q.shape[2])
        tile_heads = min(height for height in PREFILL_HEADS if height >= min(heads, HEADS))
        if tile_heads < HEADS and map_of_queries(work, tile_heads) != NO_MAP:
            return _hopper_prefill(device, layout, tile_heads)
        return fast
    fast = _portable(device, work.formats, int(work.q.shape[2]))
    return fast._replace(max_ranges=PREFILL_WAVES * fast.max_ranges)


def _name(work: AttentionCall, kernel_for_aligned: str) -> str:
    aligned = is_aligned(work.q, work.out, *(segment.pages.bytes for segment in work.segments))
    return (_forced.get() or kernel_for_aligned) if aligned else "exact"


def kernel_for_prefill(device: int) -> str:
    """The kernel for aligned arrays of a prefill: "hopper", "portable" or "exact"."""
    return "hopper" if is_hopper(device) else "portable" if capability(device) >= 80 else "exact"


@cached_by_capability
def _hopper_prefill(device: int, layout: CacheLayout, heads: int) -> FastKernel:
    """The kernel for tiles of `heads` heads. Below HEADS, q needs a tensor map."""
    macros: tuple[tuple[str, Any], ...] = (("LAYOUT", layout.name),)
    program = Program("sm90/prefill/prefill.cu", "sparse_mla_prefill", "sm_90a", macros)
    if heads != HEADS:
        macros += (("TILE_HEADS", heads),)
        program = Program("sm90/few_heads/prefill.cu", "sparse_mla_prefill_few_heads", "sm_90a", macros)
    return FastKernel(
        lambda parts: program, PREFILL_THREADS if heads == HEADS else FEW_HEADS_THREADS, HOPPER_SHARED_BYTES, heads,
        device_sms(device), maps=lambda work: map_of_queries(work, heads), recomputes=True,
    )  # fmt: skip


def takes_fp8(work: AttentionCall, workspace: Any) -> bool:
    """Whether a kernel with FP8 products supports this prefill; rows of any format are converted first."""
    _, _, heads, width = work.q.shape
    fast = _name(work, kernel_for_prefill(work.q.device.id)) == "hopper" and is_aligned(workspace)
    return fast and width == V_DIM and heads > PREFILL_HEADS[-2]


def prefill_fp8(device: int, scales: int) -> FastKernel:
    """The kernel for e4m3 rows with scales at address `scales`."""
    macros = (("LAYOUT", "DSV4_BF16"),)
    program = Program("sm90/prefill_fp8/prefill.cu", "sparse_mla_prefill_fp8", "sm_90a", macros)
    return FastKernel(
        lambda parts: program, FP8_PREFILL_THREADS, HOPPER_SHARED_BYTES, HEADS, device_sms(device),
        maps=lambda work: (scales,),
    )  # fmt: skip


def map_of_queries(work: AttentionCall, tile_heads: int) -> Words:
    """The words of q's TensorMap, in boxes of `tile_heads` heads; NO_MAP if heads overlap."""
    (tokens, _, heads, width), (token_stride, _, head_stride, _) = work.q.shape, strides(work.q)
    if head_stride < width or token_stride < 0:
        return NO_MAP
    return map_of_pages(work.q.data.ptr, tokens, 2 * token_stride, heads, 2 * head_stride, tile_heads)


def kernel_for_decode(device: int, layout: CacheLayout, heads: int) -> str:
    """The kernel for aligned arrays of a decode over a cache of this format, for queries of `heads` heads."""
    if is_hopper(device) and layout in HOPPER and (layout not in HOPPER_BF16 or heads > LEAST_BF16_HEADS):
        return "hopper"
    portable = layout in BUILT_IN and has_whole_slices(layout)  # registered formats may have scales at any word
    return "portable" if capability(device) >= 80 and portable else "exact"


@cached_by_capability
def _hopper(device: int, formats: Formats, heads: int) -> FastKernel:
    macros = *layout_macros(formats).items(), ("TILE_HEADS", heads)

    def program(parts: int) -> Program:
        return Program("sm90/decode/decode.cu", "sparse_mla_decode", "sm_90a", (*macros, ("PARTS", parts)))

    return FastKernel(
        program, HOPPER_THREADS, HOPPER_SHARED_BYTES, heads, device_sms(device), HOPPER_COSTS[heads],
        clusters=() if formats[0] in HOPPER_BF16 else _clusters(device),
    )  # fmt: skip


@cached_by_capability
def _clusters(device: int) -> tuple[tuple[int, int], ...]:
    """Cluster sizes of decode kernels with one CTA per SM, and the number of clusters that run at a time."""
    if not (is_hopper(device) and has_clusters(device)):
        return ()
    clusters = device_of(device).clusters
    if clusters is not None:
        at_a_time = dict(clusters)
        return tuple((size, at_a_time.get(size, 0)) for size in CLUSTERS)
    with loaded_now():
        probe = kernel("common/hold.cu", "hold")
        probe.max_dynamic_shared_size_bytes = HOPPER_SHARED_BYTES
        return tuple((size, most_clusters(probe, size, HOPPER_THREADS, HOPPER_SHARED_BYTES)) for size in CLUSTERS)


def _portable(device: int, formats: Formats, heads: int) -> FastKernel:
    return _portable_within(limits(device), device, formats, heads)


def portable_size(device: int, formats: Formats, heads: int) -> sparse_portable.Size:
    """The portable kernel's sizes on the device for queries of `heads` heads."""
    of = limits(device)
    return sparse_portable.choose(formats, heads, of.shared_bytes, of.sm_shared_bytes)


def _portable_heads(work: AttentionCall, may_split: bool) -> int:
    """Heads of a tile: a small number if all blocks of all tiles then still run at a time."""
    device, heads = work.q.device.id, int(work.q.shape[2])
    tested_heads = under_test.tile_heads() if UNDER_TEST.get() else None
    if tested_heads is not None:
        return tested_heads
    if may_split:
        blocks = int(work.q.shape[0]) * int(work.q.shape[1]) * work.most_blocks
        for height in sorted(sparse_portable.SIZES):
            size = portable_size(device, work.formats, min(height, heads))
            if size.heads < heads and blocks * -(-heads // size.heads) <= size.blocks * device_sms(device):
                return size.heads
    return heads


@cached_by_capability
def _portable_within(limits: Limits, device: int, formats: Formats, heads: int) -> FastKernel:
    size = sparse_portable.choose(formats, heads, limits.shared_bytes, limits.sm_shared_bytes)
    program = Program(size.file, size.function, None, tuple(sparse_portable.macros(formats, size).items()))
    shared_bytes = sparse_portable.shared_bytes(formats, size)
    return FastKernel(lambda parts: program, size.threads, shared_bytes, size.heads, size.blocks * device_sms(device))


def epilogue_ctas(units: int, device: int) -> int:
    """Number of CTAs of the epilogue kernel for `units` units of work."""
    return min(units, EXACT_BLOCKS_PER_SM * device_sms(device))


@cached_by_capability
def _epilogue(formats: Formats, aligned: bool, heads: int, combines: bool) -> Kernel:
    return kernel("common/sparse/exact.cu", "attention_epilogue", **exact_macros(formats, aligned, heads, combines))


def launch_epilogue(
    work: AttentionCall,
    problem: tuple[Any, ...],
    everything: bool = False,
    memory: Buffers | None = None,
    division: Division = UNDIVIDED,
    may_split: bool = False,
) -> None:
    """Combine split tiles, and recompute tiles that a fast kernel flagged, or compute all tiles.

    Args:
        memory: memory with the tiles' flags; None: tiles are flagged in max_logits
        may_split: whether CTAs may split the keys of a flagged tile: the order of its sums then depends on the number
            of flagged tiles
    """
    device = work.q.device.id
    aligned = is_aligned(work.q, work.out, *(segment.pages.bytes for segment in work.segments))
    parts, counters, slots, most_parts = 0, 0, 0, 1
    if memory is not None:
        parts, counters = pointer(memory.exact_parts), pointer(memory.unsafe)
        if may_split:
            slots, most_parts = EXACT_SLOTS, min(work.most_blocks, EXACT_MOST_PARTS)
    units, combined = work.tiles * -(-work.tile_heads // EXACT_ROWS) * most_parts, 0
    if division.split:
        combined = division.parts or division.ranges // work.tiles + 2  # combined parts of a split tile: rarely more
        pieces = min(work.tiles, division.ranges) * work.tile_heads * V_DIM // COMBINE_VALUES
        units = max(units, pieces // 2)  # occupies all SMs, even for a single tile
    function = _epilogue(work.formats, aligned, work.tile_heads, division.split)
    grid = (epilogue_ctas(units, device),)
    function(grid, (EXACT_THREADS,), (*problem, everything, parts, counters, slots, most_parts, combined), overlap=True)
