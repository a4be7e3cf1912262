"""Builders and models: a build, and a step of decodes of a whole layer, captured and replayed at other lengths.

Builders have fixed addresses, wait for nothing, and leave no bound to what is in an array.
"""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
from metadata.batches import BLOCK, buffers_of, make_batch

from cumla.arrays import streams
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.graphs import graph_of
from support.indexing import anything
from support.lab import BF16, Lab
from support.models import GoldenLayer, V4Layer, V32Layer
from support.properties import INT64_MAX, INT64_MIN

# ---- builders

CONFIGS = {
    name: ServingConfig(
        window_size=16, compress_ratios=(1, 4), block_size=BLOCK, compressed_block_size=BLOCK,
        num_speculative_tokens=spec, max_num_batched_tokens=96, max_num_seqs=16, max_model_len=512, num_sms=7,
    )
    for name, spec in (("one-token", 0), ("native", 1), ("flattened", 3))
}  # fmt: skip
ON_DEVICE = ("cuda", "numba_cuda")
BUILDERS = [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder]
every_builder = pytest.mark.parametrize("builder", BUILDERS)
every_config = pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in CONFIGS.items()])


def uniform_batch(lab, config, seq_lens, captured):
    """Decodes of next_n tokens each, padded to a captured number of requests."""
    next_n, padding = config.decode_threshold, captured - len(seq_lens)
    query_lens = [next_n] * len(seq_lens) + [0] * padding
    lens = [*seq_lens, *[0] * padding]
    return make_batch(lab, lens, query_lens, padding=next_n * padding, columns=config.max_model_len // BLOCK)


def read_by_layers(metadata):
    """The arrays that a captured decode step reads."""
    if hasattr(metadata, "decode_swa_indices"):
        return metadata.decode_swa_indices, metadata.decode_swa_lens, metadata.token_to_req_indices
    decode = metadata.decode
    return decode.seq_lens, decode.decode_lens, decode.schedule_metadata, metadata.slot_mapping


@pytest.mark.gpu
@every_config
@every_builder
def test_a_captured_reader_is_right_after_the_next_build(builder, config):
    import cupy

    lab, built = Lab("cuda", on_device=True), builder(config)
    arrays = read_by_layers(built.build_for_cudagraph_capture(uniform_batch(lab, config, [100] * 8, 8)))
    copies = [cupy.empty_like(array) for array in arrays]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for copy, array in zip(copies, arrays, strict=True):
            cupy.cuda.runtime.memcpyAsync(
                copy.data.ptr, array.data.ptr, array.nbytes, cupy.cuda.runtime.memcpyDeviceToDevice, stream.ptr
            )
        graph = stream.end_capture()

    for seq_lens in ([7, 300, 41, 512, 90], [8] * 8, [200]):
        batch = uniform_batch(lab, config, seq_lens, 8)
        built.build(0, batch)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = read_by_layers(builder(config).build_for_cudagraph_capture(batch))
        for copy, array in zip(copies, eager, strict=True):
            np.testing.assert_array_equal(copy.get(), padded(array.get(), len(copy)))


def padded(array, length):
    """A reader at a larger captured size must find only empty entries after the batch's."""
    behind = np.full((length - len(array), *array.shape[1:]), -1 if array.ndim == 3 else 0, array.dtype)
    return np.concatenate([array, behind])


@pytest.mark.gpu
@every_config
@every_builder
def test_a_build_can_be_captured(builder, config):
    """Calls that wait for the device, read back or allocate cannot be captured."""
    import cupy

    lab, built = Lab("cuda", on_device=True), builder(config)
    next_n = config.decode_threshold
    batch = make_batch(lab, [100, 60, 200, 33], [next_n, next_n, 20, 30], columns=64)
    longer = np.array([101, 60, 200, 33], np.int32)
    built.build(0, batch)
    expected = buffers_of(lab, built)
    graph = graph_of(lambda: built.build(0, batch))
    for name, buffer in built._buffers._asdict().items():
        if name != "block_table":  # written only as far as it is used
            buffer.fill(9)
    cupy.cuda.Device().synchronize()
    graph.launch()
    cupy.cuda.Device().synchronize()
    written = slice(None, 50 + 2 * next_n)
    for name, buffer in buffers_of(lab, built).items():
        np.testing.assert_array_equal(buffer[written], expected[name][written], err_msg=name)

    batch.seq_lens.set(longer)  # the graph reads the batch's arrays again
    cupy.cuda.Device().synchronize()
    graph.launch()
    cupy.cuda.Device().synchronize()
    fresh = builder(config)
    computed = longer - np.diff(batch.query_start_loc_cpu)
    changes = {"seq_lens_cpu": longer, "num_computed_tokens_cpu": computed, "max_seq_len": -1}
    fresh.build(0, dataclasses.replace(batch, **changes))
    for name, buffer in buffers_of(lab, fresh).items():
        np.testing.assert_array_equal(buffers_of(lab, built)[name][written], buffer[written], err_msg=name)


@pytest.mark.parametrize("backend", ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_DEVICE)])
@every_config
@every_builder
def test_no_number_in_an_array_leads_outside(builder, config, backend):
    """Host numbers are right, the arrays hold anything: nothing is written outside the buffers' rows in use."""
    lab, rng = Lab(backend, on_device=backend in ON_DEVICE), np.random.default_rng(0)
    next_n = config.decode_threshold
    query_lens = [next_n] * 6 + [20, 0, 30]
    batch = make_batch(lab, [q + 40 for q in query_lens], query_lens, padding=3)
    limits = np.iinfo(np.int32)
    spans = [(limits.min, limits.max), (-99, 99), (limits.max - 1, limits.max), (limits.min, limits.min + 1), (0, 1)]
    names = ("query_start_loc", "seq_lens", "block_table_tensor")
    for chosen in [*itertools.product(spans, repeat=3)][::5] + [(span,) * 3 for span in spans]:
        garbage = {
            name: lab.put(rng.integers(*span, getattr(batch, name).shape, np.int32))
            for name, span in zip(names, chosen, strict=True)
        }
        built = builder(config, backend=backend)
        metadata = built.build(0, dataclasses.replace(batch, **garbage))
        rows = len(batch.slot_mapping)
        if builder is DeepseekSparseSWAMetadataBuilder:
            lens, requests = lab.get(metadata.decode_swa_lens), lab.get(metadata.token_to_req_indices)
            assert ((lens >= 0) & (lens <= config.window_size)).all()
            assert ((requests >= 0) & (requests < len(query_lens))).all()
            assert not lab.get(built._buffers.swa_lens)[rows:].any()
        else:
            schedule, entries = lab.get(metadata.decode.schedule_metadata), len(metadata.decode.seq_lens)
            assert (lab.get(metadata.decode.seq_lens) >= 0).all()
            assert ((schedule[:, 0] >= 0) & (schedule[:, 0] <= entries)).all()
            assert not lab.get(built._buffers.seq_lens)[2 * rows :].any()


