"""Builders and CUDA graphs: fixed addresses, no waiting, and no bounds left to what is in an array."""

import dataclasses
import itertools

import numpy as np
import pytest

from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from metadata.batches import BLOCK, buffers_of, make_batch
from support.graphs import graph_of
from support.lab import Lab

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
