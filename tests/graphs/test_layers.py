"""Layers and their plans: one graph for every batch, and graphs captured one after another for larger batches.

A captured graph uses its memory forever: buffers that larger ones replaced, a plan that later plans replaced.
"""

import contextlib

import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from cumla.kernels.types.plan import DenseDecodePlan, Workspace
from cumla.layers.dense import MLACommonImpl
from cumla.layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, MLACommonMetadata, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.attention import make_cache, make_indices, make_q
from support.graphs import graph_of
from support.lab import BF16, Lab

HEADS, BLOCK = 8, 16

# ---- a whole layer step: metadata on the device, insert, map, attend, replayed with other batches

REQUESTS, TOPK, LONGEST = 5, 16, 96
CONFIG = ServingConfig(
    window_size=16, compress_ratios=(4,), block_size=BLOCK, compressed_block_size=4 * BLOCK, index_topk=TOPK,
    num_heads=HEADS, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=128,
)  # fmt: skip
COLUMNS = CONFIG.max_model_len // BLOCK
NUM_BLOCKS = REQUESTS * COLUMNS + 2


class CuPy:
    def put(self, array):
        import cupy

        return cupy.asarray(array)

    @contextlib.contextmanager
    def capture(self):
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            try:
                yield
            finally:
                graph = stream.end_capture()
        self.replay = lambda: graph.launch(cupy.cuda.get_current_stream())


class Torch:
    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def put(self, array):
        return dlpack.give(np.array(array), "torch").cuda()

    @contextlib.contextmanager
    def capture(self):
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            yield
        self.replay = graph.replay


@pytest.fixture(params=[CuPy, Torch])
def framework(request):
    return request.param()


class Step:
    """The arrays of a step of decodes, at fixed addresses, and the step."""

    def __init__(self, framework, rng):
        put = framework.put
        self.starts = np.arange(REQUESTS + 1, dtype=np.int32)
        self.longest = np.full(REQUESTS, LONGEST, np.int32)
        self.query_start_loc, self.seq_lens = put(self.starts), put(self.longest)
        self.table = put(np.zeros((REQUESTS, COLUMNS), np.int32))
        self.slots = put(np.full(REQUESTS, -1, np.int64))
        self.cache = put(random_cache(rng))
        self.compressed = CompressedCache(
            put(random_cache(rng)), put(np.zeros((REQUESTS, COLUMNS), np.int32)), put(np.zeros((2, 512), BF16)),
            put(np.full(2, -1, np.int64)), put(np.full((REQUESTS, TOPK), -1, np.int32)),
        )  # fmt: skip
        self.q, self.k = put(np.zeros((REQUESTS, HEADS, 512), BF16)), put(np.zeros((REQUESTS, 512), BF16))
        self.out = put(np.zeros((REQUESTS, HEADS, 512), BF16))
        self.workspace = LayerWorkspace.allocate(self.q, TOPK)
        self.builder = DeepseekSparseSWAMetadataBuilder(CONFIG)
        self.layer = SparseMLALayer(4, index_topk=TOPK, attn_sink=put(rng.standard_normal(HEADS).astype(np.float32)))

    def arrays(self):
        compressed = self.compressed
        return [
            self.seq_lens, self.table, self.slots, self.q, self.k,
            compressed.block_table, compressed.k, compressed.slot_mapping, compressed.topk_indices,
        ]  # fmt: skip

    def batch(self):
        return CommonAttentionMetadata(
            self.query_start_loc, self.starts, self.seq_lens, self.longest, self.longest - 1, REQUESTS, REQUESTS, 1,
            self.table, self.slots,
        )  # fmt: skip

    def run(self, **given):
        metadata = self.builder.build(0, self.batch(), validate=False)
        return self.layer.step(self.q, self.k, self.cache, metadata, self.compressed, **given)

    def fill(self, values):
        """Other lengths, tables, slots and rows, at the same addresses."""
        for array, new in zip(self.arrays(), values, strict=True):
            native = dlpack.borrow(array)
            native.set(np.ascontiguousarray(new))

    def results(self):
        return [dlpack.borrow(x).get() for x in (self.out, self.cache, self.compressed.cache)]


def random_cache(rng):
    cache = np.zeros((NUM_BLOCKS, BLOCK, 584), np.uint8)
    k = rng.standard_normal((NUM_BLOCKS * BLOCK, 512)).astype(BF16)
    cumla.quantize_and_insert_k_cache(k, cache, np.arange(len(k)), BLOCK)
    return cache


