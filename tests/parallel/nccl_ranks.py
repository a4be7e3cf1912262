"""The work of a rank in test_device.py, in a process or a thread; errors are reported by rank."""

import time

import cupy
import numpy as np

import cumla
from cumla.interop.nccl import NcclCommunicator
from cumla.parallel import ContextAttention, FileStore, RankError
from support import ranks

HEADS = 24  # 2, 3 and 8 ranks can split them


def problem():
    rng = np.random.default_rng(3)
    return ranks.Context.make(rng, [37, 0, 5, 64], HEADS, 576, s_q=2), rng.standard_normal(HEADS).astype(np.float32)


def selection(rng):
    context = ranks.Context.make(rng, [50, 30], HEADS, 576)
    return context, np.stack([rng.permutation(50)[:20], rng.permutation(30)[:20]]).astype(np.int32)


def on_host(arrays):
    return tuple(array.get() for array in arrays)


def collectives(comm):
    x = cupy.arange(6, dtype=np.float32) + comm.rank
    parts = cupy.stack([x + 10 * to for to in range(comm.size)])
    gathered, (again, words) = comm.all_gather(x), comm.all_gather((x, cupy.full(3, comm.rank, np.int32)))
    summed, taken = comm.reduce_scatter(parts), comm.all_to_all(parts)
    comm.wait()
    mine = np.stack([np.arange(6) + rank + 10 * comm.rank for rank in range(comm.size)])
    np.testing.assert_array_equal(gathered.get(), np.arange(6) + np.arange(comm.size)[:, None])
    np.testing.assert_array_equal(again.get(), gathered.get())
    np.testing.assert_array_equal(words.get(), np.arange(comm.size)[:, None] * np.ones(3))
    np.testing.assert_array_equal(summed.get(), mine.sum(axis=0))
    np.testing.assert_array_equal(taken.get(), mine)
    large = cupy.zeros((comm.size, 4 << 20), np.uint8) + np.uint8(comm.rank)  # NCCL reads the other GPU's array
    taken = comm.all_to_all(large)
    comm.wait()
    np.testing.assert_array_equal(taken.get(), np.arange(comm.size)[:, None] * np.ones(4 << 20))


def decodes(comm):
    """Results of dense and sparse decodes, with and without split heads."""
    context, sink = problem()
    chosen, selected = selection(np.random.default_rng(5))
    results = []
    for split in (False, True):
        results.append(on_host(ranks.dense_on(comm, context, 3, split, sink, cupy.array, max_seqlen=70)))
        results.append(
            on_host(ranks.sparse_on(comm, chosen, selected, cumla.V32_FP8, 2, None, split, None, cupy.array))
        )
    return results


def wanted():
    context, sink = problem()
    chosen, selected = selection(np.random.default_rng(5))
    return [ranks.dense_on_one(context, sink), ranks.sparse_on_one(chosen, selected, cumla.V32_FP8)] * 2


def captured(comm):
    """A decode in a CUDA graph, replayed with other queries: the bits of an eager call."""
    rng = np.random.default_rng(7)
    tokens, pages = 3, 8
    q = cupy.array(rng.standard_normal((tokens, HEADS, 576)).astype(ranks.BF16))
    cache = cupy.array(rng.standard_normal((pages, 64, 576)).astype(ranks.BF16))
    table, lens = cupy.arange(tokens * 2, dtype=np.int32).reshape(tokens, 2), cupy.array([128, 100, 1], np.int32)
    attention = ContextAttention(comm)
    out, lse = cupy.empty((tokens, HEADS, 512), ranks.BF16), cupy.empty((tokens, HEADS), np.float32)

    def call():
        attention.dense_decode(q, cache, table, lens, out=out, lse=lse, max_seqlen=128)

    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    q.view(np.uint16)[...] = cupy.array(rng.standard_normal((tokens, HEADS, 576)).astype(ranks.BF16).view(np.uint16))
    call()
    comm.wait()
    want = out.get(), lse.get()
    out.view(np.uint16)[...] = 0
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    comm.wait(stream)
    assert out.get().tobytes() == want[0].tobytes()
    assert lse.get().tobytes() == want[1].tobytes()
    del graph


def whole_run(comm):
    collectives(comm)
    captured(comm)
    return decodes(comm)


def other_shape(comm):
    comm.all_gather(cupy.zeros(3 + comm.rank, np.float32))


def failure(comm):
    if comm.rank == 1:
        raise ValueError("out of luck")
    for _ in range(3):
        comm.all_gather(cupy.zeros(3, np.float32))
        comm.wait()


def never_comes(comm):
    comm.all_gather(cupy.zeros(3, np.float32))
    comm.wait()
    if comm.rank == 1:
        time.sleep(8)
        return
    comm.all_gather(cupy.zeros(3, np.float32))
    comm.wait(time_limit=1)


def failure_in_a_window(comm):
    """NCCL cannot end rank 0's call, and CUDA then cannot end the process."""
    memory = comm.memory(1 << 20, None).reshape(2, 1 << 19)
    comm.all_gather(memory[comm.rank], memory)
    comm.wait()
    if comm.rank == 1:
        raise ValueError("out of luck")
    comm.all_gather(memory[comm.rank], memory)
    comm.wait()


WORK = {work.__name__: work for work in (whole_run, other_shape, failure, failure_in_a_window, never_comes)}


def process(work, folder, rank, size, time_limit, windows, results):
    """A rank in a separate process."""
    cupy.cuda.Device(rank).use()
    start = time.monotonic()
    try:
        with NcclCommunicator(FileStore(folder), rank, size, time_limit=time_limit, windows=windows) as comm:
            results.put((rank, WORK[work](comm), None))
    except (RankError, ValueError) as error:
        results.put((rank, time.monotonic() - start, f"{type(error).__name__}: {error}"))