# ---- models

PROMPTS = (6, 3)  # for two requests; each further step but one completes one row of four positions


class Decodes:
    """Steps of one token per request, or of so many, in arrays at fixed addresses.

    Args:
        counts: tokens of each request: those of the first step, of the second, and so on
    """

    def __init__(self, lab, case, counts=((1, 1),) * 4, batch_invariant=False):
        self.counts = np.array(counts)
        golden = GoldenLayer(case)
        make = V4Layer if golden.record["model"] == "v4" else V32Layer
        self.made = make(
            golden, 2, backend="cuda", activations="bfloat16", cache_format="fp8", lab=lab,
            speculative=self.counts.max() - 1, batch_invariant=batch_invariant,
        )  # fmt: skip
        for request, count in enumerate(PROMPTS):
            self.made.step([(request, 0, count)], given=False)
        self.golden, self.lab, self.arrays = golden, lab, {}

    def keep(self, name, array):
        """On the device, at the address of the earlier array of this name."""
        placed = self.lab.put(np.ascontiguousarray(array))
        if name not in self.arrays:
            self.arrays[name] = placed
        self.arrays[name][...] = placed
        return self.arrays[name]

    def prepare(self, index):
        """Hidden states and metadata of the index-th step; the out is wiped."""
        firsts = PROMPTS + self.counts[:index].sum(axis=0)
        scheduled = list(zip(range(2), firsts.tolist(), self.counts[index].tolist(), strict=True))
        batch, tables = self.made.paged.batch(scheduled)
        kept = [
            self.keep(name, self.lab.get(getattr(batch, name)))
            for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        ]
        tables = {name: self.keep(name, self.lab.get(table)) for name, table in tables.items()}
        batch = CommonAttentionMetadata(
            kept[0], batch.query_start_loc_cpu, kept[1], batch.seq_lens_cpu, batch.num_computed_tokens_cpu, 2,
            batch.num_actual_tokens, batch.max_query_len, kept[2], kept[3], max_seq_len=self.golden.tokens,
        )  # fmt: skip
        hidden = np.concatenate([self.golden.hidden[first : first + count] for _, first, count in scheduled])
        self.hidden = self.keep("hidden", hidden.astype(self.made.layer.activations))
        self.out = self.keep("out", np.zeros(hidden.shape, self.made.layer.activations))
        self.metadata = self.made.build(batch, tables)

    def run(self, **options):
        self.made.layer.step(self.hidden, self.made.caches, self.metadata, out=self.out, **options)

    def scratch(self, name):
        """Bytes of the layer's arrays of this name."""
        arrays = self.made.layer.scratch._arrays
        return [self.lab.get(arrays[key]).tobytes() for key in sorted(arrays, key=str) if key[0] == name]

    def result(self):
        import cupy

        cupy.cuda.Device().synchronize()
        return self.lab.get(self.out).view(np.uint16)


