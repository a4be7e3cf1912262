"""Metadata of a step, one token per loop step, parallel over the cores."""

import numpy as np

from ..numba_common.compiled import compiled
from ..types.metadata import C128A_RATIO, WindowStep
from .indices import token_position
from .threads import parallel_for

NO_TABLE, NO_VECTOR = np.empty((0, 0), np.int32), np.empty(0, np.int32)


def build_sparse_swa(args: WindowStep) -> None:
    table, replay, counts = args.c128a_block_table, args.replay_start, args.counts
    args = args._replace(
        c128a_block_table=NO_TABLE if table is None else table, replay_start=NO_VECTOR if replay is None else replay
    )
    width = max(args.c128a_width, counts.width_before)
    parallel_for(max(counts.rows, counts.rows_before), args.window_size + width, _build, args)
    lens = args.buffers.prefill_gather_lens
    _gather_lens(args.query_start_loc, args.seq_lens, counts, args.window_size, args.replay_start, lens)


@compiled(nogil=True)
def _build(first_token, end_token, args):
    query_start_loc, seq_lens, counts, buffers = args.query_start_loc, args.seq_lens, args.counts, args.buffers
    width = max(args.c128a_width, counts.width_before)
    for token in range(first_token, end_token):
        valid = token < counts.rows and args.slot_mapping[token] >= 0
        buffers.is_valid_token[token] = valid
        request = 0
        if token < counts.num_tokens:
            request = request_of(query_start_loc, counts.num_reqs, token)
        buffers.token_to_req_indices[token] = request
        start = 0
        length = 0
        compressed = 0
        position = np.int64(-1)
        if valid and token < counts.num_tokens:
            position = max(token_position(query_start_loc, seq_lens, request, token), np.int64(-1))
            start = max(position - args.window_size + 1, 0)
            if len(args.replay_start):
                start = max(start, np.int64(args.replay_start[request]))
            length = max(position + 1 - start, 0)
            if args.noncausal and position >= 0 and token < counts.num_decode_tokens:
                start = first_of_block(query_start_loc, seq_lens, request, args.window_size)
                length = min(np.int64(seq_lens[request]) - start, buffers.swa_indices.shape[1])
            compressed = min((position + 1) // C128A_RATIO, args.c128a_width)
        buffers.positions[token] = min(position, 2**31 - 1)
        write_slots(args.block_table, request, start, length, args.block_size, buffers.swa_indices[token])
        buffers.swa_lens[token] = length
        if args.c128a_width > 0:
            row = buffers.c128a_indices[token, :width]
            if token < counts.num_decode_tokens:
                write_slots(args.c128a_block_table, request, 0, compressed, args.c128a_block_size, row)
            else:
                for j in range(width):
                    row[j] = j if j < compressed else -1
            buffers.c128a_lens[token] = compressed


@compiled
def first_of_block(query_start_loc, seq_lens, request, window_size):
    """First position that all tokens of a decode see if it is not causal."""
    prefix = np.int64(seq_lens[request]) - query_start_loc[request + 1] + query_start_loc[request]
    return max(prefix - window_size, 0)


@compiled
def _gather_lens(query_start_loc, seq_lens, counts, window_size, replay_start, prefill_gather_lens):
    prefill_gather_lens[:] = 0
    for prefill in range(counts.num_reqs - counts.num_decodes):
        request = counts.num_decodes + prefill
        query_len = np.int64(query_start_loc[request + 1]) - query_start_loc[request]
        first_valid = max(np.int64(replay_start[request]), 0) if len(replay_start) else np.int64(0)
        before = min(max(np.int64(seq_lens[request]) - query_len - first_valid, 0), window_size - 1)
        prefill_gather_lens[prefill] = max(min(np.int64(seq_lens[request]), query_len + before), 0)


@compiled
def request_of(query_start_loc, num_reqs, token):
    """The request that a token belongs to: the last one that starts at or before it."""
    return np.searchsorted(query_start_loc[1:num_reqs], token, side="right")


@compiled
def write_slots(block_table, request, start, count, block_size, row):
    """The slots of `count` positions from `start` on into `row`, page by page, and -1 into the rest."""
    done = 0
    while done < count:
        column, offset = divmod(start + done, block_size)
        end = min(done + block_size - offset, count)
        block = np.int64(-1)
        if column < block_table.shape[1]:
            block = np.int64(block_table[request, column])
        slot = block * block_size + offset
        for j in range(done, end):
            row[j] = slot + j - done if block >= 0 and slot + j - done < 2**31 else -1
        done = end
    row[count:] = -1
