"""One rank's part of tokens that are sharded across ranks, and the merge of all ranks' results."""

from typing import Any

import numpy as np

from ..numba_common import slots as slot_rules
from ..numba_common.compiled import compiled
from ..reference.shards import local_block_table
from ..types.shard import Shard, ShardedIndices, ShardedSlots
from .rows import find_request, lookup_slot
from .softmax import LEAST_FLOAT32, exponential
from .threads import parallel_for

__all__ = ["local_block_table", "local_seq_lens", "local_slot_mapping", "localise_indices", "merge_partials"]

TO_MAP = 5  # approximate nanoseconds per entry
NO_FLAGS = np.empty(0, np.bool_)
NO_SINK = np.empty(0, np.float32)

local_position = compiled(slot_rules.local_position)
local_count = compiled(slot_rules.local_count)
token_position = compiled(slot_rules.token_position)


def local_seq_lens(seq_lens: Any, s_q: int, shard: Shard, out: Any) -> None:
    _local_lens(seq_lens, s_q, shard, out)


@compiled(nogil=True)
def _local_lens(seq_lens, s_q, shard, out):
    for i in range(len(out)):
        out[i] = local_count(np.int64(seq_lens[i // s_q]) - (s_q - 1 - i % s_q), shard)


def local_slot_mapping(args: ShardedSlots) -> None:
    parallel_for(len(args.out), TO_MAP, _slot_mapping, args)


@compiled(nogil=True)
def _slot_mapping(first_token, end_token, args):
    for token in range(first_token, end_token):
        args.out[token] = -1
        request = find_request(args.query_start_loc, token)
        if 0 <= request < len(args.seq_lens):
            tokens = token_position(args.query_start_loc, args.seq_lens, request, token) + 1
            if tokens > 0 and tokens % args.compress_ratio == 0:
                local = local_position(tokens // args.compress_ratio - 1, args.shard)
                args.out[token] = lookup_slot(args.block_table, request, local, args.block_size)


def localise_indices(args: ShardedIndices) -> None:
    if args.is_valid_token is None:
        args = args._replace(is_valid_token=NO_FLAGS)
    parallel_for(len(args.indices), args.indices.shape[1] * TO_MAP, _localise, args)


@compiled(nogil=True)
def _localise(first_token, end_token, args):
    indices, slots, is_valid_token = args.indices, args.slots, args.is_valid_token
    for token in range(first_token, end_token):
        request, count = args.token_to_req[token], 0
        for j in range(indices.shape[1]):
            local = local_position(indices[token, j], args.shard)
            slot = lookup_slot(args.block_table, request, local, args.block_size)
            slots[token, j] = -1
            if slot >= 0:
                slots[token, count] = slot
                count += 1
        args.lens[token] = count if len(is_valid_token) == 0 or is_valid_token[token] else 0


def merge_partials(parts: Any, lses: Any, attn_sink: Any | None, out: Any, lse: Any) -> None:
    count, batch, s_q, heads, dim = parts.shape
    merged = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    weights = np.empty((batch * s_q * heads, count), np.float32)
    parallel_for(
        batch * s_q * heads, count * dim, _merge,
        np.asarray(parts, np.float32), lses, NO_SINK if attn_sink is None else attn_sink, weights, merged, lse,
    )  # fmt: skip
    if merged is not out:
        out[...] = merged


@compiled(nogil=True)
def _merge(first_row, end_row, parts, lses, attn_sink, all_weights, out, lse):
    count, _, s_q, heads, dim = parts.shape
    weights = all_weights[first_row]
    for row in range(first_row, end_row):
        head, query, request = row % heads, row // heads % s_q, row // heads // s_q
        top = np.float32(-np.inf)
        for i in range(count):
            weights[i] = lses[i, request, head, query]
            if weights[i] == np.inf:  # means that no key was attended
                weights[i] = -np.inf
            if weights[i] != weights[i] or weights[i] > top:  # a NaN lse must propagate
                top = weights[i]
        empty = top == -np.inf
        total = np.float32(0)
        for i in range(count):
            weights[i] = np.float32(0) if empty else exponential(weights[i] - top, LEAST_FLOAT32)
            total += weights[i]
        lse[request, head, query] = np.float32(np.inf) if empty else top + np.log(total)
        denominator = total
        if len(attn_sink) and not empty:
            denominator += np.exp(attn_sink[head] - top)
        result = out[request, query, head]
        result[:] = 0
        for i in range(count):
            if weights[i] != 0:  # a part of weight 0 may hold any value
                weight = weights[i] / denominator
                for d in range(dim):
                    result[d] += weight * parts[i, request, query, head, d]
