"""Dense attention: packed sequences, and paged MLA rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..types.plan import DenseDecodePlan, aligned_bytes
from ..types.segments import V_DIM, DenseDecode, PackedAttention, Pages
from ..types.stream_workspace import workspace_of_stream
from .compile import kernel, start
from .constants import constant
from .dense_cache import scale_arguments
from .device import cached_by_capability, capture_id, device_sms, has_clusters, is_hopper, shared_bytes_per_block
from .launch import C_NAMES, Kernel, is_aligned, named_strides, pointer, strides
from .tma import NO_MAP, Words, box_rows, map_of_pages

MAX_HEAD_DIM = 256
LOG2_E = 1.4426950408889634
HOPPER_HEAD_DIMS = (192, 64, 128)  # head sizes of sm90/dense/mha_varlen.cu: q, its RoPE part, v
HOPPER_CACHE_BYTES = 1 << 36  # limit of sm90/dense/decode/, in addition to the limit of all tokens' blocks


def mha_varlen(args: PackedAttention) -> None:
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, accumulate, out, lse = args
    (tokens, heads, head_dim), v_dim = q.shape, v.shape[2]
    rope_dim = head_dim - k.shape[2]
    aligned = is_aligned(q, k, v, out) and (k_pe is None or is_aligned(k_pe))
    types = {
        "VALUE": C_NAMES[q.dtype.name], "OUTPUT": C_NAMES[out.dtype.name], "CAUSAL": int(causal),
        "ACCUMULATE": int(accumulate),
    }  # fmt: skip
    device = q.device.id
    name = kernel_for_packed(args, device)
    if aligned and name == "hopper":
        file, dims = "sm90/dense/mha_varlen.cu", {}
        shared_bytes = constant(file, "SHARED_BYTES")
        mha = large_kernel(device, shared_bytes, file, "mha_varlen_sm90", "sm_90a", **types)
    else:
        file, dims = "sm80/mha_varlen.cu", {"QK_DIM": head_dim, "V_DIM": v_dim}
        shared_bytes = constant(file, "SHARED_BYTES", **dims)
        mha = large_kernel(
            device, shared_bytes, file, "mha_varlen", **types, **dims, ROPE_DIM=rope_dim, ALIGNED=int(aligned)
        )
    sequences = len(cu_seqlens_q) - 1
    arguments = mha.arguments(
        q=q, **named_strides("q", "th", q), k=k, **named_strides("k", "th", k), v=v, **named_strides("v", "th", v),
        k_pe=pointer(k_pe), k_pe_stride_t=0 if k_pe is None else strides(k_pe)[0],
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sequences=sequences, num_queries=tokens, num_keys=len(k),
        scale_log2=softmax_scale * LOG2_E, out=out, **named_strides("out", "th", out), lse=lse,
        **named_strides("lse", "ht", lse),
    )  # fmt: skip
    grid = -(-tokens // constant(file, "QUERIES", **dims)) + sequences, heads
    mha(grid, (constant(file, "THREADS"),), arguments, shared_mem=shared_bytes)


def kernel_for_packed(args: PackedAttention, device: int) -> str:
    """The kernel of mha_varlen for aligned arrays: "hopper" or "portable". Raises ValueError if there is none."""
    head_dim, v_dim = args.q.shape[2], args.v.shape[2]
    rope_dim = head_dim - args.k.shape[2]
    if head_dim % 16 or rope_dim % 16 or v_dim % 16 or max(head_dim, v_dim) > MAX_HEAD_DIM:
        raise ValueError(
            f"q, k_pe, v: got {head_dim}, {rope_dim} and {v_dim} values a head, "
            f"expected multiples of 16 up to {MAX_HEAD_DIM} on CUDA"
        )
    return "hopper" if is_hopper(device) and (head_dim, rope_dim, v_dim) == HOPPER_HEAD_DIMS else "portable"


def dense_mla_decode(args: DenseDecode) -> None:
    q, pages, block_table, cache_seqlens, scale, softmax_scale, causal, max_seqlen, plan, out, lse, batch_invariant = (
        args
    )
    (batch, s_q, heads, _), device = q.shape, q.device.id
    value, aligned = C_NAMES[q.dtype.name], is_aligned(q, pages.bytes, out)
    tokens, groups = batch * s_q, -(-heads // HEADS)
    hopper = aligned and kernel_for_decode(args, device) == "hopper"
    most_parts = parts_of_token(heads, max_seqlen) if batch_invariant else 0
    ranges = range_count(tokens, groups, max_seqlen, device_sms(device))
    divisible = ranges > 1 and max_seqlen > BLOCK * (2 * MIN_PART - 1) and is_countable(args)
    if batch_invariant:
        divisible, ranges = most_parts > 1, tokens * most_parts if most_parts > 1 else ranges
    plan = plan or DenseDecodePlan(workspace_of_stream(q))
    parts, parts_lse = partial_results(plan, 2 * ranges * heads, q) if divisible else (None, None)
    lengths = {
        "lens": cache_seqlens, "s_q": s_q, "requests": batch, "columns": block_table.shape[1],
        "block_size": pages.block_size, "causal": int(causal), "ranges": ranges,
    }  # fmt: skip
    entries = min(tokens, ranges)
    divided = division(plan, lengths, entries, divisible, most_parts, q)
    results = {
        "s_q": s_q, "heads": heads, "partial_out": pointer(parts), "partial_lse": pointer(parts_lse), "out": out,
        **named_strides("out", "bsh", out), "lse": lse, **named_strides("lse", "bhs", lse),
    }  # fmt: skip
    call = {
        **results, **lengths, "division": divided, "q": q, **named_strides("q", "bsh", q), "pages": pages.bytes,
        "page_stride": pages.bytes.strides[0], "num_slots": pages.num_slots, "block_table": block_table,
        "table_stride": strides(block_table)[0], "softmax_scale": softmax_scale,
    }  # fmt: skip
    at_once, sets, most_sets = INVARIANT_MERGE if batch_invariant else merge_shape(-(-ranges // tokens))
    merge_macros: dict[str, Any] = {"VALUE": value, "ALIGNED": int(aligned), "AT_ONCE": at_once, "MAX_SETS": most_sets}
    if divisible:
        start(MERGE_FILE, **merge_macros)
    if hopper:
        decode, shared_bytes, threads = hopper_decode(device, value, groups)
        call["box_rows"], call["map"] = boxes_of(pages, BLOCK)
    else:
        cache = value if scale is None else "e4m3"
        decode, shared_bytes, threads = portable_decode(device, value, cache, aligned, pages.block_size)
        call["scale"], call["scale_value"] = scale_arguments(scale)
    decode((ranges * groups,), (threads,), decode.arguments(**call), shared_mem=shared_bytes, overlap=True)
    if divisible:
        merge = kernel(MERGE_FILE, "mla_decode_merge", **merge_macros)
        grid, block = entries * heads, sets * V_DIM // 4
        if most_sets == 1:
            grid = min(grid, MERGING_CTAS * device_sms(device))
        arguments = merge.arguments(**results, parts=divided + RANGE_BYTES * ranges, entries=entries)
        merge((grid,), (block,), arguments, overlap=True)


def kernel_for_decode(args: DenseDecode, device: int) -> str:
    """The kernel of dense_mla_decode for aligned arrays: "hopper" or "portable"."""
    cache = args.pages.bytes
    fits = args.scale is None and is_countable(args) and len(cache) * cache.strides[0] <= HOPPER_CACHE_BYTES
    return "hopper" if fits and is_hopper(device) else "portable"


def is_countable(args: DenseDecode) -> bool:
    """Whether 32-bit integers of the kernels can count the blocks of all tokens."""
    blocks = args.block_table.shape[1] * args.pages.block_size // BLOCK
    return args.q.shape[0] * args.q.shape[1] * (blocks + 1 + TOKEN_COST) < 1 << 31


KERNEL_FOR: dict[str, Callable[..., str]] = {"mha_varlen": kernel_for_packed, "dense_mla_decode": kernel_for_decode}


def portable_tile(device: int) -> tuple[int, int]:
    """Heads and keys that the portable decode kernel takes at a time."""
    return HEADS, portable_sizes(shared_bytes_per_block(device))[0]["KEYS"]


def hopper_decode(device: int, value: str, groups: int) -> tuple[Kernel, int, int]:
    """Hopper's decode kernel for `groups` groups of heads, its shared memory and its threads."""
    memory = "sm90/dense/decode/memory.cuh"
    shared_bytes = constant(memory, "SHARED_BYTES")
    found = large_kernel(
        device, shared_bytes, "sm90/dense/decode/decode.cu", "mla_decode_sm90", "sm_90a", VALUE=value,
        PAIRED=int(groups % 2 == 0 and has_clusters(device)),
    )  # fmt: skip
    return found, shared_bytes, constant(memory, "THREADS")


