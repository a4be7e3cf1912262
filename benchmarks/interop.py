"""What it costs to come from a framework: host time over the bare launch, copies, and a captured step of 8 layers.

    python benchmarks/interop.py [--json FILE] [--only TEXT]

Host time: `us` of one call whose outputs are given, by framework; `launch` is the driver's part, the same kernels
launched again with arguments that are packed already. Under jax.jit the call is one of a jitted function that does
nothing else, and `jax.jit, identity` is what JAX takes for a function of the same arrays that hands them through.
`host in turn` are decodes as layers call them, with lengths, of torch's tensors, by cumla and by FlashMLA.
Copies: what CUPTI sees of memory copies and sets while each of these calls runs.
The step: metadata, then insert, map and attend of 8 layers in one graph, against the sum of its kernels by CUPTI.
"""

import cProfile
import functools
import gc
import inspect
import io
import pstats
import types

import common
import cupy
import ml_dtypes
import numpy as np

import cumla
from cumla.arrays import dlpack
from cumla.bench import peers
from cumla.bench.measure import host_times_in_turn
from cumla.bench.problem import Sizes
from cumla.bench.sparse import Decode, DecodeInputs
from cumla.kernels.cuda.launch import recorded_launches
from cumla.layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata

BF16 = ml_dtypes.bfloat16
BATCH, HEADS, TOPK, BLOCK = 32, 64, 512, 64
MOST_OVERHEAD_US, MOST_OVER_KERNELS = 25, 0.03


UNPREPARED = types.SimpleNamespace(**{name: inspect.unwrap(f) for name, f in vars(cumla).items() if callable(f)})


def operands(rng):
    """NumPy arguments of three calls by name: inputs in order, then those that are written."""
    blocks = 64
    slots = rng.permutation(blocks * BLOCK)
    cache = np.zeros((blocks, BLOCK, 584), np.uint8)
    cumla.quantize_and_insert_k_cache(rng.standard_normal((len(slots), 512)).astype(BF16), cache, slots)
    topk = rng.integers(0, len(slots), (BATCH, TOPK)).astype(np.int32)
    return {
        "insert": (rng.standard_normal((BATCH, 512)).astype(BF16), cache, slots[:BATCH].astype(np.int32)),
        "map": (
            topk, np.arange(BATCH, dtype=np.int32), rng.permutation(BATCH * 2).reshape(BATCH, 2).astype(np.int32),
            np.ones(BATCH, np.bool_), np.zeros_like(topk), np.zeros(BATCH, np.int32),
        ),
        "decode": (
            rng.standard_normal((BATCH, 1, HEADS, 512)).astype(BF16), cache, topk[:, None],
            np.zeros((BATCH, 1, HEADS, 512), BF16), np.zeros((BATCH, HEADS, 1), np.float32),
        ),
    }  # fmt: skip


def call(name, arrays, module=cumla, plan=None):
    """The call of that name, its outputs given."""
    if name == "insert":
        module.quantize_and_insert_k_cache(*arrays)
    elif name == "map":
        topk, requests, table, valid, *out = arrays
        module.compute_global_topk_indices_and_lens(topk, requests, table, BLOCK, valid, out=tuple(out))
    else:
        q, cache, indices, out, lse = arrays
        given = {} if plan is None else {"plan": plan}
        module.sparse_mla_decode(q, cache, indices, layout=cumla.DSV4_FP8, out=out, lse=lse, **given)


def jax_call(name, arrays):
    """The call of that name by XLA's rules: what is written comes back."""
    import cumla.interop.jax as ops

    if name == "insert":
        return ops.quantize_and_insert_k_cache(*arrays)
    if name == "map":
        topk, requests, table, valid, *_ = arrays
        return ops.compute_global_topk_indices_and_lens(topk, requests, table, BLOCK, valid)
    q, cache, indices, *_ = arrays
    return ops.sparse_mla_decode(q, cache, indices, layout=cumla.DSV4_FP8)


def again(launches):
    """Launch what was launched before."""
    stream = cupy.cuda.get_current_stream().ptr
    for launch in launches:
        launch.kernel.launch(launch, launch.numbers, stream)


def ways(name, host):
    """Name of a framework -> a function that makes the call with its arrays."""
    native = [cupy.asarray(array) for array in host]
    plan = cumla.DecodePlan()
    call(name, native, plan=plan)
    with recorded_launches() as launches:
        call(name, native, UNPREPARED, plan)
    found = {
        "launch": functools.partial(again, list(launches)),
        "CuPy": functools.partial(call, name, native, plan=plan),
    }
    if common.has_peer("torch"):
        import torch

        import cumla.interop.torch as torch_ops

        tensors = [dlpack.give(array, "torch") for array in native]
        torch_plan = cumla.DecodePlan()
        found["torch"] = functools.partial(call, name, tensors, plan=torch_plan)
        found["torch operator"] = functools.partial(call, name, tensors, module=torch_ops)
        assert torch.cuda.is_available()
    if common.has_peer("jax"):
        found |= jax_ways(name, host)
    return found


