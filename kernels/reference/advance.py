"""One step forward of a decode batch."""

import numpy as np

from ..types.metadata import DecodeBatch
from .rows import lookup_slot

INT32_MAX = 2**31 - 1


def advance_step(batch: DecodeBatch) -> None:
    tokens = np.iinfo(batch.input_tokens.dtype)
    for i in range(batch.num_queries):
        token = int(batch.sampled_token_ids[i])
        position = int(batch.seq_lens[i])  # the sampled token follows the sequence's last token
        batch.input_tokens[i] = token if tokens.min <= token <= tokens.max else -1
        batch.input_positions[i] = position
        batch.seq_lens[i] = min(position + 1, INT32_MAX)
        batch.slot_mapping[i] = lookup_slot(batch.block_tables, i, position, batch.block_size)
    padding = slice(batch.num_queries, batch.num_seqs)
    batch.input_tokens[padding] = 0
    batch.input_positions[padding] = 0
    batch.slot_mapping[padding] = -1
