"""One step forward of a decode batch, all sequences at once in NumPy: a batch is small."""

import numpy as np

INT32_MAX = 2**31 - 1


def advance_step(
    num_seqs: int,
    num_queries: int,
    block_size: int,
    input_tokens: np.ndarray,
    sampled_token_ids: np.ndarray,
    input_positions: np.ndarray,
    seq_lens: np.ndarray,
    slot_mapping: np.ndarray,
    block_tables: np.ndarray,
) -> None:
    # A sampled token's position is the first one after its sequence.
    positions = seq_lens[:num_queries].astype(np.int64)
    columns, offsets = np.divmod(positions, block_size)
    rows = np.flatnonzero((columns >= 0) & (columns < block_tables.shape[1]))
    slots = np.full(num_queries, -1, np.int64)
    blocks = block_tables[rows, columns[rows]].astype(np.int64)
    slots[rows] = np.where(blocks >= 0, blocks * block_size + offsets[rows], -1)
    slots[slots > INT32_MAX] = -1

    sampled, tokens = sampled_token_ids[:num_queries], input_tokens[:num_queries]
    tokens[:] = sampled
    tokens[tokens != sampled] = -1  # int64 values that int32 cannot hold
    input_positions[:num_queries] = positions
    seq_lens[:num_queries] = np.minimum(positions + 1, INT32_MAX)
    slot_mapping[:num_queries] = slots
    input_tokens[num_queries:num_seqs] = 0
    input_positions[num_queries:num_seqs] = 0
    slot_mapping[num_queries:num_seqs] = -1
