"""One step forward of a decode batch."""

import numpy as np

from ..types.metadata import DecodeBatch
from .compiler import cuda
from .launch import launch
from .rows import lookup_slot

THREADS = 128
INT32_MAX = 2**31 - 1


def advance_step(batch: DecodeBatch) -> None:
    launch(advance_kernel, -(-batch.num_seqs // THREADS), THREADS, batch)


def advance_kernel(batch):
    """A thread takes the sequences of its index, in a grid-stride loop."""
    for i in range(cuda.grid(1), batch.num_seqs, cuda.gridsize(1)):
        token, position, slot = np.int64(0), np.int64(0), np.int64(-1)  # padding
        if i < batch.num_queries:
            token = np.int64(batch.sampled_token_ids[i])
            if batch.input_tokens.itemsize == 4 and not -INT32_MAX - 1 <= token <= INT32_MAX:
                token = np.int64(-1)
            position = np.int64(batch.seq_lens[i])  # the first position after the sequence
            slot = np.int64(lookup_slot(batch.block_tables, i, position, batch.block_size))
            batch.seq_lens[i] = min(position + 1, INT32_MAX)
        batch.input_tokens[i] = token
        batch.input_positions[i] = position
        batch.slot_mapping[i] = slot
