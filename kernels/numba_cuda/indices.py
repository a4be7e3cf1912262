"""Index maps: from positions and local top-k entries to cache slots.

In every kernel a thread block takes a token, and a thread every blockDim.x-th entry of its row.
"""

import numpy as np

from ..types.indices import CombinedIndices, MixedIndices, TopkSlots, WindowSlots
from .compiler import cuda
from .launch import NO_TABLE, NO_VECTOR, launch
from .rows import complete_rows, find_request, lookup_slot, to_span, token_position

THREADS = 128
NO_FLAGS = np.empty(0, np.bool_)


def compute_swa_indices_and_lens(args: WindowSlots) -> None:
    launch(swa_kernel, len(args.swa_lens), THREADS, args)


def swa_kernel(args):
    t = cuda.blockIdx.x
    token = t + args.token_offset
    request = args.token_to_req_indices[token]
    position = np.int64(-1)
    if args.is_valid_token[token] and request >= 0 and request < len(args.seq_lens):
        position = token_position(args.query_start_loc, args.seq_lens, request, token)
    start = max(position - args.window_size + 1, 0)
    length = max(position + 1 - start, 0)
    for j in range(cuda.threadIdx.x, args.window_size, cuda.blockDim.x):
        slot = lookup_slot(args.block_table, request, start + j, args.block_size) if j < length else -1
        args.swa_indices[t, j] = slot
    if cuda.threadIdx.x == 0:
        args.swa_lens[t] = length


def compute_global_topk_indices_and_lens(args: TopkSlots) -> None:
    if args.compact:
        map_compact(args)
        return
    args = args._replace(positions=NO_VECTOR if args.positions is None else args.positions)
    launch(topk_kernel, len(args.topk_indices), THREADS, args)


def map_compact(args: TopkSlots, next_n: int = 1) -> None:
    """The compact form. Without token_to_req_indices each request has next_n tokens; without is_valid_token all tokens
    are valid."""
    empty = {"token_to_req_indices": NO_VECTOR, "is_valid_token": NO_FLAGS, "positions": NO_VECTOR}
    args = args._replace(**{name: array for name, array in empty.items() if getattr(args, name) is None})
    launch(compact_topk_kernel, len(args.topk_indices), THREADS, next_n, args)


