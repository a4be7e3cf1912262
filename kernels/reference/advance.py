"""One step forward of a decode batch."""

import numpy as np

from .rows import lookup_slot

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
    tokens = np.iinfo(input_tokens.dtype)
    for i in range(num_queries):
        token = int(sampled_token_ids[i])
        position = int(seq_lens[i])  # of the sampled token: the first one after the sequence
        input_tokens[i] = token if tokens.min <= token <= tokens.max else -1
        input_positions[i] = position
        seq_lens[i] = min(position + 1, INT32_MAX)
        slot_mapping[i] = lookup_slot(block_tables, i, position, block_size)
    input_tokens[num_queries:num_seqs] = 0
    input_positions[num_queries:num_seqs] = 0
    slot_mapping[num_queries:num_seqs] = -1
