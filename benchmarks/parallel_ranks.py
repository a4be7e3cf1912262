"""Measurements of a rank of parallel.py, in the rank's process."""

import functools
import os
import statistics
import time
import traceback

import numpy as np
from common import cupy

import cumla
from cumla.bench.problem import Sizes
from cumla.bounds import DECODE_OUT
from cumla.dispatch.call import BFLOAT16
from cumla.parallel import (
    ContextAttention,
    FileStore,
    Shard,
    local_block_table,
    local_seq_lens,
    local_window,
    localise_indices,
    merge_partials,
    shard_queries,
)
from cumla.specs.measured import repeating_cache

BLOCK = 64
SCALE = 192**-0.5
CALLS, REPLAYS = 12, 9  # calls of a graph; replays, whose median is the result
DENSE = {"b4 h128 ctx 262144": (4, 262144, 1.65), "b64 h128 ctx 16384": (64, 16384, 1.5)}  # with the bar
SIZES = Sizes("cuda")


def random(shape, seed, scale=1.0):
    """Random bfloat16 on the device; large arrays repeat a million values."""
    values = SIZES.inputs(seed).rows(*shape)
    return values if scale == 1.0 else (values.astype(np.float32) * np.float32(scale)).astype(BFLOAT16)


class Bench:
    """A rank's communicator, and times that are the same on all ranks."""

    def __init__(self, comm, only, windows, queue):
        self.comm, self.only, self.queue = comm, only, queue
        self.nccl = f"nccl x{comm.size}{', windows=True' * windows}"
        self._word = cupy.zeros(1, np.float32)
        self._words = cupy.zeros((comm.size, 1), np.float32)

    def us(self, call, calls=CALLS):
        """Time of one call in a graph of several, on the slowest rank."""
        for _ in range(2):
            call()
        self.comm.all_gather(self._word, self._words)
        self.comm.wait()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for _ in range(calls):
                call()
            graph = stream.end_capture()
            times = []
            for _ in range(REPLAYS):
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                self.comm.all_gather(self._word, self._words)  # all start together
                start.record(stream)
                graph.launch(stream)
                stop.record(stream)
                self.comm.wait(stream)
                times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / calls)
            del graph
            self._word[...] = statistics.median(times[1:])
            self.comm.all_gather(self._word, self._words)
            self.comm.wait(stream)
        return float(self._words.max())

    def add(self, op, config, impl, us, **more):
        if self.comm.rank == 0:
            self.queue.put(("row", (op, config, impl), {"us_graph": us, **more}))

    def say(self, text):
        if self.comm.rank == 0:
            self.queue.put(("text", text, None))

    def check(self, got, want):
        """The largest difference. An exchange rounds partial results once more: the bound is doubled."""
        error = cupy.abs(got.astype(np.float32) - want.astype(np.float32))
        allowed = 2 * (DECODE_OUT.absolute + DECODE_OUT.relative * cupy.abs(want.astype(np.float32)))
        assert bool((error <= allowed).all()), (
            f"rank {self.comm.rank}: {float((error - allowed).max()):.3g} too far off"
        )
        return float(error.max())