def jax_ways(name, host):
    import jax

    arrays = [jax.device_put(array) for array in host]
    donated = (1,) if name == "insert" else ()
    jitted = jax.jit(lambda *arrays: jax_call(name, arrays), donate_argnums=donated)
    identity = jax.jit(lambda *arrays: arrays[1], donate_argnums=donated)

    def threaded(function):
        """Calls in a row, each with the cache that the one before it gave back."""

        def run():
            result = function(*arrays)
            if donated:
                arrays[1] = result

        return run

    found = {"jax.jit, identity": threaded(identity), "jax.jit": threaded(jitted)}
    if name == "decode":
        found["jax.jit, 8 of them"] = eight_in_one(arrays)
    if name != "insert":  # which writes to its arguments

        def eagerly():
            if name == "map":
                topk, requests, table, valid, *_ = arrays
                return cumla.compute_global_topk_indices_and_lens(topk, requests, table, BLOCK, valid)
            q, cache, indices, *_ = arrays
            return cumla.sparse_mla_decode(q, cache, indices)

        found["JAX"] = eagerly
    return found


def eight_in_one(arrays):
    """Eight layers' decodes in one jitted function, which XLA makes a command buffer of."""
    import jax

    @jax.jit
    def layers(q, *rest):
        for _ in range(8):
            q, _ = jax_call("decode", (q, *rest))
        return q

    return lambda: layers(*arrays[:3])


def copies(function):
    """(copies, bytes) of device memory while `function` runs, as CUPTI sees them; None without torch's profiler."""
    if not common.has_peer("torch"):
        return None
    import torch

    cupy.cuda.Device().synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            function()
        cupy.cuda.Device().synchronize()
    names = [event.name for event in profiler.events()]
    return sum("Memcpy" in name for name in names) / 4, sum("Memset" in name for name in names) / 4


def profile(function, rounds=200):
    """Where the host's time goes, for the eye."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(rounds):
        function()
    profiler.disable()
    cupy.cuda.Device().synchronize()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
    print("\n".join(line[:150] for line in text.getvalue().splitlines() if line.strip())[:4000])


def kernel_us(replay, rounds=20):
    """Sum of the kernels' times in one replay, as CUPTI sees them, and their number."""
    import torch

    replay()
    cupy.cuda.Device().synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            replay()
        cupy.cuda.Device().synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in kernels) / rounds, len(kernels) / rounds


def host_rows(report, rng):
    """Times of all calls before CUPTI is there, which goes on to slow launches down."""
    calls, times = {}, {}
    for name, host in operands(rng).items():
        config = {"insert": "T=32", "map": "T=32 K=512", "decode": f"b=32 h={HEADS} topk=512"}[name]
        if not report.wants("host", name):
            continue
        found = ways(name, host)
        for impl, function in found.items():
            calls[name, impl], times[name, impl] = function, common.host_us(function)
            report.add(f"host: {name}", config, impl, us=times[name, impl])
        if report.args.profile in found:
            profile(found[report.args.profile])
        gc.collect()
    extra = {}
    for (name, impl), function in calls.items():
        if impl == "launch":
            continue
        base = "jax.jit, identity" if impl.startswith("jax.jit") else "launch"
        seen = copies(function)
        extra[f"{name}, {impl}"] = {
            "overhead_us": times[name, impl] - times[name, base], "over": base,
            "copies": seen and seen[0], "memsets": seen and seen[1],
        }  # fmt: skip
        print(f"{name}, {impl}: {extra[f'{name}, {impl}']}")
    return extra


def host_in_turn(report):
    """A layer's decode by cumla and by FlashMLA on the same tensors; the plan is there already."""
    extra = {}
    for batch in (1, 32, 128):
        case = Decode(cumla.DSV4_FP8, HEADS, batch, 1, 128, TOPK, lengths=True)
        if not (report.wants("host in turn", str(case)) and common.has_peer("torch")):
            continue
        inputs = DecodeInputs(case, Sizes("cuda"), 0)
        calls = {"cumla, torch": torch_decode(inputs), "cumla, CuPy": functools.partial(inputs.cumla, "cuda")}
        peer = inputs.flash_mla()
        if peer is not None:
            calls["flash_mla"] = peer
        times = host_times_in_turn(calls)
        for impl, us in times.items():
            report.add("host in turn: decode", str(case), impl, us=us, checked=False)
        if peer is not None:
            report.rows[-1]["peer"] = peers.FLASH_MLA_DECODE
            extra[str(case)] = times["cumla, torch"] / times["flash_mla"]
            print(f"{case}: {extra[str(case)]:.3f} of FlashMLA's host time (bar 1)")
    return extra


def torch_decode(inputs):
    """cumla's call of these inputs as torch's tensors."""
    import torch  # noqa: F401 - which must be there for arrays to become its tensors

    second, (q, cache, listed, out, lse, sink) = inputs.second(), (
        dlpack.give(x, "torch")
        for x in (inputs.q, inputs.caches[0].array, inputs.lists[0], inputs.out, inputs.lse, inputs.sink)
    )  # fmt: skip
    given = {name: dlpack.give(x, "torch") for name, x in second.items() if x is not None}
    return functools.partial(
        cumla.sparse_mla_decode, q, cache, listed, layout=cumla.DSV4_FP8, attn_sink=sink, plan=cumla.DecodePlan(),
        out=out, lse=lse, **given,
    )  # fmt: skip