def values(rng):
    """A batch: what `Step.arrays` has, in that order."""
    seq_lens = rng.integers(1, LONGEST + 1, REQUESTS).astype(np.int32)
    table, compressed_table = (
        rng.permutation(REQUESTS * COLUMNS).reshape(REQUESTS, -1).astype(np.int32) for _ in range(2)
    )
    last = seq_lens - 1
    slots = table[np.arange(REQUESTS), last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK
    selected = np.full((REQUESTS, TOPK), -1, np.int32)
    for row, length in zip(selected, seq_lens, strict=True):
        chosen = rng.permutation(length // 4)[:TOPK]
        row[: len(chosen)] = chosen
    return [
        seq_lens, table, slots, rng.standard_normal((REQUESTS, HEADS, 512)).astype(BF16),
        rng.standard_normal((REQUESTS, 512)).astype(BF16), compressed_table,
        rng.standard_normal((2, 512)).astype(BF16), rng.choice(NUM_BLOCKS * BLOCK, 2, replace=False),
        selected,
    ]  # fmt: skip


@pytest.mark.gpu
def test_a_captured_step_is_right_for_every_batch(framework, rng):
    import cupy

    seed = int(rng.integers(1 << 30))
    captured, eager = (Step(framework, np.random.default_rng(seed)) for _ in range(2))
    captured.fill(values(np.random.default_rng(1)))
    captured.run(out=captured.out, workspace=captured.workspace)  # allocates and compiles what it needs
    captured.cache, captured.compressed = eager_copies(framework, eager)
    with framework.capture():
        captured.run(out=captured.out, workspace=captured.workspace)
    for i in range(6):
        batch = values(np.random.default_rng(seed + i))
        captured.fill(batch)
        eager.fill(batch)
        cupy.cuda.Device().synchronize()
        framework.replay()
        eager.run(out=eager.out)
        cupy.cuda.Device().synchronize()
        for name, got, want in zip(("out", "cache", "rows"), captured.results(), eager.results(), strict=True):
            assert got.tobytes() == want.tobytes(), f"{name} of batch {i}"


def eager_copies(framework, eager):
    """The caches of another step, in separate memory."""
    copy = [framework.put(dlpack.borrow(x).get()) for x in (eager.cache, eager.compressed.cache)]
    compressed = eager.compressed
    fields = [
        framework.put(dlpack.borrow(x).get())
        for x in (compressed.block_table, compressed.k, compressed.slot_mapping, compressed.topk_indices)
    ]
    return copy[0], CompressedCache(copy[1], *fields)


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["out", "workspace"])
def test_what_would_allocate_in_a_capture_is_named(framework, missing, rng):
    step = Step(framework, rng)
    step.fill(values(rng))
    given = {"out": step.out, "workspace": step.workspace}
    step.run(**given)
    del given[missing]
    with (
        framework.capture(),
        pytest.raises(ValueError, match=f"{missing}: got None while a CUDA graph is being captured"),
    ):
        step.run(**given)


@pytest.mark.gpu
def test_a_captured_step_allocates_nothing(rng):
    """No block of CuPy's pool is reused during a capture."""
    import cupy

    framework = CuPy()
    step = Step(framework, rng)
    step.fill(values(rng))
    step.run(out=step.out, workspace=step.workspace)
    cupy.cuda.Device().synchronize()
    requests = []

    def noted(size):
        requests.append(size)
        return pool.malloc(size)

    pool = cupy.get_default_memory_pool()
    with cupy.cuda.using_allocator(noted), framework.capture():
        step.run(out=step.out, workspace=step.workspace)
    assert not requests


# ---- growing batches

BATCHES = (1, 3, 5, 6)


def captured(call):
    """A graph of a call, which ran once before."""
    call()
    return graph_of(call)


def results(lab, batch):
    """out and lse of a decode."""
    shapes = ((batch, 1, HEADS, 512), BF16), ((batch, HEADS, 1), np.float32)
    return [lab.put(np.zeros(shape, dtype)) for shape, dtype in shapes]


def check_replays(lab, steps):
    """steps: for each batch the call, and its output arrays. Every replay gives the bits of the first call."""
    import cupy

    graphs, wanted, strangers = [], [], []
    for call, written in steps:
        graphs.append(captured(call))
        call()
        cupy.cuda.Device().synchronize()
        wanted.append([lab.get(x).tobytes() for x in written])
    # Memory that was freed and allocated again is unchanged after the replays.
    for floats in {HEADS * 512 * batch * splits for batch in BATCHES for splits in range(1, 9)}:
        strangers += [cupy.full(floats, 7, np.float32) for _ in range(2)]
    for order in (range(len(graphs)), reversed(range(len(graphs)))):
        for i in order:
            for x in steps[i][1]:
                x.view(np.uint8)[:] = 1
            graphs[i].launch()
            cupy.cuda.Device().synchronize()
            assert [lab.get(x).tobytes() for x in steps[i][1]] == wanted[i], f"batch {BATCHES[i]}"
            steps[-1 - i][0]()  # an eager call of another size in between
            cupy.cuda.Device().synchronize()
    assert all((lab.get(x) == 7).all() for x in strangers)


def test_sparse_decode_with_one_plan(device, rng, monkeypatch):
    from cumla.kernels.cuda.sparse import work

    monkeypatch.setattr(work, "LEAST_TILES", 1)  # so that memory has to grow
    layout, plan = cumla.DSV4_FP8, cumla.DecodePlan()
    cache = device.put(make_cache(rng, layout, 8, 64))
    steps = []
    for batch in BATCHES:
        q, indices = (
            device.put(x) for x in (make_q(rng, batch, 1, HEADS, layout), make_indices(rng, batch, 1, 300, 512))
        )
        lengths = device.put(rng.integers(0, 301, batch).astype(np.int32))
        out, lse = (
            device.put(np.zeros(s, t)) for s, t in (((batch, 1, HEADS, 512), BF16), ((batch, HEADS, 1), np.float32))
        )

        def call(q=q, indices=indices, lengths=lengths, out=out, lse=lse):
            cumla.sparse_mla_decode(q, cache, indices, topk_length=lengths, plan=plan, out=out, lse=lse)

        steps.append((call, (out, lse)))
    check_replays(device, steps)


def test_dense_decode_with_one_plan(device, rng):
    plan, steps = DenseDecodePlan(), []
    cache = device.put(rng.standard_normal((40, BLOCK, 576)).astype(BF16))
    for batch in BATCHES:
        q = device.put(rng.standard_normal((batch, 1, HEADS, 576)).astype(BF16))
        table = device.put(rng.integers(0, 40, (batch, 16)).astype(np.int32))
        lens = device.put(rng.integers(1, 16 * BLOCK, batch).astype(np.int32))
        out, lse = (
            device.put(np.zeros(s, t)) for s, t in (((batch, 1, HEADS, 512), BF16), ((batch, HEADS, 1), np.float32))
        )

        def call(q=q, table=table, lens=lens, out=out, lse=lse):
            cumla.dense_mla_decode(q, cache, table, lens, plan=plan, out=out, lse=lse)

        steps.append((call, (out, lse)))
    check_replays(device, steps)


def test_a_sparse_layer_with_one_builder(device, rng):
    config = ServingConfig(
        window_size=40, block_size=BLOCK, num_heads=HEADS, max_num_batched_tokens=8, max_num_seqs=8, max_model_len=64,
    )  # fmt: skip
    builder, layer, put = DeepseekSparseSWAMetadataBuilder(config), SparseMLALayer(), device.put
    steps = []
    for batch in BATCHES:
        cache = put(make_cache(rng, cumla.DSV4_FP8, 8 * 4, BLOCK))
        lens, starts = rng.integers(1, 64, batch).astype(np.int32), np.arange(batch + 1, dtype=np.int32)
        table = np.arange(32, dtype=np.int32).reshape(8, 4)[:batch]
        slots = table[np.arange(batch), (lens - 1) // BLOCK] * BLOCK + (lens - 1) % BLOCK
        common = CommonAttentionMetadata(
            put(starts), starts, put(lens), lens, lens - 1, batch, batch, 1, put(table), put(slots.astype(np.int64))
        )
        q, k = (put(rng.standard_normal((batch, *shape)).astype(BF16)) for shape in ((HEADS, 512), (512,)))
        out, workspace = put(np.zeros((batch, HEADS, 512), BF16)), LayerWorkspace.allocate(q)

        def call(cache=cache, common=common, q=q, k=k, out=out, workspace=workspace):
            metadata = builder.build(0, common)
            for _ in range(2):  # layers, which share the plan
                layer.step(q, k, cache, metadata, out=out, workspace=workspace)

        steps.append((call, (out,)))
    check_replays(device, steps)


@pytest.mark.gpu
def test_a_dense_layer(rng):
    device = Lab("cuda", on_device=True)
    put, scale = device.put, 192**-0.5
    weight = (rng.standard_normal((HEADS * 256, 512)) * 512**-0.5).astype(BF16)
    layer = MLACommonImpl(HEADS, 576, scale, kv_b_proj=put(weight))
    layer.process_weights_after_loading()
    steps = []
    for batch in BATCHES:
        cache = put(rng.standard_normal((8 * 4, BLOCK, 576)).astype(BF16))
        lens = rng.integers(1, 64, batch).astype(np.int32)
        table = np.arange(32, dtype=np.int32).reshape(8, 4)[:batch]
        slots = table[np.arange(batch), (lens - 1) // BLOCK] * BLOCK + (lens - 1) % BLOCK
        metadata = MLACommonMetadata(
            num_prefills=0, num_prefill_tokens=0, num_decodes=batch, num_decode_tokens=batch,
            slot_mapping=put(slots.astype(np.int64)), seq_lens=None, seq_lens_tensor=put(lens), max_prefill_seq_len=0,
            max_decode_seq_len=64, context_lens_tensor=None, block_tables=put(table), max_query_len=1,
            max_decode_query_len=1,
        )  # fmt: skip
        q, kv_c, k_pe = (put(rng.standard_normal((batch, *s)).astype(BF16)) for s in ((HEADS, 192), (512,), (64,)))
        output = put(np.zeros((batch, HEADS * 128), BF16))

        def call(cache=cache, q=q, kv_c=kv_c, k_pe=k_pe, metadata=metadata, output=output):
            layer.forward(q, kv_c, k_pe, cache, metadata, output)

        steps.append((call, (output,)))
    check_replays(device, steps)


def test_an_eager_call_after_a_capture_plans_for_itself(device, rng):
    """A captured plan has not been computed on the device yet."""
    import cupy

    layout, plan = cumla.DSV4_FP8, cumla.DecodePlan()
    cache, q = device.put(make_cache(rng, layout, 8, 64)), device.put(make_q(rng, 3, 1, HEADS, layout))
    indices, lengths = device.put(make_indices(rng, 3, 1, 300, 512)), device.put(np.array([300, 2, 77], np.int32))
    want, _ = cumla.sparse_mla_decode(q, cache, indices, topk_length=lengths)
    out, lse = results(device, 3)

    def call():
        cumla.sparse_mla_decode(q, cache, indices, topk_length=lengths, plan=plan, out=out, lse=lse)

    captured(call)
    out.view(np.uint8)[:] = 1
    call()
    cupy.cuda.Device().synchronize()
    assert device.get(out).tobytes() == device.get(want).tobytes()


def test_plans_are_of_one_kind_and_one_device(device, rng):
    import cupy

    layout, put = cumla.DSV4_FP8, device.put
    cache, q, indices = (
        put(x)
        for x in (make_cache(rng, layout, 2, 64), make_q(rng, 2, 1, HEADS, layout), make_indices(rng, 2, 1, 9, 64))
    )
    rows, dense_q = put(np.zeros((2, BLOCK, 576), BF16)), put(np.zeros((2, 1, HEADS, 576), BF16))
    table, lens = put(np.zeros((2, 1), np.int32)), put(np.ones(2, np.int32))

    def sparse(plan):
        cumla.sparse_mla_decode(q, cache, indices, plan=plan)

    def dense(plan):
        cumla.dense_mla_decode(dense_q, rows, table, lens, plan=plan)

    for call, kind, others in (
        (sparse, "DecodePlan", (DenseDecodePlan(), Workspace(), 5)),
        (dense, "DenseDecodePlan", (cumla.DecodePlan(), Workspace(), 5)),
    ):
        for other in others:
            with pytest.raises(TypeError, match=f"plan: got .*{type(other).__name__}, expected a {kind}$"):
                call(other)
    for kind, call in ((cumla.DecodePlan, sparse), (DenseDecodePlan, dense)):
        with pytest.raises(ValueError, match="plan: got memory in host memory, expected memory on CUDA device 0"):
            call(kind(np.zeros(1 << 20, np.uint8)))
        with pytest.raises(ValueError, match="plan: got a workspace of 64 bytes, expected at least"):
            kind(cupy.zeros(64, np.uint8)).workspace.array("a", 65, np.uint8, q)
    memory = cupy.zeros(1 << 21, np.uint8)
    out = memory[: dense_q.nbytes].view(BF16).reshape(2, 1, HEADS, 576)[..., :512]
    for kind, call in (
        (cumla.DecodePlan, lambda plan: cumla.sparse_mla_decode(q, cache, indices, plan=plan, out=out)),
        (DenseDecodePlan, lambda plan: cumla.dense_mla_decode(dense_q, rows, table, lens, plan=plan, out=out)),
    ):
        with pytest.raises(ValueError, match=r"got elements that (plan|out) has too"):
            call(kind(memory))
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            elsewhere = cupy.zeros(1 << 20, np.uint8)
        with pytest.raises(ValueError, match="plan: got memory on CUDA device 1, expected memory on CUDA device 0"):
            dense(DenseDecodePlan(elsewhere))
