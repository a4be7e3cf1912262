"""One step forward of a decode batch, in one kernel."""

from ..types.metadata import DecodeBatch
from .compile import kernel
from .launch import C_NAMES, strides

THREADS = 128


def advance_step(batch: DecodeBatch) -> None:
    tokens, sampled, positions = batch.input_tokens, batch.sampled_token_ids, batch.input_positions
    slots, tables = batch.slot_mapping, batch.block_tables
    kernel(
        "common/advance.cu",
        "advance_step",
        TOKEN=C_NAMES[tokens.dtype.name],
        SAMPLED=C_NAMES[sampled.dtype.name],
        POSITION=C_NAMES[positions.dtype.name],
        SLOT=C_NAMES[slots.dtype.name],
    )(
        (-(-batch.num_seqs // THREADS),),
        (THREADS,),
        (
            batch.num_seqs, batch.num_queries, batch.block_size, tokens, *strides(tokens), sampled, *strides(sampled),
            positions, *strides(positions), batch.seq_lens, *strides(batch.seq_lens), slots, *strides(slots),
            tables, strides(tables)[0], tables.shape[1],
        ),
        overlap=True,
    )  # fmt: skip
