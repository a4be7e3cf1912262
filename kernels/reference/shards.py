"""One rank's part of tokens that are sharded across ranks, and the merge of all ranks' results."""

import numpy as np

from ..types.shard import Shard, ShardedIndices, ShardedSlots
from .rows import lookup_slot


def local_position(position: int, shard: Shard) -> int:
    """Index of a position among the rank's tokens, or -1 if another rank stores the position."""
    turn = position // shard.interleave
    if position < 0 or turn % shard.size != shard.rank:
        return -1
    return turn // shard.size * shard.interleave + position % shard.interleave


def local_seq_lens(seq_lens: np.ndarray, s_q: int, shard: Shard, out: np.ndarray) -> None:
    for i in range(len(out)):
        length = int(seq_lens[i // s_q]) - (s_q - 1 - i % s_q)
        out[i] = shard.local_len(max(length, 0))


def local_block_table(block_table: np.ndarray, s_q: int, first: int, step: int, out: np.ndarray) -> None:
    columns = block_table[:, first::step][:, : out.shape[1]]
    out[:] = -1
    out[:, : columns.shape[1]] = np.repeat(columns, s_q, axis=0)


def local_slot_mapping(args: ShardedSlots) -> None:
    args.out[:] = -1
    for request in range(len(args.seq_lens)):
        first, end = int(args.query_start_loc[request]), int(args.query_start_loc[request + 1])
        for token in range(max(first, 0), min(end, len(args.out))):
            tokens = int(args.seq_lens[request]) - end + token + 1
            if tokens > 0 and tokens % args.compress_ratio == 0:
                local = local_position(tokens // args.compress_ratio - 1, args.shard)
                args.out[token] = lookup_slot(args.block_table, request, local, args.block_size)


def localise_indices(args: ShardedIndices) -> None:
    args.slots[:] = -1
    for token, row in enumerate(args.indices):
        request, local = int(args.token_to_req[token]), [local_position(int(i), args.shard) for i in row]
        mine = [lookup_slot(args.block_table, request, i, args.block_size) for i in local]
        mine = [slot for slot in mine if slot >= 0]
        args.slots[token, : len(mine)] = mine
        args.lens[token] = len(mine) if args.is_valid_token is None or args.is_valid_token[token] else 0


def merge_partials(
    parts: np.ndarray,
    lses: np.ndarray,
    attn_sink: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    logs = lses.astype(np.float64)  # [n, b, h, s_q]
    logs[np.isposinf(logs)] = -np.inf  # +inf means that no key was attended
    top = logs.max(axis=0)
    empty = np.isneginf(top)
    weights = np.exp(logs - np.where(empty, 0.0, top))
    total = np.where(empty, 1.0, weights.sum(axis=0))
    log_sum = np.where(empty, -np.inf, top) + np.log(total)
    sink_factor: np.ndarray | float = 1.0
    if attn_sink is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            sink_factor = 1 / (1 + np.exp(attn_sink.astype(np.float64)[:, None] - np.where(empty, 0.0, log_sum)))
    fraction = (weights / total * sink_factor).transpose(0, 1, 3, 2)[..., None]  # [n, b, s_q, h, 1]
    # A part of weight 0 may hold any value; a NaN lse must propagate.
    present = np.where(weights.transpose(0, 1, 3, 2)[..., None] == 0, 0.0, parts.astype(np.float64))
    out[:] = (fraction * present).sum(axis=0).astype(out.dtype)
    lse[:] = np.where(empty, np.inf, log_sum)
