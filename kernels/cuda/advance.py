"""One step forward of a decode batch, in one kernel."""

from typing import Any

from .compile import kernel
from .launch import C_NAMES, strides

THREADS = 128


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
    kernel(
        "common/advance.cu",
        "advance_step",
        TOKEN=C_NAMES[input_tokens.dtype.name],
        SAMPLED=C_NAMES[sampled_token_ids.dtype.name],
        POSITION=C_NAMES[input_positions.dtype.name],
        SLOT=C_NAMES[slot_mapping.dtype.name],
    )(
        (-(-num_seqs // THREADS),),
        (THREADS,),
        (
            num_seqs, num_queries, block_size,
            input_tokens, *strides(input_tokens), sampled_token_ids, *strides(sampled_token_ids),
            input_positions, *strides(input_positions), seq_lens, *strides(seq_lens),
            slot_mapping, *strides(slot_mapping), block_tables, strides(block_tables)[0], block_tables.shape[1],
        ),
        overlap=True,
    )  # fmt: skip