RAGGED = ((2, 1), (1, 2), (2, 1), (1, 2))


@pytest.mark.parametrize(
    ("case", "counts"), [*((case, ((1, 1),) * 4) for case in (2, 3, 8, 13)), (8, RAGGED), (13, RAGGED)]
)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.thorough(when=lambda x: x.get("case") in (2, 3) or (x.get("batch_invariant") and x.get("case") == 13))
def test_a_captured_step_is_right_at_other_lengths(device, case, counts, batch_invariant):
    """Ragged ones, too: which request has the draft token differs from step to step."""

    eager, captured = (Decodes(device, case, counts, batch_invariant) for _ in range(2))
    for each in (eager, captured):
        each.prepare(0)
        each.run()
    np.testing.assert_array_equal(captured.result(), eager.result())
    eager.prepare(1)
    captured.prepare(1)
    eager.run()
    graph = graph_of(captured.run)
    for index in range(1, 4):
        if index > 1:
            eager.prepare(index)
            captured.prepare(index)
            eager.run()
        graph.launch()
        np.testing.assert_array_equal(captured.result(), eager.result())
        assert captured.result().any()


@pytest.mark.parametrize("slow", ["main", "side"])
@pytest.mark.parametrize("given", [False, True], ids=["selects", "given rows"])
@pytest.mark.parametrize("case", [3, 8])
def test_branches_wait_for_what_they_need_and_are_waited_for(here, monkeypatch, case, given, slow):
    """One of the streams is slow: a reader that does not wait for it is early. The bits of all in order."""
    import cupy

    wanted, got = (Decodes(here, case) for _ in range(2))
    topk = np.tile([[0, -1]], (2, 1)).astype(np.int32) if given and case == 8 else None
    branch, branches = streams.Side.branch, []

    @contextlib.contextmanager
    def slowly(side):
        if slow == "main":
            cupy.cuda.get_current_stream().busy()
        with branch(side):
            if slow == "side":
                cupy.cuda.get_current_stream().busy()
            branches.append(cupy.cuda.get_current_stream().ptr)
            yield

    monkeypatch.setattr(streams.Side, "branch", slowly)
    for index in range(2):
        for decodes in (wanted, got):
            decodes.prepare(index)
            observe = {"observe": lambda part: contextlib.nullcontext()} if decodes is wanted else {}
            decodes.run(topk_indices=None if topk is None else here.put(topk), **observe)
        np.testing.assert_array_equal(got.result(), wanted.result())
        assert got.result().any()
        for name in ("pooled", "indexed_weights", "topk_indices", "q"):  # whatever the number of rows
            np.testing.assert_array_equal(got.scratch(name), wanted.scratch(name))
    assert len(branches) == (4 if case == 8 and not given else 2)
    assert len(set(branches)) == 1
    assert 0 not in branches


def test_captured_products_of_branches_have_memory_of_their_own(here, monkeypatch):
    import cupy

    from emulation import cublas

    decodes, memory = Decodes(here, 8), {}

    def noted(handle, address, size):
        memory.setdefault(cublas._stream[0], set()).add(address)
        return 0

    monkeypatch.setattr(cublas.LIBRARY, "cublasSetWorkspace_v2", noted)
    decodes.prepare(0)
    decodes.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        decodes.run()
        stream.end_capture()
    own = memory.pop(stream.ptr)
    (beside,) = memory.values()
    assert len(own) == len(beside) == 1
    assert own != beside