def topk_kernel(args):
    found = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()

    token = cuda.blockIdx.x
    request = args.token_to_req_indices[token]
    complete = complete_rows(args.positions, token, args.compress_ratio)
    table, block_size, local = args.block_table, args.block_size, args.topk_indices
    for j in range(cuda.threadIdx.x, local.shape[1], cuda.blockDim.x):
        slot = lookup_slot(table, request, seen_row(local[token, j], complete), block_size)
        args.global_topk_indices[token, j] = slot
        if slot >= 0:
            cuda.atomic.add(found, 0, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        args.topk_lens[token] = found[0] if args.is_valid_token[token] else 0


@cuda.jit(device=True)
def seen_row(local, complete):
    """The local entry, or -1 if its row is not complete."""
    return np.int64(local) if local < complete else np.int64(-1)


def compact_topk_kernel(next_n, args):
    """Like topk_kernel, and compacts the present entries to the left of each row, in order.

    A thread takes a piece of the row and counts its present entries; the counts of earlier threads give their place.
    """
    found = cuda.shared.array(THREADS, np.int32)  # present entries in each thread's piece of the row
    token = cuda.blockIdx.x
    requests = args.token_to_req_indices
    request = np.int64(requests[token]) if len(requests) else np.int64(token // next_n)
    complete = complete_rows(args.positions, token, args.compress_ratio)
    table, pool, local, slots = args.block_table, args.pool, args.topk_indices, args.global_topk_indices
    topk, block_size = local.shape[1], args.block_size // args.pool
    piece = (topk + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = cuda.threadIdx.x * piece
    end = min(first + piece, topk)
    count = 0
    for j in range(first, end):
        slot = lookup_slot(table, request, seen_row(local[token, j], complete), block_size)
        count += slot >= 0 and slot < 2**31 // pool
    found[cuda.threadIdx.x] = count
    cuda.syncthreads()

    to, total = 0, 0
    for thread in range(cuda.blockDim.x):
        if thread < cuda.threadIdx.x:
            to += found[thread]
        total += found[thread]
    for j in range(first, end):
        slot = lookup_slot(table, request, seen_row(local[token, j], complete), block_size)
        if slot >= 0 and slot < 2**31 // pool:
            for i in range(pool):
                slots[token, to * pool + i] = slot * pool + i
            to += 1
    total *= pool
    if pool > 1:
        slot = lookup_slot(table, request, complete, block_size)  # of the open pool
        if slot >= 0 and slot < 2**31 // pool:
            tail = max(np.int64(args.positions[token]) + 1, 0) % pool
            for i in range(cuda.threadIdx.x, tail, cuda.blockDim.x):
                slots[token, total + i] = slot * pool + i
            total += tail
    for j in range(total + cuda.threadIdx.x, slots.shape[1], cuda.blockDim.x):
        slots[token, j] = -1
    if cuda.threadIdx.x == 0:
        args.topk_lens[token] = total if len(args.is_valid_token) == 0 or args.is_valid_token[token] else 0


def combine_topk_swa_indices(args: CombinedIndices) -> None:
    launch(combine_kernel, len(args.combined_lens), THREADS, args)


def combine_kernel(args):
    found = cuda.shared.array(THREADS, np.int32)  # present entries in each thread's piece of the row
    token = cuda.blockIdx.x
    query = token + np.int64(args.query_start_loc[0])
    request = find_request(args.query_start_loc, query)
    complete, num_topk, num_swa, first_gathered = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    if request >= 0:
        position = token_position(args.query_start_loc, args.seq_lens, request, query)
        if position >= 0:
            complete = (position + 1) // args.compress_ratio
            num_topk = min(complete, args.topk)
            num_swa = min(position + 1, args.window_size)
            first_gathered = position - num_swa + 1 - (np.int64(args.seq_lens[request]) - args.gather_lens[request])
    base = np.int64(args.row_stride) * request
    if args.compact:
        limit = min(complete, args.swa_start)
        piece = (args.topk + cuda.blockDim.x - 1) // cuda.blockDim.x
        first = cuda.threadIdx.x * piece
        end = min(first + piece, args.topk)
        count = 0
        for j in range(first, end):
            count += args.topk_indices[token, j] >= 0 and args.topk_indices[token, j] < limit
        found[cuda.threadIdx.x] = count
        cuda.syncthreads()
        to, num_topk = 0, np.int64(0)
        for thread in range(cuda.blockDim.x):
            if thread < cuda.threadIdx.x:
                to += found[thread]
            num_topk += found[thread]
        for j in range(first, end):
            local = np.int64(args.topk_indices[token, j])
            if local >= 0 and local < limit:
                args.combined_indices[token, to] = base + local
                to += 1
    for j in range(cuda.threadIdx.x, args.combined_indices.shape[1], cuda.blockDim.x):
        entry = np.int64(-1)
        if j < num_topk:
            if args.compact:
                continue
            local = np.int64(args.topk_indices[token, j])
            if local >= 0 and local < args.swa_start:
                entry = base + local
        elif j < num_topk + num_swa:
            gathered = first_gathered + j - num_topk
            if gathered >= 0 and args.swa_start + gathered < args.row_stride:
                entry = base + args.swa_start + gathered
        args.combined_indices[token, j] = entry
    if cuda.threadIdx.x == 0:
        args.combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(args: MixedIndices) -> None:
    empty = {"decode_compressed_indices": NO_TABLE, "decode_compressed_topk_lens": NO_VECTOR,
             "compressed_block_table": NO_TABLE, "decode_is_valid_token": NO_FLAGS}  # fmt: skip
    absent = {name: array for name, array in empty.items() if getattr(args, name) is None}
    topk = 0 if args.compressed_block_table is None else args.topk
    launch(mixed_kernel, len(args.sparse_topk_lens), THREADS, args._replace(**absent, topk=topk))


def mixed_kernel(args):
    found = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()

    token = cuda.blockIdx.x
    num_decode_tokens = len(args.decode_swa_indices)
    decode = token < num_decode_tokens
    request = args.token_to_req_indices[token]
    position = np.int64(-1)
    if request >= 0 and request < len(args.seq_lens):
        position = token_position(args.query_start_loc, args.seq_lens, request, token)
    start = max(position - args.window_size + 1, 0)
    num_compressed = args.decode_compressed_indices.shape[1]
    if not decode:
        num_compressed = max(min((position + 1) // args.compress_ratio, args.topk), 0)

    for j in range(cuda.threadIdx.x, args.sparse_indices.shape[1], cuda.blockDim.x):
        slot = np.int64(-1)
        if j < args.window_size:
            if decode:
                slot = np.int64(args.decode_swa_indices[token, j])
            elif start + j <= position:
                slot = np.int64(lookup_slot(args.swa_block_table, request, start + j, args.swa_block_size))
            slot = to_span(slot, args.swa_block_size, args.swa_block_span)
        elif j - args.window_size < num_compressed:
            if decode:
                slot = np.int64(args.decode_compressed_indices[token, j - args.window_size])
            else:
                slot = np.int64(args.prefill_topk_indices[token - num_decode_tokens, j - args.window_size])
            if not decode or args.decode_compressed_indices_are_local:
                slot = np.int64(lookup_slot(args.compressed_block_table, request, slot, args.compressed_block_size))
            if slot >= 0:
                cuda.atomic.add(found, 0, 1)
            slot = to_span(slot, args.compressed_block_size, args.compressed_block_span)
        args.sparse_indices[token, j] = slot
    cuda.syncthreads()

    if cuda.threadIdx.x == 0:
        if decode and args.decode_compressed_indices_are_local:
            valid = len(args.decode_is_valid_token) == 0 or args.decode_is_valid_token[token]
            num_compressed = found[0] if valid else 0
        elif decode and len(args.decode_compressed_topk_lens):
            num_compressed = min(max(args.decode_compressed_topk_lens[token], 0), num_compressed)
        args.sparse_topk_lens[token] = args.window_size + num_compressed
