"""Attention problems sharded across ranks, starting with the insert of their rows, and the result of one device."""

import dataclasses

import numpy as np

import cumla
from cumla.bounds import DECODE_LSE, DECODE_OUT
from cumla.kernels.reference.rows import read_tokens
from cumla.kernels.types.segments import Pages
from cumla.parallel import (
    ContextAttention,
    Shard,
    local_seq_lens,
    local_slot_mapping,
    local_window,
    localise_indices,
)
from support.bounds import assert_same_direction, assert_within
from support.lab import BF16, to_float

BLOCK = 4


@dataclasses.dataclass
class Context:
    """Packed rows of requests, [sum of lens, d], and their queries [T, h, d].

    Attributes:
        token_to_req: [T]: the request of each query
        seen: [T]: number of the request's rows that the query sees
    """

    rows: np.ndarray
    lens: np.ndarray
    q: np.ndarray
    token_to_req: np.ndarray
    seen: np.ndarray

    @classmethod
    def make(cls, rng, lens, heads, dim, s_q=1):
        lens = np.array(lens, np.int32)
        rows = (rng.standard_normal((lens.sum(), dim)) * np.exp(rng.uniform(-1, 1, (lens.sum(), 1)))).astype(BF16)
        token_to_req = np.repeat(np.arange(len(lens), dtype=np.int32), s_q)
        seen = np.maximum(lens[token_to_req] - s_q + 1 + np.tile(np.arange(s_q), len(lens)), 0).astype(np.int32)
        return cls(rows, lens, rng.standard_normal((len(seen), heads, dim)).astype(BF16), token_to_req, seen)

    @property
    def starts(self):
        return np.concatenate([[0], np.cumsum(self.lens)]).astype(np.int32)

    def pages(self, shard, seed=0):
        """A block table for the rank, and its number of pages."""
        columns = -(-int(self.lens.max()) // (BLOCK * shard.size)) + shard.interleave
        table = np.random.default_rng([seed, shard.rank]).permutation(len(self.lens) * columns).astype(np.int32)
        return table.reshape(len(self.lens), columns), table.size

    def slots(self, table, shard, backend=None):
        return local_slot_mapping(
            self.starts, self.lens, table, BLOCK, shard, num_tokens=len(self.rows), backend=backend
        )  # fmt: skip

    def own_heads(self, comm):
        own = self.q.shape[1] // comm.size
        return slice(comm.rank * own, (comm.rank + 1) * own)


def dense_on(comm, context, interleave, split_heads=False, sink=None, put=np.asarray, backend=None, **options):
    """A rank's work, starting with the insert of its rows: out and lse of its heads. `put` moves arrays to it."""
    shard = Shard(comm.rank, comm.size, interleave)
    table, pages = context.pages(shard)
    cache = np.zeros((pages, BLOCK, 576), BF16)
    cumla.concat_and_cache_mla(context.rows[:, :512], context.rows[:, 512:], cache, context.slots(table, shard))
    lens = local_seq_lens(context.seen, shard)
    q = context.q
    if split_heads:
        q, sink = np.ascontiguousarray(q[:, context.own_heads(comm)]), cut(sink, context.own_heads(comm))
    attention = ContextAttention(comm, split_heads=split_heads, backend=backend)
    table = np.ascontiguousarray(table[context.token_to_req])
    arrays = [put(x) for x in (q, cache, table, lens)]
    return attention.dense_decode(*arrays, attn_sink=None if sink is None else put(sink), **options)


def dense_on_one(context, sink=None):
    cache = np.zeros((-(-len(context.rows) // BLOCK) + 1, BLOCK, 576), BF16)
    cache.reshape(-1, 576)[: len(context.rows)] = context.rows
    slots = [
        context.starts[request] + np.arange(seen)
        for request, seen in zip(context.token_to_req, context.seen, strict=True)
    ]
    return attend(context.q, [(cache, cumla.MLA_BF16, slots)], sink)


def attend(q, caches, sink):
    """Attention in float64 over slots of caches: out, lse, and the mean size of the terms of each value of out."""
    out, lse, size = np.zeros((*q.shape[:2], 512)), np.full(q.shape[:2], np.inf), np.zeros((*q.shape[:2], 512))
    for token, queries in enumerate(q.astype(np.float64)):
        keys = [read_tokens(pages_of(cache, layout), slots[token]) for cache, layout, slots in caches]
        keys = np.concatenate(keys)
        if not len(keys):
            continue
        scores = queries @ keys.T * keys.shape[1] ** -0.5
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        lse[token] = top[:, 0] + np.log(weights.sum(axis=1))
        whole = weights.sum(axis=1, keepdims=True)
        if sink is not None:
            whole = whole + np.exp(sink[:, None] - top)
        out[token], size[token] = weights @ keys[:, :512] / whole, weights @ np.abs(keys[:, :512]) / whole
    return out, lse, size


def absolute(sizes):
    """Bound of a merged result in addition to its own bounds.

    A partial result is rounded to bfloat16, and so are its weights: by 2^-9 each, of values that may
    cancel in the merge. The sum of all partial results is not larger than `sizes`.
    """
    return DECODE_OUT.absolute + 2 * 2.0**-9 * sizes


def check(got, want, split_heads, size):
    """Check every rank's results, host arrays for all heads or for the rank's heads."""
    check_outs([out for out, _ in got], want, split_heads, size)
    for rank, (_, lse) in enumerate(got):
        assert_within("lse", lse, want[1][:, own_heads(want[1].shape[1], rank, size, split_heads)], *DECODE_LSE[:2])


def check_outs(outs, want, split_heads, size):
    """Check results without lse."""
    want_out, _, sizes = want
    assert len(outs) == size
    for rank, out in enumerate(outs):
        own = own_heads(want_out.shape[1], rank, size, split_heads)
        assert_within("out", to_float(out), want_out[:, own], absolute(sizes[:, own]), DECODE_OUT.relative)
        assert_same_direction("out", to_float(out), want_out[:, own], (2 if size > 1 else 1) * DECODE_OUT.cosine)


def own_heads(heads, rank, size, split_heads):
    return slice(rank * heads // size, (rank + 1) * heads // size) if split_heads else slice(None)


def pages_of(cache, layout):
    rows = cache.view(np.uint8).reshape(len(cache), -1) if layout is cumla.MLA_BF16 else None
    if rows is None:
        rows = np.lib.stride_tricks.as_strided(
            cache, (len(cache), BLOCK * layout.token_bytes), (cache.strides[0], 1)
        )  # fmt: skip
    return Pages(rows, BLOCK, layout)


def sparse_on(
    comm, context, selected, layout, interleave, window=None, split_heads=False, sink=None, put=np.asarray,
    backend=None, **options,
):  # fmt: skip
    """Like dense_on, for rows that each query selected, and with a window (indices, lens, cache) on every rank."""
    shard = Shard(comm.rank, comm.size, interleave)
    table, pages = context.pages(shard)
    cache = layout.allocate(pages, BLOCK)
    cumla.quantize_and_insert_k_cache(context.rows, cache, context.slots(table, shard), BLOCK, layout=layout)
    slots, lens = localise_indices(put(selected), put(context.token_to_req), put(table), BLOCK, shard, backend=backend)
    q, cache = context.q, put(cache)
    if split_heads:
        q, sink = np.ascontiguousarray(q[:, context.own_heads(comm)]), cut(sink, context.own_heads(comm))
    attention = ContextAttention(comm, split_heads=split_heads, backend=backend)
    q, sink = put(q), None if sink is None else put(sink)
    if window is None:
        return attention.sparse_decode(q, cache, slots, lens, layout=layout, attn_sink=sink, **options)
    swa_indices, swa_lens = local_window(put(window.indices), put(window.lens), comm.rank, comm.size)
    return attention.sparse_decode(
        q, put(window.cache), swa_indices, swa_lens, extra_k_cache=cache, extra_indices=slots, extra_topk_length=lens,
        layout=layout, attn_sink=sink, **options,
    )  # fmt: skip


@dataclasses.dataclass
class Window:
    cache: np.ndarray
    indices: np.ndarray
    lens: np.ndarray


def sparse_on_one(context, selected, layout, window=None, sink=None):
    cache = layout.allocate(-(-len(context.rows) // BLOCK), BLOCK)
    cumla.quantize_and_insert_k_cache(context.rows, cache, np.arange(len(context.rows)), BLOCK, layout=layout)
    lens, starts = context.lens[context.token_to_req], context.starts[context.token_to_req]
    slots = [
        row[(row >= 0) & (row < length)] + start for row, length, start in zip(selected, lens, starts, strict=True)
    ]
    caches = [(cache, layout, slots)]
    if window is not None:
        caches.append((window.cache, layout, [row[:n] for row, n in zip(window.indices, window.lens, strict=True)]))
    return attend(context.q, caches, sink)


def cut(sink, heads):
    return None if sink is None else np.ascontiguousarray(sink[heads])
