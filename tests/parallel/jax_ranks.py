"""Run by test_jax.py in a process in which JAX has SIZE devices: jax_ranks.py SIZE.

Prints "right" for each case, or raises.
"""

import functools
import sys

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import cumla
import cumla.interop.jax_parallel as parallel
from cumla.parallel import Shard, local_seq_lens, local_slot_mapping, localise_indices
from support import ranks
from support.bounds import DECODE_LSE, DECODE_OUT, assert_within
from support.lab import to_float

SIZE = int(sys.argv[1])
CP, ALL = PartitionSpec("cp"), PartitionSpec()
HEADS = PartitionSpec(None, "cp")
MESH = Mesh(np.array(jax.devices()[:SIZE]), ("cp",))


def mapped(function, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )  # fmt: skip


def check(got, want):
    want_out, want_lse, sizes = want
    assert_within("out", to_float(np.asarray(got[0])), want_out, ranks.absolute(sizes), DECODE_OUT.relative)
    assert_within("lse", np.asarray(got[1]), want_lse, *DECODE_LSE[:2])
    print("right")


def dense(rng, split_heads, by_heads=False):
    cumla.parallel.context.WORTH_A_CALL = -1 if by_heads else 1 << 30
    count = 2 * SIZE if split_heads else 8
    context = ranks.Context.make(rng, [37, 0, 5, 64], count, 576, s_q=2)
    sink = rng.standard_normal(count).astype(np.float32)
    caches, tables = [], []
    for rank in range(SIZE):
        shard = Shard(rank, SIZE, 3)
        table, pages = context.pages(shard)
        cache = np.zeros((pages, ranks.BLOCK, 576), context.rows.dtype)
        cumla.concat_and_cache_mla(context.rows[:, :512], context.rows[:, 512:], cache, context.slots(table, shard))
        caches.append(cache)
        tables.append(table[context.token_to_req])

    def on(q, cache, table, seen, sink):
        lens = parallel.local_seq_lens("cp", seen, interleave=3)
        return parallel.dense_decode("cp", q, cache, table, lens, attn_sink=sink, split_heads=split_heads)

    heads = HEADS if split_heads else ALL
    run = mapped(on, (heads, CP, CP, ALL, CP if split_heads else ALL), (heads, heads))
    got = run(context.q, np.concatenate(caches), np.concatenate(tables), context.seen, sink)
    check(got, ranks.dense_on_one(context, sink))


def sparse(rng):
    context = ranks.Context.make(rng, [50, 30], 4, 576)
    selected = np.stack([rng.permutation(50)[:20], rng.permutation(30)[:20]]).astype(np.int32)
    caches, tables = [], []
    for rank in range(SIZE):
        shard = Shard(rank, SIZE, 2)
        table, pages = context.pages(shard)
        cache = cumla.V32_FP8.allocate(pages, ranks.BLOCK)
        slots = local_slot_mapping(
            context.starts, context.lens, table, ranks.BLOCK, shard, num_tokens=len(context.rows)
        )
        cumla.quantize_and_insert_k_cache(context.rows, cache, slots, ranks.BLOCK, layout=cumla.V32_FP8)
        caches.append(cache)
        tables.append(table)

    def on(q, cache, table, selected, token_to_req):
        slots, lens = parallel.localise_indices("cp", selected, token_to_req, table, ranks.BLOCK, interleave=2)
        out, lse = parallel.sparse_decode("cp", q, cache, slots, lens, early_release=False)
        return out, lse, slots, lens

    run = mapped(on, (ALL, CP, CP, ALL, ALL), (ALL, ALL, CP, CP))
    out, lse, slots, lens = run(
        context.q, np.concatenate(caches), np.concatenate(tables), selected, context.token_to_req
    )
    for rank, (mine, count) in enumerate(zip(np.split(slots, SIZE), np.split(lens, SIZE), strict=True)):
        want = localise_indices(selected, context.token_to_req, tables[rank], ranks.BLOCK, Shard(rank, SIZE, 2))
        np.testing.assert_array_equal(mine, want[0])
        np.testing.assert_array_equal(count, want[1])
    check((out, lse), ranks.sparse_on_one(context, selected, cumla.V32_FP8))


def lengths(rng):
    lens = rng.integers(0, 99, 7).astype(np.int32)
    run = mapped(functools.partial(parallel.local_seq_lens, "cp", interleave=4, s_q=3), (ALL,), CP)
    want = [local_seq_lens(lens, Shard(rank, SIZE, 4), s_q=3) for rank in range(SIZE)]
    np.testing.assert_array_equal(run(lens), np.concatenate(want))
    print("right")


def collectives():
    comm = parallel.AxisCommunicator("cp")
    x = np.arange(SIZE * SIZE * 3, dtype=np.float32).reshape(SIZE * SIZE, 3)
    by_rank = x.reshape(SIZE, SIZE, 3)
    gathered, summed, exchanged = mapped(
        lambda x: (comm.all_gather(x)[None], comm.reduce_scatter(x), comm.all_to_all(x)), (CP,), (CP, CP, CP)
    )(x)
    for rank in range(SIZE):
        np.testing.assert_array_equal(gathered[rank], by_rank)
    np.testing.assert_array_equal(np.reshape(summed, (SIZE, 3)), by_rank.sum(axis=0))
    np.testing.assert_array_equal(np.reshape(exchanged, by_rank.shape), by_rank.transpose(1, 0, 2))
    print("right")


if __name__ == "__main__":
    assert len(jax.devices()) >= SIZE
    numbers = np.random.default_rng(SIZE)
    collectives()
    lengths(numbers)
    dense(numbers, split_heads=False)
    dense(numbers, split_heads=True)
    dense(numbers, split_heads=False, by_heads=True)
    sparse(numbers)
