"""Ranks that share their GPUs with other processes: the load of these processes, and exchanges with checked values.

An exchange on a shared GPU may start long after, or long before, the kernel ahead of it has ended. Every call has other
inputs than the call before it, whose results are in the same memory: data that is sent too early is wrong.
"""

import cupy
import numpy as np

import cumla
from cumla.bounds import DECODE_OUT
from cumla.interop.nccl import NcclCommunicator
from cumla.parallel import ContextAttention, FileStore, Shard, local_seq_lens, localise_indices
from support import ranks
from support.bounds import assert_within

CALLS, A_GRAPH = 200, 8  # calls of each exchange; calls of a graph
HEADS, LENS, CHOSEN = 24, [37, 0, 5, 64], 20
N = 4096  # values that a rank sends, and rows and columns of the load's matrices

# Lets the next kernel start, and stores a while later.
LATE = r"""
extern "C" __global__ void late(float* out, int n, float value) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < 50000ull);
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = value + i % 7;
}
"""


def keep_busy(device, began, stop):
    """Multiply matrices until the parent process signals the end."""
    with cupy.cuda.Device(device):
        a = cupy.ones((N, N), np.float32)
        while not stop.is_set():
            for _ in range(8):
                a @ a
            cupy.cuda.Device().synchronize()
            began.set()


class Plain:
    """A collective of data from a kernel that lets the next kernel start before it stores.

    Args:
        memory: whether x and out are in memory()
    """

    def __init__(self, comm, op, memory=False):
        self.comm, self.op = comm, op
        self.late = cupy.RawKernel(LATE, "late")
        self.late.compile()
        if memory:
            self.out = comm.memory(comm.size * N * 4, None).view(np.float32).reshape(comm.size, N)
            self.x = self.out[comm.rank]
        else:
            self.x = cupy.zeros(N if op == "all_gather" else (comm.size, N), np.float32)
            self.out = cupy.zeros(N if op == "reduce_scatter" else (comm.size, N), np.float32)
        self.outs = [cupy.empty_like(self.out) for _ in range(A_GRAPH)]

    @staticmethod
    def value(call, rank):
        return 1000.0 * (call + 1) + 10 * rank

    def prepare(self, call):
        pass

    def __call__(self, call):
        arguments = self.x, np.int32(self.x.size), np.float32(self.value(call, self.comm.rank))
        self.late((1,), (256,), arguments)
        getattr(self.comm, self.op)(self.x, self.out)
        cupy.cuda.runtime.memcpyAsync(
            self.outs[call].data.ptr, self.out.data.ptr, self.out.nbytes, cupy.cuda.runtime.memcpyDeviceToDevice,
            cupy.cuda.get_current_stream().ptr,
        )  # fmt: skip

    def check(self, call):
        comm = self.comm
        sent = [self.value(call, rank) + np.arange(self.x.size).reshape(self.x.shape) % 7 for rank in range(comm.size)]
        want = np.stack(sent)
        if self.op != "all_gather":
            want = want[:, comm.rank]
        if self.op == "reduce_scatter":
            want = want.sum(axis=0)
        np.testing.assert_array_equal(self.outs[call].get(), want)


