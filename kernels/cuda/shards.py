"""One rank's part of tokens that are sharded across ranks, and the merge of all ranks' results."""

from typing import Any

from ..types.shard import Shard, ShardedIndices, ShardedSlots
from .compile import kernel
from .constants import constant
from .indices import table_arguments
from .launch import C_NAMES, is_aligned, pointer, strides

THREADS = constant("common/shards.cu", "THREADS")  # per CTA, also in common/merge_partials.cu


def launch(name: str, threads: int, arguments: tuple[Any, ...]) -> None:
    run = kernel("common/shards.cu", name)
    run((-(-threads // THREADS),), (THREADS,), arguments, overlap=True)


def local_seq_lens(seq_lens: Any, s_q: int, shard: Shard, out: Any) -> None:
    launch("local_seq_lens", len(out), (seq_lens, s_q, *shard, out, len(out)))


def local_block_table(block_table: Any, s_q: int, first: int, step: int, out: Any) -> None:
    rows, columns = out.shape
    table = (block_table, strides(block_table)[0], block_table.shape[1])
    launch("local_block_table", rows * columns, (*table, s_q, first, step, out, strides(out)[0], rows, columns))


def local_slot_mapping(args: ShardedSlots) -> None:
    batch = (args.query_start_loc, args.seq_lens, len(args.seq_lens))
    rest = (args.block_size, args.compress_ratio, *args.shard, args.out, len(args.out))
    launch("local_slot_mapping", len(args.out), (*batch, *table_arguments(args.block_table), *rest))


def localise_indices(args: ShardedIndices) -> None:
    indices, slots = args.indices, args.slots
    tokens, width = indices.shape
    launch(
        "localise_indices", THREADS * tokens,
        (
            indices, strides(indices)[0], width, args.token_to_req, pointer(args.is_valid_token),
            *table_arguments(args.block_table), args.block_size, *args.shard, slots, strides(slots)[0], args.lens,
        ),
    )  # fmt: skip


def merge_partials(parts: Any, lses: Any, attn_sink: Any | None, out: Any, lse: Any) -> None:
    count, batch, s_q, heads, dim = parts.shape
    pieces = batch * s_q * heads * -(-dim // 256)  # a warp per piece
    merge = kernel(
        "common/merge_partials.cu", "merge_partials", VALUE=C_NAMES[out.dtype.name], ALIGNED=int(is_aligned(parts, out))
    )
    merge(
        (-(-pieces * 32 // THREADS),),
        (THREADS,),
        (
            parts, *strides(parts)[:4], lses, *strides(lses), pointer(attn_sink), out, *strides(out)[:3], lse,
            *strides(lse), count, s_q, heads, dim, pieces,
        ),
        overlap=True,
    )  # fmt: skip
