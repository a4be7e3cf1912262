"""Metadata of a step that all sparse layers use, in one kernel."""

import numpy as np

from ..types.metadata import C128A_RATIO, WindowStep
from .compiler import cuda
from .launch import NO_TABLE, NO_VECTOR, launch
from .rows import lookup_slot, token_position

THREADS = 128


def build_sparse_swa(args: WindowStep) -> None:
    if args.c128a_block_table is None:
        args = args._replace(c128a_block_table=NO_TABLE)
    if args.replay_start is None:
        args = args._replace(replay_start=NO_VECTOR)
    token_blocks = max(args.counts.rows, args.counts.rows_before)
    launch(step_kernel, token_blocks + 1, THREADS, token_blocks, args)


@cuda.jit(device=True)
def request_of(query_start_loc, num_reqs, token):
    """The request that a token belongs to: the last one that starts at or before it."""
    low, high = 1, num_reqs  # requests before `low` start at or before the token, requests from `high` on after it
    while low < high:
        middle = (low + high) // 2
        if query_start_loc[middle] <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1


def step_kernel(token_blocks, args):
    """A thread block takes a row (a token), a thread every blockDim.x-th entry; the last block takes the prefills.

    Unused rows and columns are cleared as far as the previous build wrote them.
    """
    token, counts, buffers = cuda.blockIdx.x, args.counts, args.buffers
    query_start_loc, seq_lens = args.query_start_loc, args.seq_lens
    if token == token_blocks:
        for prefill in range(cuda.threadIdx.x, len(buffers.prefill_gather_lens), cuda.blockDim.x):
            request, gather_len = counts.num_decodes + prefill, np.int64(0)
            if request < counts.num_reqs:
                query_len = np.int64(query_start_loc[request + 1]) - query_start_loc[request]
                seq_len, first_valid = np.int64(seq_lens[request]), np.int64(0)
                if len(args.replay_start):
                    first_valid = max(np.int64(args.replay_start[request]), np.int64(0))
                before = min(max(seq_len - query_len - first_valid, np.int64(0)), np.int64(args.window_size - 1))
                gather_len = max(min(seq_len, query_len + before), np.int64(0))
            buffers.prefill_gather_lens[prefill] = gather_len
        return

    valid = token < counts.rows and args.slot_mapping[token] >= 0
    request, position = 0, np.int64(-1)
    if token < counts.num_tokens:
        request = request_of(query_start_loc, counts.num_reqs, token)
        if valid:
            position = max(token_position(query_start_loc, seq_lens, request, token), np.int64(-1))
    start = max(position - args.window_size + 1, np.int64(0))
    if len(args.replay_start):
        start = max(start, np.int64(args.replay_start[request]) if position >= 0 else np.int64(0))
    length = max(position + 1 - start, np.int64(0))
    width = buffers.swa_indices.shape[1]
    if args.noncausal and position >= 0 and token < counts.num_decode_tokens:  # the same for all tokens of a request
        seq_len = np.int64(seq_lens[request])
        query_len = np.int64(query_start_loc[request + 1]) - query_start_loc[request]
        start = max(seq_len - query_len - args.window_size, np.int64(0))
        length = min(seq_len - start, np.int64(width))
    for j in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        slot = lookup_slot(args.block_table, request, start + j, args.block_size) if j < length else -1
        buffers.swa_indices[token, j] = slot

    compressed = min((position + 1) // C128A_RATIO, args.c128a_width)
    if args.c128a_width:
        for j in range(cuda.threadIdx.x, max(args.c128a_width, counts.width_before), cuda.blockDim.x):
            entry = np.int64(-1)
            if j < compressed:
                entry = np.int64(j)
                if token < counts.num_decode_tokens:
                    entry = np.int64(lookup_slot(args.c128a_block_table, request, j, args.c128a_block_size))
            buffers.c128a_indices[token, j] = entry
    if cuda.threadIdx.x == 0:
        buffers.token_to_req_indices[token] = request
        buffers.is_valid_token[token] = valid
        buffers.positions[token] = min(position, np.int64(2**31 - 1))
        buffers.swa_lens[token] = length
        if args.c128a_width:
            buffers.c128a_lens[token] = compressed
