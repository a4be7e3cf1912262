"""One rank's part of tokens that are sharded across ranks, and the merge of all ranks' results."""

from typing import Any

import numpy as np

from ..numba_common import slots as slot_rules
from ..numba_common.numbers import from_float32, to_float32
from ..types.shard import Shard, ShardedIndices, ShardedSlots
from .compiler import cuda
from .intrinsics import exponential
from .launch import MAX_BLOCKS, NO_SCALE, kind_of, launch
from .log_sums import MINUS_INFINITY, ONE, bits_of_log_sum, larger, log_sum_of, rest_of_sink, summary
from .rows import find_request, lookup_slot, token_position

THREADS = 128
NO_FLAGS = np.empty(0, np.bool_)

local_position = cuda.jit(device=True)(slot_rules.local_position)
local_count = cuda.jit(device=True)(slot_rules.local_count)


def local_seq_lens(seq_lens: Any, s_q: int, shard: Shard, out: Any) -> None:
    launch(lens_kernel, -(-len(out) // THREADS), THREADS, seq_lens, s_q, shard, out)


def lens_kernel(seq_lens, s_q, shard, out):
    for i in range(cuda.grid(1), len(out), cuda.gridsize(1)):
        tokens = np.int64(seq_lens[i // s_q]) - (s_q - 1 - i % s_q)
        out[i] = local_count(tokens, shard)


def local_block_table(block_table: Any, s_q: int, first: int, step: int, out: Any) -> None:
    launch(table_kernel, min(out.shape[0], MAX_BLOCKS), THREADS, block_table, s_q, first, step, out)


def table_kernel(block_table, s_q, first, step, out):
    for row in range(cuda.blockIdx.x, out.shape[0], cuda.gridDim.x):
        for column in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
            source = first + column * step
            out[row, column] = block_table[row // s_q, source] if source < block_table.shape[1] else -1


def local_slot_mapping(args: ShardedSlots) -> None:
    launch(slots_kernel, -(-len(args.out) // THREADS), THREADS, args)


def slots_kernel(args):
    for token in range(cuda.grid(1), len(args.out), cuda.gridsize(1)):
        request = find_request(args.query_start_loc, token)
        slot = np.int64(-1)
        if request >= 0 and request < len(args.seq_lens):
            tokens = token_position(args.query_start_loc, args.seq_lens, request, token) + 1
            if tokens > 0 and tokens % args.compress_ratio == 0:
                local = local_position(tokens // args.compress_ratio - 1, args.shard)
                slot = np.int64(lookup_slot(args.block_table, request, local, args.block_size))
        args.out[token] = slot


def localise_indices(args: ShardedIndices) -> None:
    if args.is_valid_token is None:
        args = args._replace(is_valid_token=NO_FLAGS)
    launch(localise_kernel, len(args.indices), THREADS, args)


def localise_kernel(args):
    """A thread block takes a token, and a thread writes the rank's entries of a piece of the token's row.

    A thread counts its entries; the counts of earlier threads give their place.
    """
    found = cuda.shared.array(THREADS, np.int32)  # the rank's entries in each thread's piece of the row
    token = cuda.blockIdx.x
    request, width = args.token_to_req[token], args.indices.shape[1]
    piece = (width + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = cuda.threadIdx.x * piece
    end = min(first + piece, width)
    count = 0
    for j in range(first, end):
        local = local_position(args.indices[token, j], args.shard)
        count += lookup_slot(args.block_table, request, local, args.block_size) >= 0
    found[cuda.threadIdx.x] = count
    cuda.syncthreads()

    to, total = 0, 0
    for thread in range(cuda.blockDim.x):
        if thread < cuda.threadIdx.x:
            to += found[thread]
        total += found[thread]
    for j in range(first, end):
        local = local_position(args.indices[token, j], args.shard)
        slot = lookup_slot(args.block_table, request, local, args.block_size)
        if slot >= 0:
            args.slots[token, to] = slot
            to += 1
    for j in range(total + cuda.threadIdx.x, width, cuda.blockDim.x):
        args.slots[token, j] = -1
    if cuda.threadIdx.x == 0:
        args.lens[token] = total if len(args.is_valid_token) == 0 or args.is_valid_token[token] else 0


def merge_partials(parts: Any, lses: Any, attn_sink: Any | None, out: Any, lse: Any) -> None:
    batch, s_q, heads, _ = out.shape
    launch(
        merge_kernel, min(batch * s_q * heads, MAX_BLOCKS), THREADS,
        parts, lses, NO_SCALE if attn_sink is None else attn_sink, kind_of(out), out, lse,
    )  # fmt: skip


def merge_kernel(parts, lses, attn_sink, kind, out, lse):
    """A thread block takes every gridDim.x-th head of a query, a thread every blockDim.x-th value of its output."""
    count, batch, s_q, heads, dim = parts.shape
    for row in range(cuda.blockIdx.x, batch * s_q * heads, cuda.gridDim.x):
        head, query, request = row % heads, row // heads % s_q, row // heads // s_q
        top = MINUS_INFINITY
        for i in range(count):
            top = larger(top, log_sum_of(lses[i, request, head, query]))
        shift = np.float32(0) if top == MINUS_INFINITY else top
        total = np.float32(0)
        for i in range(count):
            total += exponential(log_sum_of(lses[i, request, head, query]) - shift)
        log_sum, inv_sum = summary(top, total, ONE)
        inv_sum *= rest_of_sink(attn_sink, head, log_sum, ONE)
        for d in range(cuda.threadIdx.x, dim, cuda.blockDim.x):
            value = np.float32(0)
            for i in range(count):
                weight = exponential(log_sum_of(lses[i, request, head, query]) - shift) * inv_sum
                if weight != 0:  # a part of weight 0 may hold any value; NaN must propagate
                    value += weight * to_float32(parts[i, request, query, head, d], kind)
            out[request, query, head, d] = from_float32(value, kind)
        if cuda.threadIdx.x == 0:
            lse[request, head, query] = bits_of_log_sum(log_sum, ONE)