def portable_decode(device: int, value: str, cache: str, aligned: bool, block_size: int) -> tuple[Kernel, int, int]:
    """The portable decode kernel for values and a cache of these types, its shared memory and its threads."""
    sizes, shared_bytes = portable_sizes(shared_bytes_per_block(device))
    found = large_kernel(
        device, shared_bytes, "sm80/dense/decode.cu", "mla_decode", VALUE=value, CACHE=cache, **sizes,
        ALIGNED=int(aligned), WHOLE_STEPS=int(block_size % sizes["KEYS"] == 0),
    )  # fmt: skip
    return found, shared_bytes, constant("sm80/steps.cuh", "THREADS")


def portable_sizes(limit: int) -> tuple[dict[str, int], int]:
    """The macros for sm80/dense/decode.cu that fit `limit` bytes of shared memory, and the bytes that they need.

    Raises ValueError if none fits.
    """
    for keys, stages, registers in PORTABLE_SIZES:
        sizes = {"KEYS": keys, "STAGES": stages, "Q_REGISTERS": registers}
        shared_bytes = constant("sm80/dense/scores.cuh", "SHARED_BYTES", **sizes)
        if shared_bytes <= limit:
            return sizes, shared_bytes
    raise ValueError(f"shared memory: got {limit} bytes a thread block, expected at least {shared_bytes}")


