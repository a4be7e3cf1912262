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


def compute_swa_indices_and_lens(given: WindowSlots) -> None:
    launch(swa_kernel, len(given.swa_lens), THREADS, given)


def swa_kernel(given):
    t = cuda.blockIdx.x
    token = t + given.token_offset
    request = given.token_to_req_indices[token]
    position = np.int64(-1)
    if given.is_valid_token[token] and request >= 0 and request < len(given.seq_lens):
        position = token_position(given.query_start_loc, given.seq_lens, request, token)
    start = max(position - given.window_size + 1, 0)
    length = max(position + 1 - start, 0)
    for j in range(cuda.threadIdx.x, given.window_size, cuda.blockDim.x):
        slot = lookup_slot(given.block_table, request, start + j, given.block_size) if j < length else -1
        given.swa_indices[t, j] = slot
    if cuda.threadIdx.x == 0:
        given.swa_lens[t] = length


def compute_global_topk_indices_and_lens(given: TopkSlots) -> None:
    if given.compact:
        map_compact(given)
        return
    given = given._replace(positions=NO_VECTOR if given.positions is None else given.positions)
    launch(topk_kernel, len(given.topk_indices), THREADS, given)


def map_compact(given: TopkSlots, next_n: int = 1) -> None:
    """The compact form. Without token_to_req_indices each request has next_n tokens; without is_valid_token all tokens
    are valid."""
    empty = {"token_to_req_indices": NO_VECTOR, "is_valid_token": NO_FLAGS, "positions": NO_VECTOR}
    given = given._replace(**{name: array for name, array in empty.items() if getattr(given, name) is None})
    launch(compact_topk_kernel, len(given.topk_indices), THREADS, next_n, given)


