"""One step forward of a decode batch, all sequences at once in NumPy: a batch is small."""

import numpy as np

from ..types.metadata import DecodeBatch

INT32_MAX = 2**31 - 1


def advance_step(batch: DecodeBatch) -> None:
    queries, padding = slice(batch.num_queries), slice(batch.num_queries, batch.num_seqs)
    # A sampled token's position is the first one after its sequence.
    positions = batch.seq_lens[queries].astype(np.int64)
    columns, offsets = np.divmod(positions, batch.block_size)
    rows = np.flatnonzero((columns >= 0) & (columns < batch.block_tables.shape[1]))
    slots = np.full(batch.num_queries, -1, np.int64)
    blocks = batch.block_tables[rows, columns[rows]].astype(np.int64)
    slots[rows] = np.where(blocks >= 0, blocks * batch.block_size + offsets[rows], -1)
    slots[slots > INT32_MAX] = -1

    sampled, tokens = batch.sampled_token_ids[queries], batch.input_tokens[queries]
    tokens[:] = sampled
    tokens[tokens != sampled] = -1  # int64 values that int32 cannot hold
    batch.input_positions[queries] = positions
    batch.seq_lens[queries] = np.minimum(positions + 1, INT32_MAX)
    batch.slot_mapping[queries] = slots
    batch.input_tokens[padding] = 0
    batch.input_positions[padding] = 0
    batch.slot_mapping[padding] = -1