def dense(bench, config, batch, context, bar):
    """Dense MLA decode, the context sharded by pages; q and out on every rank."""
    comm, heads, columns = bench.comm, 128, context // BLOCK
    shard, longest = Shard(comm.rank, comm.size, BLOCK), -(-context // comm.size)
    cache = random((batch * columns, BLOCK, 576), 1)
    table = cupy.arange(batch * columns, dtype=np.int32).reshape(batch, columns)
    lens = cupy.full(batch, context, np.int32)
    q = random((batch, heads, 576), 2, 0.3)
    out, lse = cupy.empty((batch, heads, 512), BFLOAT16), cupy.empty((batch, heads), np.float32)

    def on_one_device(cache, table, lens, longest):
        return functools.partial(
            cumla.dense_mla_decode, q[:, None], cache, table, lens, softmax_scale=SCALE, max_seqlen=longest,
            plan=cumla.DenseDecodePlan(), out=out[:, None], lse=lse[..., None],
        )  # fmt: skip

    one = on_one_device(cache, table, lens, context)
    one()
    want, flop = out.copy(), 2 * batch * heads * context * (576 + 512)
    us_of_one = bench.us(one)
    bench.add("dense_mla_decode", config, "one GPU", us_of_one, flop=flop)
    mine = local_block_table(table, shard)
    local_cache = cupy.ascontiguousarray(cache[mine.reshape(-1)].view(np.uint16)).view(BFLOAT16)
    local_table = cupy.arange(mine.size, dtype=np.int32).reshape(mine.shape)
    local_lens = local_seq_lens(lens, shard)
    attention = ContextAttention(comm)

    all_ranks = functools.partial(
        attention.dense_decode, q, local_cache, local_table, local_lens, softmax_scale=SCALE, max_seqlen=longest,
        out=out, lse=lse,
    )  # fmt: skip
    all_ranks()
    error = bench.check(out, want)
    us = bench.us(all_ranks)
    bench.add("dense_mla_decode", config, bench.nccl, us, flop=flop, max_abs_err=error)
    part = on_one_device(local_cache, local_table, local_lens, longest)
    bench.add("dense_mla_decode", config, "its part alone", bench.us(part), flop=flop / comm.size)
    parts = comm.memory(comm.size * out.nbytes, None).view(BFLOAT16).reshape(comm.size, *out.shape)
    parts.view(np.uint16)[...] = 0
    lses = cupy.zeros(parts.shape[:-1], np.float32)
    plain = cupy.zeros(parts.shape, np.uint16)
    for memory, how in ((parts, ""), (plain, ", not in memory()")):
        us_gather = bench.us(lambda memory=memory: comm.all_gather(memory[comm.rank], memory))
        bench.add("all_gather of results", config, f"{bench.nccl}{how}", us_gather, bytes_moved=out.nbytes,
                  checked=False)  # fmt: skip
    us_merge = bench.us(
        lambda: merge_partials(parts[:, :, None], lses[..., None], out=out[:, None], lse=lse[..., None])
    )
    bench.add("merge_partials", config, f"{comm.size} parts", us_merge, bytes_moved=parts.nbytes + out.nbytes,
              checked=False)  # fmt: skip
    bench.say(f"  {us_of_one / us:.2f} times as fast as one GPU; bar {bar}")


def exchange(bench, batch, bar):
    """The exchanges of a decode step with split heads, without attention: gather q, exchange and merge results."""
    comm, heads = bench.comm, 128
    config = f"b{batch} h{heads}"
    attention = ContextAttention(comm, split_heads=True)
    q = attention.queries(batch, heads // comm.size, 576, random((1,), 0))
    q.view(np.uint16)[...] = random(q.shape, 3).view(np.uint16)
    out, lse = cupy.empty((*q.shape[:2], 512), BFLOAT16), cupy.empty(q.shape[:2], np.float32)

    def call():
        attention._decode(lambda q, part, part_lse: None, q, None, out, lse, None)

    before = sum(comm.traffic.values())
    call()
    sent = sum(comm.traffic.values()) - before
    us = bench.us(call)
    bench.add("step with split heads: exchange", config, bench.nccl, us, bytes_moved=sent, checked=False)
    gathered = cupy.empty((comm.size, q.shape[1], batch, 576), BFLOAT16)
    us_gather = bench.us(lambda: comm.all_gather(q.transpose(1, 0, 2), gathered))
    bench.add("all_gather of q", config, bench.nccl, us_gather, bytes_moved=q.nbytes, checked=False)
    parts = [cupy.empty((comm.size, heads // comm.size, batch, 512), BFLOAT16) for _ in range(2)]
    lses = [cupy.empty((comm.size, heads // comm.size, batch), np.float32) for _ in range(2)]
    us_parts = bench.us(lambda: comm.all_to_all((parts[0], lses[0]), (parts[1], lses[1])))
    bench.add("all_to_all of out and lse", config, bench.nccl, us_parts, checked=False)
    lses[1][...] = 0
    parts[1].view(np.uint16)[...] = 0
    us_merge = bench.us(lambda: attention._merge(
        parts[1].transpose(0, 2, 1, 3), lses[1].transpose(0, 2, 1), None, out, lse
    ))  # fmt: skip
    bench.add("merge_partials", config, f"{comm.size} parts", us_merge, bytes_moved=parts[1].nbytes + out.nbytes,
              checked=False)  # fmt: skip
    bench.say(f"  {us:.1f} us; bar {bar}")


def v4_cache(rows):
    """DSV4_FP8 pages of `rows` rows, which repeat 64 Ki rows."""
    return repeating_cache("cuda", cumla.DSV4_FP8, BLOCK, rows).array


def sparse_v4(bench):
    """Sparse V4 decode: compressed rows sharded, the window on every rank; maps of selected rows included."""
    comm, batch, heads, context, window, topk, sets = bench.comm, 64, 64, 131072, 128, 512, 6
    config = f"b{batch} h{heads} ctx {context}, {window} + {topk}"
    shard, rows = Shard(comm.rank, comm.size, BLOCK), context // 4
    rng = np.random.default_rng(4)
    columns = rows // BLOCK
    cache, swa = v4_cache(batch * rows), v4_cache(batch * window)
    table = cupy.arange(batch * columns, dtype=np.int32).reshape(batch, columns)
    requests, valid = cupy.arange(batch, dtype=np.int32), cupy.ones(batch, np.bool_)
    selected = [
        cupy.asarray(np.stack([rng.choice(rows, topk, replace=False) for _ in range(batch)]).astype(np.int32))
        for _ in range(sets)
    ]
    swa_indices = cupy.arange(batch * window, dtype=np.int32).reshape(batch, window)
    swa_lens = cupy.full(batch, window, np.int32)
    q = random((batch, heads, 512), 7)
    sink = cupy.asarray(rng.standard_normal(heads).astype(np.float32))
    out, lse = cupy.empty((batch, heads, 512), BFLOAT16), cupy.empty((batch, heads), np.float32)
    slots, lens = cupy.empty((batch, topk), np.int32), cupy.empty(batch, np.int32)
    plan, turn = cumla.DecodePlan(), [0]

    def next_selected():
        turn[0] += 1
        return selected[turn[0] % sets]

    def one():
        cumla.compute_global_topk_indices_and_lens(
            next_selected(), requests, table, BLOCK, valid, compact=True, out=(slots, lens)
        )
        cumla.sparse_mla_decode(
            q[:, None], swa, swa_indices[:, None], topk_length=swa_lens, extra_k_cache=cache,
            extra_indices=slots[:, None], extra_topk_length=lens, attn_sink=sink, plan=plan, out=out[:, None],
            lse=lse[..., None],
        )  # fmt: skip

    one()
    want = out.copy()
    us_of_one = bench.us(one)
    bench.add("sparse decode with its map", config, "one GPU", us_of_one)
    mine = local_block_table(table, shard)
    local_cache = cumla.DSV4_FP8.allocate(mine.size, BLOCK, cupy)
    local_cache[...] = cache[mine.reshape(-1)]
    whole_bytes, local_bytes = (x.shape[0] * x.strides[0] for x in (cache, local_cache))
    local_table = cupy.arange(mine.size, dtype=np.int32).reshape(mine.shape)
    own, own_lens = local_window(swa_indices, swa_lens, comm.rank, comm.size)
    attention, part_plan = ContextAttention(comm), cumla.DecodePlan()

    def all_ranks():
        localise_indices(next_selected(), requests, local_table, BLOCK, shard, out=(slots, lens))
        attention.sparse_decode(
            q, swa, own, own_lens, extra_k_cache=local_cache, extra_indices=slots, extra_topk_length=lens,
            attn_sink=sink, plan=part_plan, out=out, lse=lse,
        )  # fmt: skip

    turn[0] = 0
    all_ranks()
    error = bench.check(out, want)
    us = bench.us(all_ranks)
    bench.add("sparse decode with its map", config, bench.nccl, us, max_abs_err=error)
    us_map = bench.us(lambda: localise_indices(next_selected(), requests, local_table, BLOCK, shard, out=(slots, lens)))
    bench.add("localise_indices", config, f"rank of {comm.size}", us_map)
    bench.say(
        f"  {us - us_of_one:+.1f} us compared with one GPU, bar +60; "
        f"{local_bytes / whole_bytes:.3f} of the compressed rows' bytes on each"
    )


def prefill(bench):
    """Sparse prefill of a layer's chunk, queries sharded; K of all tokens is on every rank."""
    comm, new, earlier, heads, topk = bench.comm, 8192, 65536, 128, 2048
    config = f"h{heads} {new} new at {earlier}, topk {topk}"
    kv = random((earlier + new, 576), 8)
    rng = cupy.random.default_rng(9)
    positions = earlier + cupy.arange(new)[:, None]
    indices = (rng.random((new, topk), np.float32) * positions).astype(np.int32)
    sharded = shard_queries(np.array([0, new]), comm.size)
    own = cupy.asarray(sharded.own(comm.rank))
    q = random((new, heads, 576), 10, 0.3)
    mine = cupy.ascontiguousarray(q.view(np.uint16)[own]).view(BFLOAT16)
    my_indices = cupy.ascontiguousarray(indices[own])

    def results(tokens):
        logits = [cupy.empty((tokens, heads), np.float32) for _ in range(2)]
        return cupy.empty((tokens, heads, 512), BFLOAT16), *logits

    whole, part = results(new), results(len(own))

    def one():
        cumla.sparse_mla_prefill(q, kv, indices, softmax_scale=SCALE, out=whole)

    def all_ranks():
        cumla.sparse_mla_prefill(mine, kv, my_indices, softmax_scale=SCALE, out=part)

    one()
    all_ranks()
    error = float(cupy.abs(part[0].astype(np.float32) - whole[0][own].astype(np.float32)).max())
    assert error == 0, error
    flop = 2 * new * heads * topk * (576 + 512)
    us_of_one, us = bench.us(one, 2), bench.us(all_ranks, 2)
    bench.add("sparse_mla_prefill", config, "one GPU", us_of_one, flop=flop)
    bench.add("sparse_mla_prefill", config, f"x{comm.size}", us, flop=flop, max_abs_err=error)
    rows = kv[earlier : earlier + sharded.tokens.shape[1]]
    everyones = cupy.empty((comm.size, *rows.shape), BFLOAT16)
    us_rows = bench.us(lambda: comm.all_gather(rows, everyones))
    bench.add("all_gather of new rows", config, bench.nccl, us_rows, bytes_moved=rows.nbytes)
    bench.say(f"  {us_of_one / us:.2f} times as fast as one GPU; bar 1.85")


def collectives(bench):
    """NCCL's collectives alone; gathers are in place, in memory()."""
    comm = bench.comm
    for size in (1 << 16, 1 << 19, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
        parts, taken = (cupy.zeros((comm.size, size), np.uint8) for _ in range(2))
        out = comm.memory(comm.size * size, None).reshape(comm.size, size)
        x, sent = out[comm.rank], size * (comm.size - 1)
        for name, call in (
            ("all_gather", lambda x=x, out=out: comm.all_gather(x, out)),
            ("all_to_all", lambda parts=parts, taken=taken: comm.all_to_all(parts, taken)),
        ):
            bench.add(name, f"{size >> 10} KiB", bench.nccl, bench.us(call), bytes_moved=sent, checked=False)


PARTS = {
    "collectives": collectives,
    "exchange": lambda bench: [exchange(bench, 4, 45), exchange(bench, 64, 110)],
    "dense": lambda bench: [dense(bench, config, *numbers) for config, numbers in DENSE.items()],
    "sparse_v4": sparse_v4,
    "prefill": prefill,
}


def run_rank(rank, size, folder, only, windows, queue):
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    cupy.cuda.Device(rank).use()
    from cumla.interop.nccl import NcclCommunicator

    try:
        with NcclCommunicator(FileStore(folder), rank, size, time_limit=60, windows=windows) as comm:
            bench = Bench(comm, only, windows, queue)
            for name, part in PARTS.items():
                if only in name:
                    start = time.perf_counter()
                    part(bench)
                    cupy.get_default_memory_pool().free_all_blocks()
                    bench.say(f"  ({name}: {time.perf_counter() - start:.1f} s)")
    except BaseException:
        queue.put(("error", f"rank {rank}: {traceback.format_exc()}", None))
    queue.put(("end", rank, None))
