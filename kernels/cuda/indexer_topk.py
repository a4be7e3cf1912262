"""The indexer's top-k: four kernels, and the sizes for which each is used.

    kernel     where a row is stored       used for (132 SMs, aligned rows)
    registers  registers of 1 to 8 CTAs    rows that all run at a time, up to 16,384 columns; of up to 57 rows also
                                           longer ones, by clusters; short rows in any number
    bound      registers of 1 to 8 CTAs,   rows that all run at a time and do not fit in the registers above: longer
               or read in rounds           ones, or 58 and more
    wide       read several times          other rows, k above 16 times the threads of a CTA
    stream     read once                   all other rows

Their sources are common/indexer_topk_KERNEL.cu. The first kernel that supports the sizes is used, in this order.
docs/kernels/topk.md has the table by rows and columns.
"""

import functools
import math
from typing import Any, NamedTuple

from ..types.indexer import Rows, Slots
from .compile import kernel
from .constants import constant
from .dense_attention import large_kernel
from .device import device_sms, has_clusters
from .indices import division
from .launch import is_aligned, pointer, strides

REGISTERS, BOUND, STREAM, WIDE = (f"common/indexer_topk_{name}.cu" for name in ("registers", "bound", "stream", "wide"))
KERNELS = {
    "registers": (REGISTERS, "top_k_in_registers"),
    "bound": (BOUND, "top_k_by_bound"),
    "stream": (STREAM, "top_k_per_row"),
}
MAX_GRID_X = 2**31 - 1


