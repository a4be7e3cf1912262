"""A whole layer step in a CUDA graph: metadata on the device, insert, map, attend, replayed with other batches."""

import contextlib

import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from cumla.layers.sparse import CompressedCache, LayerWorkspace, SparseMLALayer
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.lab import BF16

pytestmark = pytest.mark.gpu

REQUESTS, HEADS, BLOCK, TOPK, LONGEST = 5, 4, 8, 16, 96
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
