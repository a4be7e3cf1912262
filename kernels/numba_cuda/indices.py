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
    launch(swa_kernel, len(given.swa_lens), THREADS, *given)


def swa_kernel(
    query_start_loc,
    seq_lens,
    token_to_req_indices,
    is_valid_token,
    block_table,
    block_size,
    window_size,
    token_offset,
    swa_indices,
    swa_lens,
):
    t = cuda.blockIdx.x
    token = t + token_offset
    request = token_to_req_indices[token]
    position = np.int64(-1)
    if is_valid_token[token] and request >= 0 and request < len(seq_lens):
        position = token_position(query_start_loc, seq_lens, request, token)
    start = max(position - window_size + 1, 0)
    length = max(position + 1 - start, 0)
    for j in range(cuda.threadIdx.x, window_size, cuda.blockDim.x):
        swa_indices[t, j] = lookup_slot(block_table, request, start + j, block_size) if j < length else -1
    if cuda.threadIdx.x == 0:
        swa_lens[t] = length


def compute_global_topk_indices_and_lens(given: TopkSlots) -> None:
    if given.compact:
        map_compact(given)
        return
    given = given._replace(positions=NO_VECTOR if given.positions is None else given.positions)
    launch(topk_kernel, len(given.topk_indices), THREADS, *given[:-1])  # without `compact`


def map_compact(given: TopkSlots, next_n: int = 1) -> None:
    """The compact form. Without token_to_req_indices requests have next_n tokens each, without is_valid_token all
    tokens are valid."""
    empty = {"token_to_req_indices": NO_VECTOR, "is_valid_token": NO_FLAGS, "positions": NO_VECTOR}
    given = given._replace(**{name: array for name, array in empty.items() if getattr(given, name) is None})
    launch(compact_topk_kernel, len(given.topk_indices), THREADS, next_n, *given[:-1])