@pytest.mark.gpu
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_a_step_of_decodes_allocates_nothing(case):
    import cupy

    def refuse(size):
        raise AssertionError(f"{size} bytes are allocated")

    decodes = Decodes(Lab("cuda", on_device=True), case)
    for index in (0, 1):
        decodes.prepare(index)
        if index == 0:
            decodes.run()
            continue
        with cupy.cuda.using_allocator(refuse):
            decodes.run()
    assert decodes.result().any()


class PaddedDecodes(Decodes):
    """The same at a captured size: the rows after those of requests are zero, or hold anything."""

    SIZE = 4

    def __init__(self, lab, case):
        super().__init__(lab, case)
        self.done = list(PROMPTS)

    def prepare(self, requests, rng=None):
        """A token of each of these requests.

        Args:
            rng: for the contents of the other rows: hidden states of NaN, lengths and pages of any value, slots outside
                of the caches. None: zeros, and slots of -1
        """
        batch, tables = self.made.paged.batch([(request, self.done[request], 1) for request in requests])
        real, rest = len(requests), self.SIZE - len(requests)
        hidden = np.zeros((self.SIZE, self.golden.hidden.shape[1]), np.float32)
        for row, request in enumerate(requests):
            hidden[row] = self.golden.hidden[self.done[request]]
            self.done[request] += 1
        slots, lens = np.full(rest, -1), np.zeros(rest, np.int32)
        others = {name: np.zeros((rest, table.shape[1]), np.int32) for name, table in tables.items()}
        if rng is not None:
            hidden[real:] = rng.choice([np.nan, np.inf, -np.inf, 3e38], hidden[real:].shape)
            slots, lens = rng.choice(np.array([-1, INT64_MIN, INT64_MAX, 1 << 40]), rest), anything(rng, rest)
            others = {name: anything(rng, table.shape) for name, table in others.items()}
        starts, lens_cpu = np.minimum(np.arange(self.SIZE + 1), real).astype(np.int32), batch.seq_lens_cpu
        tables = {
            name: self.keep(name, np.concatenate([self.lab.get(table), others[name]])) for name, table in tables.items()
        }
        arrays = {
            "query_start_loc": starts, "seq_lens": np.concatenate([lens_cpu, lens]),
            "slot_mapping": np.concatenate([self.lab.get(batch.slot_mapping), slots]),
        }  # fmt: skip
        arrays = {name: self.keep(name, array) for name, array in arrays.items()}
        lens_cpu = np.concatenate([lens_cpu, np.zeros(rest, np.int32)])
        batch = CommonAttentionMetadata(
            arrays["query_start_loc"], starts, arrays["seq_lens"], lens_cpu, np.maximum(lens_cpu - 1, 0), self.SIZE,
            self.SIZE, 1, tables["window"], arrays["slot_mapping"], max_seq_len=self.golden.tokens,
        )  # fmt: skip
        self.hidden = self.keep("hidden", hidden.astype(self.made.layer.activations))
        self.out = self.keep("out", np.full(hidden.shape, 7, self.made.layer.activations))
        self.metadata = self.made.build(batch, tables)

    def caches(self):
        fields = (getattr(self.made.caches, x.name) for x in dataclasses.fields(self.made.caches))
        return [np.array(self.lab.get(x)).tobytes() for x in fields if hasattr(x, "dtype")]


@pytest.mark.filterwarnings("ignore:invalid value")  # because products are emulated
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_rows_after_the_requests_may_hold_anything(device, rng, case):
    """Captured with one number of requests, replayed with others and with none: outputs and caches keep their bits."""

    clean, dirty = PaddedDecodes(device, case), PaddedDecodes(device, case)
    for each in (clean, dirty):
        each.prepare([0, 1])
        each.run()
    dirty.prepare([0, 1])
    graph = graph_of(dirty.run)
    dirty.done = list(clean.done)
    for requests in ([0, 1], [1], [], [1, 0]):
        before = clean.caches()
        clean.prepare(requests)
        dirty.prepare(requests, rng)
        clean.run()
        graph.launch()
        np.testing.assert_array_equal(dirty.result()[: len(requests)], clean.result()[: len(requests)])
        assert np.isfinite(clean.result()[: len(requests)].view(BF16).astype(np.float32)).all()
        assert dirty.caches() == clean.caches()
        assert requests or clean.caches() == before
