"""Metadata of a step, token by token."""

import numpy as np

from ..types.metadata import C128A_RATIO, WindowStep
from .rows import lookup_slot

INT32_MAX = 2**31 - 1


def build_sparse_swa(args: WindowStep) -> None:
    query_start_loc, seq_lens, counts, buffers = args.query_start_loc, args.seq_lens, args.counts, args.buffers
    width = max(args.c128a_width, counts.width_before)
    for token in range(max(counts.rows, counts.rows_before)):
        buffers.token_to_req_indices[token] = 0
        buffers.is_valid_token[token] = token < counts.rows and args.slot_mapping[token] >= 0
        buffers.positions[token] = -1
        buffers.swa_indices[token] = -1
        buffers.swa_lens[token] = 0
        if args.c128a_width:
            buffers.c128a_indices[token, :width] = -1
            buffers.c128a_lens[token] = 0
        if token >= counts.num_tokens:
            continue
        request = request_of(query_start_loc, counts.num_reqs, token)
        buffers.token_to_req_indices[token] = request
        if not buffers.is_valid_token[token]:
            continue
        position = int(seq_lens[request]) - int(query_start_loc[request + 1]) + token
        buffers.positions[token] = min(max(position, -1), INT32_MAX)
        first_valid = 0 if args.replay_start is None else int(args.replay_start[request])
        start, end = max(position - args.window_size + 1, 0, first_valid), position + 1
        if (
            args.noncausal and position >= 0 and token < counts.num_decode_tokens
        ):  # the same for all tokens of a request
            end = int(seq_lens[request])
            prefix = end - int(query_start_loc[request + 1]) + int(query_start_loc[request])
            start = max(prefix - args.window_size, 0)
            end = min(end, start + buffers.swa_indices.shape[1])
        window = [lookup_slot(args.block_table, request, p, args.block_size) for p in range(start, end)]
        buffers.swa_indices[token, : len(window)] = window
        buffers.swa_lens[token] = len(window)
        if args.c128a_width:
            rows = range(min((position + 1) // C128A_RATIO, args.c128a_width))
            if token < counts.num_decode_tokens:
                table, size = args.c128a_block_table, args.c128a_block_size
                slots = [lookup_slot(table, request, row, size) for row in rows]
            else:
                slots = list(rows)
            buffers.c128a_indices[token, : len(rows)] = slots
            buffers.c128a_lens[token] = len(rows)
    buffers.prefill_gather_lens[:] = 0
    for prefill in range(counts.num_reqs - counts.num_decodes):
        request = counts.num_decodes + prefill
        query_len = int(query_start_loc[request + 1]) - int(query_start_loc[request])
        first_valid = 0 if args.replay_start is None else max(int(args.replay_start[request]), 0)
        before = min(max(int(seq_lens[request]) - query_len - first_valid, 0), args.window_size - 1)
        buffers.prefill_gather_lens[prefill] = max(min(int(seq_lens[request]), query_len + before), 0)


def request_of(query_start_loc: np.ndarray, num_reqs: int, token: int) -> int:
    """The request that a token belongs to: the last one that starts at or before it."""
    return int(np.searchsorted(query_start_loc[1:num_reqs], token, side="right"))