def topk_kernel(
    topk_indices,
    token_to_req_indices,
    block_table,
    block_size,
    is_valid_token,
    positions,
    compress_ratio,
    global_topk_indices,
    topk_lens,
):
    found = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()

    token = cuda.blockIdx.x
    request = token_to_req_indices[token]
    complete = complete_rows(positions, token, compress_ratio)
    for j in range(cuda.threadIdx.x, topk_indices.shape[1], cuda.blockDim.x):
        slot = lookup_slot(block_table, request, seen_row(topk_indices[token, j], complete), block_size)
        global_topk_indices[token, j] = slot
        if slot >= 0:
            cuda.atomic.add(found, 0, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        topk_lens[token] = found[0] if is_valid_token[token] else 0


@cuda.jit(device=True)
def seen_row(local, complete):
    """A local entry, or -1 if its row is not complete."""
    return np.int64(local) if local < complete else np.int64(-1)


def compact_topk_kernel(
    next_n,
    topk_indices,
    token_to_req_indices,
    block_table,
    block_size,
    is_valid_token,
    positions,
    compress_ratio,
    global_topk_indices,
    topk_lens,
):
    """The same with the present entries compacted to the left of each row, in order: a thread takes a piece of the row.

    It counts the present entries of its piece; the counts of earlier threads give their place.
    """
    found = cuda.shared.array(THREADS, np.int32)  # per thread
    token = cuda.blockIdx.x
    request = np.int64(token_to_req_indices[token]) if len(token_to_req_indices) else np.int64(token // next_n)
    complete = complete_rows(positions, token, compress_ratio)
    topk = topk_indices.shape[1]
    piece = (topk + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = cuda.threadIdx.x * piece
    end = min(first + piece, topk)
    count = 0
    for j in range(first, end):
        count += lookup_slot(block_table, request, seen_row(topk_indices[token, j], complete), block_size) >= 0
    found[cuda.threadIdx.x] = count
    cuda.syncthreads()

    to, total = 0, 0
    for thread in range(cuda.blockDim.x):
        if thread < cuda.threadIdx.x:
            to += found[thread]
        total += found[thread]
    for j in range(first, end):
        slot = lookup_slot(block_table, request, seen_row(topk_indices[token, j], complete), block_size)
        if slot >= 0:
            global_topk_indices[token, to] = slot
            to += 1
    for j in range(total + cuda.threadIdx.x, topk, cuda.blockDim.x):
        global_topk_indices[token, j] = -1
    if cuda.threadIdx.x == 0:
        topk_lens[token] = total if len(is_valid_token) == 0 or is_valid_token[token] else 0


def combine_topk_swa_indices(given: CombinedIndices) -> None:
    launch(combine_kernel, len(given.combined_lens), THREADS, *given)


def combine_kernel(
    topk_indices,
    query_start_loc,
    seq_lens,
    gather_lens,
    window_size,
    compress_ratio,
    topk,
    row_stride,
    swa_start,
    compact,
    combined_indices,
    combined_lens,
):
    found = cuda.shared.array(THREADS, np.int32)  # present entries in each thread's piece of the row
    token = cuda.blockIdx.x
    query = token + np.int64(query_start_loc[0])
    request = find_request(query_start_loc, query)
    complete, num_topk, num_swa, first_gathered = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    if request >= 0:
        position = token_position(query_start_loc, seq_lens, request, query)
        if position >= 0:
            complete = (position + 1) // compress_ratio
            num_topk = min(complete, topk)
            num_swa = min(position + 1, window_size)
            first_gathered = position - num_swa + 1 - (np.int64(seq_lens[request]) - gather_lens[request])
    base = np.int64(row_stride) * request
    if compact:
        limit = min(complete, swa_start)
        piece = (topk + cuda.blockDim.x - 1) // cuda.blockDim.x
        first = cuda.threadIdx.x * piece
        end = min(first + piece, topk)
        count = 0
        for j in range(first, end):
            count += topk_indices[token, j] >= 0 and topk_indices[token, j] < limit
        found[cuda.threadIdx.x] = count
        cuda.syncthreads()
        to, num_topk = 0, np.int64(0)
        for thread in range(cuda.blockDim.x):
            if thread < cuda.threadIdx.x:
                to += found[thread]
            num_topk += found[thread]
        for j in range(first, end):
            local = np.int64(topk_indices[token, j])
            if local >= 0 and local < limit:
                combined_indices[token, to] = base + local
                to += 1
    for j in range(cuda.threadIdx.x, combined_indices.shape[1], cuda.blockDim.x):
        entry = np.int64(-1)
        if j < num_topk:
            if compact:
                continue
            local = np.int64(topk_indices[token, j])
            if local >= 0 and local < swa_start:
                entry = base + local
        elif j < num_topk + num_swa:
            gathered = first_gathered + j - num_topk
            if gathered >= 0 and swa_start + gathered < row_stride:
                entry = base + swa_start + gathered
        combined_indices[token, j] = entry
    if cuda.threadIdx.x == 0:
        combined_lens[token] = num_topk + num_swa


def build_flashinfer_mixed_sparse_indices(given: MixedIndices) -> None:
    empty = {"decode_compressed_indices": NO_TABLE, "decode_compressed_topk_lens": NO_VECTOR,
             "compressed_block_table": NO_TABLE, "decode_is_valid_token": NO_FLAGS}  # fmt: skip
    absent = {name: array for name, array in empty.items() if getattr(given, name) is None}
    topk = 0 if given.compressed_block_table is None else given.topk
    launch(mixed_kernel, len(given.sparse_topk_lens), THREADS, *given._replace(**absent, topk=topk))


def mixed_kernel(
    decode_swa_indices,
    decode_compressed_indices,
    decode_compressed_topk_lens,
    prefill_topk_indices,
    query_start_loc,
    seq_lens,
    token_to_req_indices,
    swa_block_table,
    swa_block_size,
    compressed_block_table,
    compressed_block_size,
    window_size,
    compress_ratio,
    topk,
    decode_compressed_indices_are_local,
    decode_is_valid_token,
    swa_block_span,
    compressed_block_span,
    sparse_indices,
    sparse_topk_lens,
):
    found = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        found[0] = 0
    cuda.syncthreads()

    token = cuda.blockIdx.x
    num_decode_tokens = len(decode_swa_indices)
    decode = token < num_decode_tokens
    request = token_to_req_indices[token]
    position = np.int64(-1)
    if request >= 0 and request < len(seq_lens):
        position = token_position(query_start_loc, seq_lens, request, token)
    start = max(position - window_size + 1, 0)
    num_compressed = decode_compressed_indices.shape[1]
    if not decode:
        num_compressed = max(min((position + 1) // compress_ratio, topk), 0)

    for j in range(cuda.threadIdx.x, sparse_indices.shape[1], cuda.blockDim.x):
        slot = np.int64(-1)
        if j < window_size:
            if decode:
                slot = np.int64(decode_swa_indices[token, j])
            elif start + j <= position:
                slot = np.int64(lookup_slot(swa_block_table, request, start + j, swa_block_size))
            slot = to_span(slot, swa_block_size, swa_block_span)
        elif j - window_size < num_compressed:
            if decode:
                slot = np.int64(decode_compressed_indices[token, j - window_size])
            else:
                slot = np.int64(prefill_topk_indices[token - num_decode_tokens, j - window_size])
            if not decode or decode_compressed_indices_are_local:
                slot = np.int64(lookup_slot(compressed_block_table, request, slot, compressed_block_size))
            if slot >= 0:
                cuda.atomic.add(found, 0, 1)
            slot = to_span(slot, compressed_block_size, compressed_block_span)
        sparse_indices[token, j] = slot
    cuda.syncthreads()

    if cuda.threadIdx.x == 0:
        if decode and decode_compressed_indices_are_local:
            valid = len(decode_is_valid_token) == 0 or decode_is_valid_token[token]
            num_compressed = found[0] if valid else 0
        elif decode and len(decode_compressed_topk_lens):
            num_compressed = min(max(decode_compressed_topk_lens[token], 0), num_compressed)
        sparse_topk_lens[token] = window_size + num_compressed
