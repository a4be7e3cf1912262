"""Kernels begin before the one ahead of them in the stream has ended (griddepcontrol), and wait for its writes."""

import ctypes

import numpy as np
import pytest
from metadata.batches import buffers_of, make_batch

import cumla
import emulation
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from emulation import launches, queues
from support import operations
from support.attention import make_cache, make_indices, make_q
from support.lab import BF16

pytestmark = pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))

# The kernel ahead: while it waits, the final contents of arrays are not written, and it still reads the old ones.
AHEAD = """
struct Move { const unsigned char* from; unsigned char *to, *before; long long bytes; };
extern "C" __global__ void ahead(const Move* moves, int count) {
    for (int m = 0; m < count; ++m)
        for (long long i = threadIdx.x; i < moves[m].bytes; i += blockDim.x) {
            moves[m].before[i] = moves[m].to[i];
            moves[m].to[i] = moves[m].from[i];
        }
}
"""


class KernelAhead:
    """A kernel that writes `arrays` on the device; they hold other values until it has run.

    A kernel that overlaps with it and does not wait reads old values, or overwrites values that this one reads later.
    """

    OLD = 1  # in every byte: indices and lengths out of range, wrong numbers

    def __init__(self, here, arrays, old=OLD):
        self.here, self.old = here, old
        # All arrays in one memory: arrays may be parts of one another.
        memories = list({array.data.mem.ptr: array.data.mem for array in arrays if array.nbytes}.values())
        sources = [bytes_at(here, memory.ptr, memory.size).copy() for memory in memories]
        self.before = [here.xp.zeros(memory.size, np.uint8) for memory in memories]
        moves = [
            (source.data.ptr, memory.ptr, before.data.ptr, memory.size)
            for source, memory, before in zip(sources, memories, self.before, strict=True)
        ]
        table = here.put(np.array(moves, np.uint64))
        for memory in memories:
            ctypes.memset(memory.ptr, old, memory.size)
        self._kept, self._count = (sources, memories, table), len(memories)

    def launch(self):
        *_, table = self._kept
        arguments = (ctypes.c_uint64 * 2)(table.data.ptr, self._count)
        kernel = launches.Kernel(AHEAD, "ahead", 90)
        work = launches.Launch(kernel, (1, 1, 1), (32, 1, 1), 0, ctypes.addressof(arguments), (arguments, self._kept))
        self.here.xp.cuda.get_current_stream().add(queues.KernelWork(work, overlap=False))

    def check(self):
        """Check that no kernel wrote before this kernel had read."""
        for before in self.before:
            assert (self.here.get(before) == self.old).all(), f"{before.size} bytes were written too early"


def bytes_at(here, address, size):
    """An array over given memory."""
    cuda = here.xp.cuda
    return here.xp.ndarray((size,), np.uint8, cuda.MemoryPointer(cuda.UnownedMemory(address, size, None), 0))


def large_decode(here, rng):
    """Arguments for the Hopper kernels, with a tile for each multiprocessor and more."""
    layout = cumla.V32_FP8
    return {
        "q": make_q(rng, 3, 2, 64, layout), "k_cache": make_cache(rng, layout, 20, 64),
        "indices": make_indices(rng, 3, 2, 300, 1280),
    }  # fmt: skip


def on_device(here, value):
    if isinstance(value, list | tuple):
        return operations.rebuilt(value, [on_device(here, x) for x in value])
    return here.put(value) if isinstance(value, np.ndarray) else value


def assert_waits_for_the_kernel_ahead(here, function, make, old=KernelAhead.OLD):
    """Each operation is launched to overlap with the kernel ahead of it in the stream (griddepcontrol.wait)."""
    found = []
    for overlaps in (True, False):
        arguments = {name: on_device(here, value) for name, value in make().items()}
        arrays = [x for value in arguments.values() for x in (value if isinstance(value, list | tuple) else [value])]
        arrays = [x for x in arrays if hasattr(x, "dtype")]
        if overlaps:
            ahead = KernelAhead(here, arrays, old)
            ahead.launch()
        results = function(**arguments, backend="cuda")
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        found.append([np.ascontiguousarray(here.get(x)).tobytes() for x in (*arrays, *results)])
        if overlaps:
            ahead.check()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", operations.EXAMPLES)