def top_k_per_row(logits: Any, rows: Rows, indices: Any, slots: Slots | None = None) -> None:
    device, topk = logits.data.device_id, indices.shape[1]
    num_rows, width = logits.shape
    lens = rows.lens
    output: tuple[Any, ...] = (indices, strides(indices)[0])
    kind: dict[str, str | int] = {"OUTPUT": "ToColumns"}
    if slots is not None:
        table, kind = slots.block_table, {"OUTPUT": "ToSlots", "POOL": slots.pool}
        output += (
            slots.indices, strides(slots.indices)[0], slots.lens, pointer(slots.is_valid),
            table, strides(table)[0], table.shape[1], *division(slots.block_size // slots.pool),
            pointer(slots.positions),
        )  # fmt: skip
    arguments = (
        logits, strides(logits)[0], width, num_rows, pointer(rows.starts), pointer(rows.ends), pointer(lens),
        0 if lens is None else strides(lens)[0], rows.next_n, lens is not None and lens.ndim == 2,
        -1 if rows.num_keys is None else rows.num_keys, *output, topk,
    )  # fmt: skip
    aligned = is_aligned(logits)
    most_blocks = 8 if has_clusters(device) else 1
    name, size = kernel_for_rows(num_rows, width, topk, device_sms(device), most_blocks, aligned, lens is not None)
    if name == "wide":
        run, blocks, shared_bytes = kernel(WIDE, "top_k_per_row_wide", THREADS=size.threads, **kind), num_rows, 0
    else:
        file, function = KERNELS[name]
        blocks, shared_bytes = num_rows * size.blocks, size.shared_bytes
        macros = {**size.macros, "ALIGNED": int(aligned), **kind}
        run = large_kernel(device, shared_bytes, file, function, **macros)
    run((min(blocks, MAX_GRID_X),), (size.threads,), arguments, shared_mem=shared_bytes, overlap=True)


def kernel_for_rows(
    num_rows: int, width: int, topk: int, sms: int, most_blocks: int, aligned: bool, of_requests: bool
) -> tuple[str, Any]:
    """The kernel for `num_rows` rows of `width` columns, and its sizes.

    Args:
        sms: SMs of the device
        most_blocks: CTAs that a cluster may have; 1: the device has no clusters
        aligned: rows start at multiples of 16 bytes
        of_requests: rows belong to requests, whose lengths differ
    """
    registers = registers_size(num_rows, width, sms, most_blocks, aligned)
    if registers is not None:
        return "registers", registers
    bound = bound_size(num_rows, width, topk, sms, most_blocks, aligned)
    if bound is not None:
        return "bound", bound
    stream = StreamSize(stream_threads(num_rows, width, topk, sms, of_requests))
    return ("wide", StreamSize(512)) if topk > stream.most_topk else ("stream", stream)


class RegistersSize(NamedTuple):
    """Sizes of common/indexer_topk_registers.cu: threads of a CTA, a thread's reads of four columns, CTAs of a row."""

    threads: int
    reads: int
    blocks: int = 1

    @property
    def columns(self) -> int:
        """Columns of the longest row."""
        return self.blocks * self.threads * 4 * self.reads

    @property
    def macros(self) -> dict[str, int]:
        return {"THREADS": self.threads, "BLOCKS": self.blocks, "READS": self.reads}

    @property
    def shared_bytes(self) -> int:
        return constant(REGISTERS, "SHARED_BYTES", THREADS=self.threads, BLOCKS=self.blocks)


@functools.lru_cache(256)
def registers_size(num_rows: int, width: int, sms: int, most_blocks: int, aligned: bool) -> RegistersSize | None:
    """Sizes if all rows run at once or in two waves, or are short; otherwise None."""
    if num_rows > sms:
        short = RegistersSize(256, 2)
        if aligned and most_blocks > 1 and width <= short.columns:  # measured on Hopper only
            return short
        few_waves = num_rows <= 4 * sms and ONE_BLOCK // 4 < width <= ONE_BLOCK // 2
        return RegistersSize(512, 4) if aligned and few_waves else None  # an SM runs two of these CTAs
    blocks = 1
    if width > ONE_BLOCK and aligned:  # single-column reads take more registers
        blocks = next((n for n in (8, 4, 2) if n <= most_blocks and num_rows * n * 1.15 <= sms), 1)
    for threads, reads in ((512, 2), (512, 4) if blocks in (2, 4) else (1024, 2), (1024, 4)):
        size = RegistersSize(threads, reads, blocks)
        if width <= size.columns:
            return size
    return None


class StreamSize(NamedTuple):
    """Sizes of common/indexer_topk_stream.cu: threads of a CTA, which takes row after row."""

    threads: int
    blocks: int = 1

    @property
    def macros(self) -> dict[str, int]:
        return {"THREADS": self.threads}

    @property
    def shared_bytes(self) -> int:
        return constant(STREAM, "SHARED_BYTES", THREADS=self.threads)

    @property
    def most_topk(self) -> int:
        """The largest k for which the buffer of columns above the bound cannot overflow."""
        return 16 * self.threads


def stream_threads(num_rows: int, width: int, topk: int, sms: int, of_requests: bool) -> int:
    """Threads per CTA of common/indexer_topk_stream.cu: 256 take fewer instructions in all, 512 read one row faster.

    Args:
        of_requests: whether rows belong to requests, whose lengths differ: with a few waves of CTAs, the longest row
            then decides the time. For prompts' rows only k 2,048 was measured
    """
    few_waves = (of_requests or topk > 1024) and width > 2 * ONE_BLOCK and num_rows <= 4 * sms
    return 512 if num_rows <= sms or few_waves or topk > 2048 else 256


class BoundSize(NamedTuple):
    """Sizes of common/indexer_topk_bound.cu.

    Attributes:
        threads: threads of a CTA
        blocks: CTAs of a row
        reads: reads of four columns that a thread has in flight
        rounds: rounds of reads; a single round stays in registers
        estimated: 1: the bound is estimated from a sample
    """

    threads: int
    blocks: int
    reads: int
    rounds: int = 1
    estimated: int = 0

    @property
    def columns(self) -> int:
        """Columns of the longest row."""
        return self.blocks * self.threads * 4 * self.reads * self.rounds

    @property
    def macros(self) -> dict[str, int]:
        sizes = {"THREADS": self.threads, "BLOCKS": self.blocks, "READS": self.reads, "ROUNDS": self.rounds}
        return sizes | ({"ESTIMATED": self.estimated} if self.estimated else {})

    @property
    def shared_bytes(self) -> int:
        sizes = {name: value for name, value in self.macros.items() if name != "ESTIMATED"}
        return constant(BOUND, "SHARED_BYTES", **sizes)

    def finds(self, topk: int) -> bool:
        """Whether a CTA can bound its part of k: without an estimate, eight lanes publish at most eight values."""
        if self.estimated:
            return topk <= min(2 * self.threads, MOST_ESTIMATED)
        share = topk / self.blocks
        looked_for = topk if self.blocks == 1 else min(topk, share + 5 * math.sqrt(share) + 9)
        return looked_for <= self.threads


ONE_BLOCK = 16_384  # columns: for shorter rows, the CTAs of a cluster would wait longer than they read
MOST_ROUNDS = 8  # each line's maximum fits in shared memory
MOST_ESTIMATED = 2048  # k up to which the columns above an estimated bound fit in shared memory


@functools.lru_cache(256)
def bound_size(num_rows: int, width: int, topk: int, sms: int, most_blocks: int, aligned: bool) -> BoundSize | None:
    """Sizes if all rows run at once; None if there are too many rows, or they are too long."""
    if width > ONE_BLOCK // 2 and num_rows <= sms < num_rows * 4 * 1.15:  # one CTA per row: an estimate is faster
        reads = max(2, 1 << (-(-width // 4096) - 1).bit_length())
        size = BoundSize(1024, 1, reads, 1, estimated=1)
        if reads <= (8 if aligned else 4) and size.finds(topk):
            return size
    for blocks in (8, 4, 2, 1):
        # Clusters do not fill all SMs.
        room = blocks == 1 or (width > ONE_BLOCK and blocks <= most_blocks and num_rows * blocks * 1.15 <= sms)
        if not room or num_rows * blocks > sms:
            continue
        for threads in (512, 1024) if blocks > 1 else (1024,):
            reads = max(2, 1 << (-(-width // (4 * threads * blocks)) - 1).bit_length())
            size = BoundSize(threads, blocks, reads)
            if reads <= (8 if aligned else 4) and size.finds(topk):  # single-column reads take more registers
                return size
        # The rows do not fit in registers; a single CTA would be no faster than common/indexer_topk_stream.cu.
        rounds = max(2, 1 << (-(-width // (32 * 1024 * blocks)) - 1).bit_length())
        size = BoundSize(1024, blocks, 8, rounds)
        if blocks > 1 and rounds <= MOST_ROUNDS and size.finds(topk):
            return size
    return None