class Decode:
    """A decode over the context of all ranks; each call has other queries.

    Args:
        way: "everything to all", "some heads each" or "split heads"
    """

    def __init__(self, comm, sparse, way):
        self.comm, self.way, self.split = comm, way, way == "split heads"
        rng = np.random.default_rng(3)
        context = ranks.Context.make(rng, [50, 30] if sparse else LENS, HEADS, 576, s_q=1 if sparse else 2)
        self.attention = ContextAttention(comm, split_heads=self.split)
        self.own = ranks.own_heads(HEADS, comm.rank, comm.size, self.split)
        shape = context.q.shape
        queries = [np.random.default_rng(call).standard_normal(shape).astype(ranks.BF16) for call in range(A_GRAPH)]
        shard = Shard(comm.rank, comm.size, 3)
        table, pages = context.pages(shard)
        slots = context.slots(table, shard)
        if sparse:
            cache = cumla.V32_FP8.allocate(pages, ranks.BLOCK)
            cumla.quantize_and_insert_k_cache(context.rows, cache, slots, ranks.BLOCK, layout=cumla.V32_FP8)
            selected = np.stack([rng.permutation(length)[:CHOSEN] for length in (50, 30)]).astype(np.int32)
            given = (cupy.array(x) for x in (selected, context.token_to_req, table))
            self.rest = cupy.array(cache), *localise_indices(*given, ranks.BLOCK, shard)
            self.options = {"layout": cumla.V32_FP8}
        else:
            cache = np.zeros((pages, ranks.BLOCK, 576), ranks.BF16)
            cumla.concat_and_cache_mla(context.rows[:, :512], context.rows[:, 512:], cache, slots)
            rest = cache, np.ascontiguousarray(table[context.token_to_req]), local_seq_lens(context.seen, shard)
            self.rest, self.options = tuple(cupy.array(x) for x in rest), {"max_seqlen": 70}
        self.run = self.attention.sparse_decode if sparse else self.attention.dense_decode
        self.want = []
        for q in queries:
            context.q = q
            self.want.append(
                ranks.sparse_on_one(context, selected, cumla.V32_FP8) if sparse else ranks.dense_on_one(context)
            )
        self.queries = [cupy.array(np.ascontiguousarray(q[:, self.own])) for q in queries]
        self.outs = [cupy.empty((*q.shape[:2], 512), ranks.BF16) for q in self.queries]
        self.lse = cupy.empty(self.queries[0].shape[:2], np.float32)

    def prepare(self, call):
        self.outs[call].view(np.uint16)[...] = 0x7FC0  # NaN

    def __call__(self, call):
        if self.way != "some heads each":
            self.run(self.queries[call], *self.rest, out=self.outs[call], lse=self.lse, **self.options)
            return

        def attend(q, part, part_lse):  # as dense_decode does for results that are large enough
            cumla.dense_mla_decode(
                q[:, None], *self.rest, out=part[:, None], lse=part_lse[..., None],
                plan=self.attention._dense_plans[False], **self.options,
            )  # fmt: skip

        self.attention._merge_by_heads(attend, self.queries[call], None, self.outs[call], self.lse)

    def check(self, call):
        out, _, sizes = (array[:, self.own] for array in self.want[call])
        assert_within("out", ranks.to_float(self.outs[call].get()), out, ranks.absolute(sizes), DECODE_OUT.relative)


EXCHANGES = {
    "all_gather": lambda comm: Plain(comm, "all_gather"),
    "all_gather in memory()": lambda comm: Plain(comm, "all_gather", memory=True),
    "reduce_scatter": lambda comm: Plain(comm, "reduce_scatter"),
    "all_to_all": lambda comm: Plain(comm, "all_to_all"),
    "dense decode": lambda comm: Decode(comm, False, "everything to all"),
    "dense decode, some heads each": lambda comm: Decode(comm, False, "some heads each"),
    "dense decode, split heads": lambda comm: Decode(comm, False, "split heads"),
    "sparse decode": lambda comm: Decode(comm, True, "everything to all"),
}


def wrong_calls(comm, together=lambda: None):
    """The number of calls with wrong values, and the first error, by exchange, eager and captured.

    Args:
        together: waits for the other ranks, if they are threads: no graph may run while memory of another is allocated
    """
    found = {}
    for name, make in EXCHANGES.items():
        exchange = make(comm)
        for calls_of in (eager, captured):
            together()
            run, errors = calls_of(exchange), []
            for _ in range(CALLS // A_GRAPH):
                for call in range(A_GRAPH):
                    exchange.prepare(call)
                cupy.cuda.Device().synchronize()
                together()
                run()
                for call in range(A_GRAPH):
                    try:
                        exchange.check(call)
                    except AssertionError as error:
                        errors.append(str(error).strip().replace("\n", " ")[:200])
            if errors:
                found[f"{name}, {calls_of.__name__}"] = len(errors), errors[0]
            del run  # NCCL waits for graphs
    return found


def eager(exchange):
    def run():
        for call in range(A_GRAPH):
            exchange(call)
        exchange.comm.wait()

    return run


def captured(exchange):
    """The calls in a graph, captured after they have run eagerly."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for call in range(A_GRAPH):
            exchange(call)
        graph = stream.end_capture()

    def run():
        graph.launch(stream)
        exchange.comm.wait(stream)

    return run


def process(folder, rank, size, windows, results):
    """A rank in a separate process."""
    try:
        cupy.cuda.Device(rank).use()
        with NcclCommunicator(FileStore(folder), rank, size, windows=windows, time_limit=120) as comm:
            found = wrong_calls(comm)
        results.put((rank, found))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
        raise