class Step:
    """A decode step of 8 layers at 32 requests: window layers and those with selected rows in turns."""

    LAYERS, CONTEXT = 8, 8192

    def __init__(self, rng):
        columns, rows = self.CONTEXT // BLOCK, self.CONTEXT // 4
        self.config = ServingConfig(
            compress_ratios=(1, 4), num_heads=HEADS, max_num_seqs=BATCH, max_num_batched_tokens=BATCH,
            max_model_len=self.CONTEXT,
        )  # fmt: skip
        self.starts = np.arange(BATCH + 1, dtype=np.int32)
        lens = rng.integers(self.CONTEXT // 2, self.CONTEXT, BATCH).astype(np.int32)
        table = rng.permutation(BATCH * columns).reshape(BATCH, -1).astype(np.int32)
        slots = table[np.arange(BATCH), (lens - 1) // BLOCK].astype(np.int64) * BLOCK + (lens - 1) % BLOCK
        self.batch = CommonAttentionMetadata(
            cupy.asarray(self.starts), self.starts, cupy.asarray(lens), lens, lens - 1, BATCH, BATCH, 1,
            cupy.asarray(table), cupy.asarray(slots),
        )  # fmt: skip
        self.q = cupy.asarray(rng.standard_normal((BATCH, HEADS, 512)).astype(BF16))
        self.k = cupy.asarray(rng.standard_normal((BATCH, 512)).astype(BF16))
        self.out = cupy.zeros_like(self.q)
        self.caches = [self.filled(rng, BATCH * columns) for _ in range(self.LAYERS)]
        compressed_columns = rows // BLOCK
        compressed_table = rng.permutation(BATCH * compressed_columns).reshape(BATCH, -1).astype(np.int32)
        selected = np.stack([rng.permutation(length // 4)[:TOPK] for length in lens]).astype(np.int32)
        self.compressed = [
            None if i % 2 == 0 else CompressedCache(
                self.filled(rng, BATCH * compressed_columns), cupy.asarray(compressed_table), self.k[:8],
                cupy.arange(8, dtype=np.int64), cupy.asarray(selected),
            )
            for i in range(self.LAYERS)
        ]  # fmt: skip
        self.layers = [SparseMLALayer(4 if c else 1, index_topk=TOPK) for c in self.compressed]
        self.workspaces = [LayerWorkspace.allocate(self.q), LayerWorkspace.allocate(self.q, TOPK)]
        self.builder = DeepseekSparseSWAMetadataBuilder(self.config)

    @staticmethod
    def filled(rng, blocks):
        """Pages of random rows, the same few in all of them."""
        page = cumla.DSV4_FP8.allocate(16, BLOCK, xp=cupy)
        rows = cupy.asarray(rng.standard_normal((16 * BLOCK, 512)).astype(BF16))
        cumla.quantize_and_insert_k_cache(rows, page, cupy.arange(16 * BLOCK), BLOCK)
        cache = cumla.DSV4_FP8.allocate(blocks, BLOCK, xp=cupy)
        cache[...] = page[cupy.arange(blocks) % 16]
        return cache

    def build(self):
        self.metadata = self.builder.build(0, self.batch, validate=False)

    def layer(self, i):
        self.layers[i].step(
            self.q, self.k, self.caches[i], self.metadata, self.compressed[i], out=self.out,
            workspace=self.workspaces[i % 2],
        )  # fmt: skip

    def run(self):
        self.build()
        for i in range(self.LAYERS):
            self.layer(i)


def captured(run):
    """A function that replays what `run` does."""
    run()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.get_current_stream())


def step_rows(report, rng):
    config = f"8 layers b=32 h={HEADS} ctx=8192"
    if not report.wants("step", config):
        return {}
    step = Step(rng)
    replay = captured(step.run)
    step_us = common.graph_us([step.run])
    report.add("decode step, one graph", config, "cumla", us=common.host_us(step.run), us_graph=step_us)
    extra = {"graph_us": step_us}
    if common.has_peer("torch"):
        extra["kernels_us"], extra["kernels"] = kernel_us(replay)
        extra["over_kernels"] = step_us / extra["kernels_us"] - 1
        report.add("decode step, sum of its kernels", config, "cumla", us_graph=extra["kernels_us"])
    print(extra)
    return extra


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--profile", metavar="IMPL", help="print where the host's time goes for a way to call")
    args = parser.parse_args()
    report = common.Report(args)
    rng = np.random.default_rng(0)
    in_turn = host_in_turn(report)
    overheads = host_rows(report, rng)
    step = step_rows(report, rng)
    report.finish(
        overheads=overheads,
        over_flash_mla=in_turn,
        step=step,
        most_overhead_us=MOST_OVERHEAD_US,
        most_over_kernels=MOST_OVER_KERNELS,
    )


if __name__ == "__main__":
    main()
