"""One step forward of a decode batch."""

import numpy as np

from ..types.metadata import DecodeBatch
from .compiler import cuda
from .launch import launch
from .rows import lookup_slot

THREADS = 128
INT32_MAX = 2**31 - 1


def advance_step(batch: DecodeBatch) -> None:
    launch(advance_kernel, -(-batch.num_seqs // THREADS), THREADS, *batch)


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