def topk_kernel(given):
    found = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()

    token = cuda.blockIdx.x
    request = given.token_to_req_indices[token]
    complete = complete_rows(given.positions, token, given.compress_ratio)
    table, block_size, local = given.block_table, given.block_size, given.topk_indices
    for j in range(cuda.threadIdx.x, local.shape[1], cuda.blockDim.x):
        slot = lookup_slot(table, request, seen_row(local[token, j], complete), block_size)
        given.global_topk_indices[token, j] = slot
        if slot >= 0:
            cuda.atomic.add(found, 0, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        given.topk_lens[token] = found[0] if given.is_valid_token[token] else 0


@cuda.jit(device=True)
def seen_row(local, complete):
    """The local entry, or -1 if its row is not complete."""
    return np.int64(local) if local < complete else np.int64(-1)


def compact_topk_kernel(next_n, given):
    """Like topk_kernel, and compacts the present entries to the left of each row, in order.

    A thread takes a piece of the row and counts its present entries; the counts of earlier threads give their place.
    """
    found = cuda.shared.array(THREADS, np.int32)  # present entries in each thread's piece of the row
    token = cuda.blockIdx.x
    requests = given.token_to_req_indices
    request = np.int64(requests[token]) if len(requests) else np.int64(token // next_n)
    complete = complete_rows(given.positions, token, given.compress_ratio)
    table, block_size, local = given.block_table, given.block_size, given.topk_indices
    topk = local.shape[1]
    piece = (topk + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = cuda.threadIdx.x * piece
    end = min(first + piece, topk)
    count = 0
    for j in range(first, end):
        count += lookup_slot(table, request, seen_row(local[token, j], complete), block_size) >= 0
    found[cuda.threadIdx.x] = count
    cuda.syncthreads()

    to, total = 0, 0
    for thread in range(cuda.blockDim.x):
        if thread < cuda.threadIdx.x:
            to += found[thread]
        total += found[thread]
    for j in range(first, end):
        slot = lookup_slot(table, request, seen_row(local[token, j], complete), block_size)
        if slot >= 0:
            given.global_topk_indices[token, to] = slot
            to += 1
    for j in range(total + cuda.threadIdx.x, topk, cuda.blockDim.x):
        given.global_topk_indices[token, j] = -1
    if cuda.threadIdx.x == 0:
        given.topk_lens[token] = total if len(given.is_valid_token) == 0 or given.is_valid_token[token] else 0


def combine_topk_swa_indices(given: CombinedIndices) -> None:
    launch(combine_kernel, len(given.combined_lens), THREADS, given)


def combine_kernel(given):
    found = cuda.shared.array(THREADS, np.int32)  # present entries in each thread's piece of the row
    token = cuda.blockIdx.x
    query = token + np.int64(given.query_start_loc[0])
    request = find_request(given.query_start_loc, query)
    complete, num_topk, num_swa, first_gathered = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    if request >= 0:
        position = token_position(given.query_start_loc, given.seq_lens, request, query)
        if position >= 0:
            complete = (position + 1) // given.compress_ratio
            num_topk = min(complete, given.topk)
            num_swa = min(position + 1, given.window_size)
            first_gathered = position - num_swa + 1 - (np.int64(given.seq_lens[request]) - given.gather_lens[request])
    base = np.int64(given.row_stride) * request
    if given.compact:
        limit = min(complete, given.swa_start)
        piece = (given.topk + cuda.blockDim.x - 1) // cuda.blockDim.x
        first = cuda.threadIdx.x * piece
        end = min(first + piece, given.topk)
        count = 0
        for j in range(first, end):
            count += given.topk_indices[token, j] >= 0 and given.topk_indices[token, j] < limit
        found[cuda.threadIdx.x] = count
        cuda.syncthreads()
        to, num_topk = 0, np.int64(0)
        for thread in range(cuda.blockDim.x):
            if thread < cuda.threadIdx.x:
                to += found[thread]
            num_topk += found[thread]
        for j in range(first, end):
            local = np.int64(given.topk_indices[token, j])
            if local >= 0 and local < limit:
                given.combined_indices[token, to] = base + local
                to += 1
    for j in range(cuda.threadIdx.x, given.combined_indices.shape[1], cuda.blockDim.x):
        entry = np.int64(-1)
        if j < num_topk:
            if given.compact:
                continue
            local = np.int64(given.topk_indices[token, j])
            if local >= 0 and local < given.swa_start:
                entry = base + local
        elif j < num_topk + num_swa:
            gathered = first_gathered + j - num_topk
            if gathered >= 0 and given.swa_start + gathered < given.row_stride:
                entry = base + given.swa_start + gathered
        given.combined_indices[token, j] = entry
    if cuda.threadIdx.x == 0:
        given.combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(given: MixedIndices) -> None:
    empty = {"decode_compressed_indices": NO_TABLE, "decode_compressed_topk_lens": NO_VECTOR,
             "compressed_block_table": NO_TABLE, "decode_is_valid_token": NO_FLAGS}  # fmt: skip
    absent = {name: array for name, array in empty.items() if getattr(given, name) is None}
    topk = 0 if given.compressed_block_table is None else given.topk
    launch(mixed_kernel, len(given.sparse_topk_lens), THREADS, given._replace(**absent, topk=topk))


def mixed_kernel(given):
    found = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()

    token = cuda.blockIdx.x
    num_decode_tokens = len(given.decode_swa_indices)
    decode = token < num_decode_tokens
    request = given.token_to_req_indices[token]
    position = np.int64(-1)
    if request >= 0 and request < len(given.seq_lens):
        position = token_position(given.query_start_loc, given.seq_lens, request, token)
    start = max(position - given.window_size + 1, 0)
    num_compressed = given.decode_compressed_indices.shape[1]
    if not decode:
        num_compressed = max(min((position + 1) // given.compress_ratio, given.topk), 0)

    for j in range(cuda.threadIdx.x, given.sparse_indices.shape[1], cuda.blockDim.x):
        slot = np.int64(-1)
        if j < given.window_size:
            if decode:
                slot = np.int64(given.decode_swa_indices[token, j])
            elif start + j <= position:
                slot = np.int64(lookup_slot(given.swa_block_table, request, start + j, given.swa_block_size))
            slot = to_span(slot, given.swa_block_size, given.swa_block_span)
        elif j - given.window_size < num_compressed:
            if decode:
                slot = np.int64(given.decode_compressed_indices[token, j - given.window_size])
            else:
                slot = np.int64(given.prefill_topk_indices[token - num_decode_tokens, j - given.window_size])
            if not decode or given.decode_compressed_indices_are_local:
                slot = np.int64(lookup_slot(given.compressed_block_table, request, slot, given.compressed_block_size))
            if slot >= 0:
                cuda.atomic.add(found, 0, 1)
            slot = to_span(slot, given.compressed_block_size, given.compressed_block_span)
        given.sparse_indices[token, j] = slot
    cuda.syncthreads()

    if cuda.threadIdx.x == 0:
        if decode and given.decode_compressed_indices_are_local:
            valid = len(given.decode_is_valid_token) == 0 or given.decode_is_valid_token[token]
            num_compressed = found[0] if valid else 0
        elif decode and len(given.decode_compressed_topk_lens):
            num_compressed = min(max(given.decode_compressed_topk_lens[token], 0), num_compressed)
        given.sparse_topk_lens[token] = given.window_size + num_compressed