def merge_shape(splits: int) -> tuple[int, int, int]:
    """Sizes of dense_decode_merge.cu for about `splits` parts: parts loaded together, sets of threads, MAX_SETS."""
    if splits <= 4:
        return 4, 1, 1
    if splits > 64:
        return 16, 5, 5  # five sets have registers for 16 parts each
    sets = min(-(-splits // 8), 8)
    return 8, sets, 1 if sets == 1 else 8


def boxes_of(pages: Pages, keys: int) -> tuple[int, Words]:
    """Rows of a TMA box of these pages, for blocks of `keys` keys, and the words of their TensorMap."""
    rows = box_rows(keys, pages.block_size)
    if not rows:
        return 0, NO_MAP
    at, page_bytes, row_bytes = pages.bytes.data.ptr, pages.bytes.strides[0], pages.layout.token_bytes
    tensor_map = map_of_pages(at, len(pages.bytes), page_bytes, pages.block_size, row_bytes, rows)
    return (0 if tensor_map is NO_MAP else rows), tensor_map


HEADS = constant("sm90/dense/decode/memory.cuh", "HEADS")  # heads of a tile, in either kernel
# Keys of a block; least blocks of a range and of a token's part; the cost of a token's start.
BLOCK, MIN_RANGE, MIN_PART, TOKEN_COST = (
    constant("common/dense/work.cuh", name) for name in ("BLOCK", "MIN_RANGE", "MIN_PART", "TOKEN_COST")
)
# Keys of a step, stages of the ring, and registers of a score thread that hold queries; the fastest size first.
PORTABLE_SIZES = ((32, 4, 96), (32, 3, 96), (16, 4, 112))
PARTS = {"parts": V_DIM, "parts_lse": 1}  # names of partial results, and values of a row
RANGE_BYTES = PART_BYTES = 16  # bytes in a division: a range's begin and end; a token's parts
MERGING_CTAS = 12  # merging CTAs per SM if there is one set of threads
PLAN_FILE, MERGE_FILE = "common/dense/plan.cu", "common/dense_decode_merge.cu"
PLAN_BY_TOKEN_FILE = "common/dense/plan_by_token.cu"
# Batch-invariant calls: blocks of a token's part, of which the start costs as much as TOKEN_COST blocks; most heads of
# all parts of a token; and merge_shape for any number of parts.
INVARIANT_PART, MOST_PART_HEADS, INVARIANT_MERGE = 64, 1024, (8, 1, 1)


def parts_of_token(heads: int, max_seqlen: int) -> int:
    """Most parts of a token in a batch-invariant call; the heads bound the memory of a token's partial results."""
    blocks = -(-max_seqlen // BLOCK)
    return max(1, min(MOST_PART_HEADS // heads, -(-blocks // INVARIANT_PART)))


def range_count(tokens: int, groups: int, max_seqlen: int, sms: int) -> int:
    """CTAs of each group of heads among which the blocks of all query tokens are divided (common/dense/work.cuh)."""
    blocks = -(-max_seqlen // BLOCK)
    return max(1, min(sms // groups, tokens * -(-(blocks + TOKEN_COST) // MIN_RANGE)))


@cached_by_capability
def large_kernel(
    device: int, shared_bytes: int, file: str, name: str, arch: str | None = None, **defines: str | int
) -> Kernel:
    """A kernel with more shared memory than launches get by default, on the current device, `device`."""
    found = kernel(file, name, arch, **defines)
    found.max_dynamic_shared_size_bytes = shared_bytes
    return found


def partial_results(plan: DenseDecodePlan, rows: int, like: Any) -> tuple[Any, Any]:
    """float32 arrays of at least rows * 512 and `rows` elements, in the plan's workspace.

    Raises RuntimeError if they would have to be allocated while a CUDA graph is being captured.
    """
    return tuple(plan.workspace.array(name, rows * size, np.float32, like) for name, size in PARTS.items())


def division(
    plan: DenseDecodePlan, lengths: dict[str, Any], entries: int, divisible: bool, most_parts: int, like: Any
) -> int:
    """The address of the division (common/dense/work.cuh), computed now unless the plan has it; 0: whole tokens.

    Args:
        lengths: arguments of the kernel that divides
        entries: tokens whose parts are listed
        divisible: whether tokens may be divided
        most_parts: of a token that is divided by its own length; 0: the lengths of all tokens decide
    """
    ranges, capture = lengths["ranges"], capture_id()
    outside, inside = DenseDecodePlan.arrays
    # Allocates both, so that a capture allocates nothing. Graphs have their own division, which no eager call uses.
    arrays = {
        name: plan.workspace.array(name, (RANGE_BYTES * ranges + PART_BYTES * entries) // 4, np.int32, like)
        for name in (outside, inside)
        if divisible
    }
    name = inside if capture else outside
    shape = (lengths["requests"], lengths["s_q"], ranges, divisible, most_parts)
    if plan.made_for == shape and plan.is_made(name, capture):
        return pointer(arrays.get(name))
    plan.made(shape, name, capture)
    if divisible and most_parts:
        divide, threads = (
            kernel(PLAN_BY_TOKEN_FILE, "plan_dense_decode_by_token"),
            constant(PLAN_BY_TOKEN_FILE, "THREADS"),
        )
        arguments = divide.arguments(
            **lengths, most_parts=most_parts, part_blocks=INVARIANT_PART, division=arrays[name]
        )
        divide((-(-ranges // threads),), (threads,), arguments, overlap=True)
    elif divisible:
        divide = kernel(PLAN_FILE, "plan_dense_decode")
        arguments = divide.arguments(**lengths, division=arrays[name])
        divide((ranges,), (constant(PLAN_FILE, "THREADS"),), arguments, overlap=True)
    return pointer(arrays.get(name))


def workspace_bytes(batch: int, s_q: int, heads: int, max_seqlen: int, sms: int, batch_invariant: bool = False) -> int:
    """Most bytes that partial results of a dense_mla_decode of these sizes need, on a device of `sms` SMs.

    Of a batch-invariant one up to 4.2 MB a token: MOST_PART_HEADS rows of 512 values and one sum, twice.
    """
    tokens = batch * s_q
    if not tokens * heads:
        return 0
    ranges = range_count(tokens, -(-heads // HEADS), max_seqlen, sms)
    if batch_invariant:
        most_parts = parts_of_token(heads, max_seqlen)
        if most_parts == 1:
            return 0
        ranges = tokens * most_parts
    rows = 2 * ranges * heads
    divided = aligned_bytes(RANGE_BYTES * ranges + PART_BYTES * min(tokens, ranges))
    return len(DenseDecodePlan.arrays) * divided + sum(aligned_bytes(4 * rows * size) for size in PARTS.values())