@pytest.mark.nowhere(when=lambda x: not operations.is_on("cuda", x.get("name")))
def test_every_operation_waits_for_the_kernel_ahead(here, name):
    example = operations.EXAMPLES[name]
    assert_waits_for_the_kernel_ahead(here, example.spec.function, lambda: operations.arguments_of(example, 0))


@pytest.mark.parametrize("tokens", [5, 20])
def test_a_product_reads_its_weights_ahead_and_nothing_else(here, rng, tokens):
    """The kernel ahead writes x and reads the result's memory; the weights are constant."""
    codes, scales = rng.integers(0, 120, (150, 800)).astype(np.uint8), np.full((2, 7), 0.25, np.float32)
    weights = here.put(codes), here.put(scales)

    def product(x, out, backend):
        return cumla.fp8_block_linear(x, *weights, prefetch_weights=True, out=out, backend=backend)

    x = rng.standard_normal((tokens, 800)).astype(BF16)
    assert_waits_for_the_kernel_ahead(here, product, lambda: {"x": x, "out": np.zeros((tokens, 150), BF16)})


def test_a_large_decode_waits_for_the_kernel_ahead(here, rng):
    seed = int(rng.integers(1 << 30))
    assert_waits_for_the_kernel_ahead(
        here, cumla.sparse_mla_decode, lambda: large_decode(here, np.random.default_rng(seed))
    )


@pytest.mark.parametrize("old", [0, 1], ids=["shorter before", "longer before"])
@pytest.mark.parametrize("splits", ["whole", "splits", "cluster"])
def test_lengths_are_the_kernel_ahead_s(here, rng, monkeypatch, splits, old):
    """A tile then has more or fewer blocks, for any number of splits. Thread block 0 overlaps here."""
    from cumla.kernels.cuda.sparse import work as sparse_work
    from cumla.kernels.cuda.sparse.division import Division

    def divide(work, *_):
        if splits == "whole":
            return Division(work.tiles, planned=False, split=False)
        cluster = splits == "cluster"
        return Division(3 * work.tiles, planned=False, split=not cluster, parts=3, cluster=cluster)

    monkeypatch.setattr(sparse_work, "divide", divide)
    seed, layout = int(rng.integers(1 << 30)), cumla.DSV4_FP8

    def make():
        rng = np.random.default_rng(seed)
        return {
            "q": make_q(rng, 4, 1, 16, layout), "k_cache": make_cache(rng, layout, 4, 64),
            "indices": make_indices(rng, 4, 1, 128, 256), "topk_length": np.array([70, 0, 128, 9], np.int32),
            "extra_k_cache": make_cache(rng, layout, 6, 64), "extra_indices": make_indices(rng, 4, 1, 300, 384),
            "extra_topk_length": np.array([200, 0, 300, 0], np.int32),
        }  # fmt: skip

    assert_waits_for_the_kernel_ahead(here, cumla.sparse_mla_decode, make, old)


@pytest.mark.parametrize("builder", [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder])
def test_builders_wait_for_the_kernel_ahead(here, builder):
    config = ServingConfig(
        window_size=16, compress_ratios=(1, 4), block_size=8, compressed_block_size=8, max_num_batched_tokens=64,
        max_num_seqs=8, max_model_len=128, num_sms=7,
    )  # fmt: skip
    found = []
    for overlaps in (True, False):
        batch = make_batch(here, [20, 9, 40, 33], [1, 1, 12, 20], padding=3)
        if overlaps:
            arrays = [batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, batch.slot_mapping]
            KernelAhead(here, arrays).launch()
        built = builder(config, backend="cuda")
        built.build(0, batch)
        found.append({name: buffer.tobytes() for name, buffer in buffers_of(here, built).items()})
    assert found[0] == found[1]
