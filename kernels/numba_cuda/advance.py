"""One step forward of a decode batch."""

from typing import Any

import numpy as np

from .compiler import cuda
from .launch import launch
from .rows import lookup_slot

THREADS = 128
INT32_MAX = 2**31 - 1


def advance_step(
    num_seqs: int,
    num_queries: int,
    block_size: int,
    input_tokens: Any,
    sampled_token_ids: Any,
    input_positions: Any,
    seq_lens: Any,
    slot_mapping: Any,
    block_tables: Any,
) -> None:
    launch(
        advance_kernel, -(-num_seqs // THREADS), THREADS,
        num_seqs, num_queries, block_size, input_tokens, sampled_token_ids, input_positions, seq_lens, slot_mapping,
        block_tables,
    )  # fmt: skip


def advance_kernel(
    num_seqs,
    num_queries,
    block_size,
    input_tokens,
    sampled_token_ids,
    input_positions,
    seq_lens,
    slot_mapping,
    block_tables,
):
    """A thread takes the sequences of its index, in a grid-stride loop."""
    for i in range(cuda.grid(1), num_seqs, cuda.gridsize(1)):
        token, position, slot = np.int64(0), np.int64(0), np.int64(-1)  # padding
        if i < num_queries:
            token = np.int64(sampled_token_ids[i])
            if input_tokens.itemsize == 4 and not -INT32_MAX - 1 <= token <= INT32_MAX:
                token = np.int64(-1)
            position = np.int64(seq_lens[i])  # the first one after the sequence
            slot = np.int64(lookup_slot(block_tables, i, position, block_size))
            seq_lens[i] = min(position + 1, INT32_MAX)
        input_tokens[i] = token
        input_positions[i] = position
        slot_mapping[i] = slot
