"""Dense MLA metadata, graph buffers and sequence groups: what does not fit is named, and nothing is written by then."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from cumla.metadata import MLACommonMetadataBuilder, MLACommonState, MLAConfig, SequenceGroup
from metadata.batches import BLOCK, make_batch
from support.lab import Lab

HOST = Lab("cpu", on_device=False)
CONFIG = MLAConfig(block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
LIKE = np.zeros(1, np.int64)


def decodes(number=2):
    return MLACommonMetadataBuilder(CONFIG).build(0, make_batch(HOST, [5, 9, 3, 4][:number], [1] * number))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_seqs": None}, "num_seqs: got None"), ({"num_seqs": 2.0}, "num_seqs: got 2.0"),
        ({"num_seqs": True}, "num_seqs: got True"), ({"num_queries": None}, "num_queries: got None"),
        ({"turn_prefills_into_decodes": 1}, "turn_prefills_into_decodes: got 1"),
        ({"model_input": None}, "model_input: got None, expected an object with input_tokens"),
        ({"model_input": SimpleNamespace(input_tokens=LIKE)}, "model_input: got .*expected an object with input_posi"),
    ],
)  # fmt: skip
def test_wrong_steps(changes, text):
    metadata = decodes()
    model_input = SimpleNamespace(input_tokens=np.full(2, 7), input_positions=np.full(2, 7))
    arguments = {
        "model_input": model_input, "sampled_token_ids": np.array([1, 2]), "block_size": BLOCK, "num_seqs": 2,
        "num_queries": 2,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=text):
        metadata.advance_step(**arguments | changes)
    assert metadata.seq_lens == metadata.seq_lens_tensor.tolist() == [5, 9]
    assert (model_input.input_tokens == 7).all()


def test_host_lengths_of_other_requests():
    metadata = decodes()
    metadata.seq_lens = [5, 9, 3]
    model_input = SimpleNamespace(input_tokens=np.full(2, 7), input_positions=np.full(2, 7))
    with pytest.raises(ValueError, match="num_seqs: got 2, expected 2, the requests of this metadata"):
        metadata.advance_step(model_input, np.array([1, 2]), BLOCK, 2, 2)
    assert metadata.seq_lens_tensor.tolist() == [5, 9]
    assert (model_input.input_tokens == 7).all()


def test_lengths_stay_pythons_integers():
    metadata = decodes()
    model_input = SimpleNamespace(input_tokens=np.zeros(2, np.int64), input_positions=np.zeros(2, np.int64))
    metadata.advance_step(model_input, np.array([1, 2]), BLOCK, np.int8(2), np.uint8(1))
    assert metadata.seq_lens == [6, 9]
    assert {type(n) for n in (*metadata.seq_lens, metadata.num_decodes, metadata.num_decode_tokens)} == {int}


def test_a_copy_has_views_of_its_own():
    metadata = decodes()
    before = metadata.decode_metadata
    other = copy.copy(metadata)
    other.seq_lens = [50, 60]
    assert other.decode_metadata.seq_lens == [50, 60]
    assert metadata.decode_metadata is before


@pytest.mark.parametrize("size", [None, -1, 1.5, True, "4", 10**20])
def test_sizes_of_graphs(size):
    state = MLACommonState(CONFIG)
    with pytest.raises((TypeError, ValueError), match="max_batch_size: got"), state.graph_capture(size, LIKE):
        pass
    with state.graph_capture(4, LIKE):
        for call in (state.graph_capture_get_metadata_for_batch, state.graph_clone):
            with pytest.raises((TypeError, ValueError), match="batch_size: got"):
                call(size)


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("slot_mapping", np.zeros((3, 1), np.int64), "got shape"), ("slot_mapping", np.zeros(3), "got dtype float64"),
        ("seq_lens_tensor", np.zeros(3, np.int8), "got dtype"), ("seq_lens_tensor", np.zeros(2, np.int32), "got 3"),
        ("block_tables", np.zeros(3, np.int32), "got shape"), ("block_tables", np.zeros((2, 8), np.int32), "got shape"),
        ("block_tables", np.zeros((3, 8), np.float32), "got dtype float32"), ("block_tables", None, "got NoneType"),
    ],
)  # fmt: skip
def test_wrong_buffers_of_a_graph(name, wrong, text):
    state = MLACommonState(CONFIG)
    with state.graph_capture(3, LIKE):
        buffers = state.get_graph_input_buffers(state.graph_capture_get_metadata_for_batch(3))
    buffers[name] = wrong
    before = {key: None if x is None else x.copy() for key, x in buffers.items()}
    with pytest.raises((TypeError, ValueError), match=rf"{name}('\])?: {text}"):
        state.prepare_graph_input_buffers(buffers, decodes(3))
    for key, x in buffers.items():
        np.testing.assert_array_equal(x, before[key])


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("slot_mapping", np.zeros((2, 1), np.int64), r"got int64 of shape \(2, 1\), expected it as the graph's is"),
        ("slot_mapping", np.zeros(2), r"got float64 of shape \(2,\), expected it as the graph's is"),
        ("seq_lens_tensor", np.ones(2, bool), r"got bool of shape \(2,\)"),
        ("block_tables", np.zeros(2, np.int32), r"got int32 of shape \(2,\)"),
        ("block_tables", np.zeros((2, 8)), r"got float64 of shape \(2, 8\)"),
    ],
)
def test_wrong_decodes_for_a_graph(name, wrong, text):
    state = MLACommonState(CONFIG)
    with state.graph_capture(3, LIKE):
        buffers = state.get_graph_input_buffers(state.graph_capture_get_metadata_for_batch(3))
    before = {key: x.copy() for key, x in buffers.items()}
    with pytest.raises(ValueError, match=f"^{name}: {text}"):
        state.prepare_graph_input_buffers(buffers, dataclasses.replace(decodes(), **{name: wrong}))
    for key, x in buffers.items():
        np.testing.assert_array_equal(x, before[key])


def test_no_buffers_of_a_graph():
    state = MLACommonState(CONFIG)
    for buffers, metadata, text in (
        (None, decodes(), "input_buffers: got None"), ({}, decodes(), "input_buffers: got none named slot_mapping"),
        ({}, None, "attn_metadata: got None"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=text):
            state.prepare_graph_input_buffers(buffers, metadata)


RIGHT = {
    "is_prompt": True, "seq_ids": [0], "orig_seq_lens": [5], "query_lens": [5], "context_lens": [0],
    "block_tables": {0: [3]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"is_prompt": "no"}, "is_prompt: got 'no'"), ({"orig_seq_lens": None}, "orig_seq_lens: got None"),
        ({"orig_seq_lens": [-5], "query_lens": [-5]}, "orig_seq_lens: got -5"),
        ({"orig_seq_lens": [5.5], "query_lens": [5.5]}, "orig_seq_lens: got 5.5"),
        ({"orig_seq_lens": [2**40], "query_lens": [2**40]}, "orig_seq_lens: got 1099511627776"),
        ({"seq_lens": [None]}, "seq_lens: got None"), ({"curr_sliding_window_blocks": [-1]}, "blocks: got -1"),
        ({"block_tables": {0: [2**40]}}, r"block_tables: got \[1099511627776\]"),
        ({"block_tables": {0: [3, -(2**40)]}}, r"block_tables: got \[3, -1099511627776\]"),
        ({"block_tables": {0: [3.7]}}, r"block_tables: got \[3.7\], expected integers"),
        ({"block_tables": {0: None}}, "block_tables: got None"), ({"block_tables": {0: [[3]]}}, "block_tables: got"),
    ],
)  # fmt: skip
def test_wrong_groups(changes, text):
    with pytest.raises((TypeError, ValueError), match=text):
        built(SequenceGroup(**RIGHT | changes))


def built(group):
    builder = MLACommonMetadataBuilder(CONFIG)
    builder.add_seq_group(group)
    return builder.build_groups(LIKE)


def test_no_group():
    builder = MLACommonMetadataBuilder(CONFIG)
    with pytest.raises(TypeError, match="group: got None"):
        builder.add_seq_group(None)
    for pad in (-2, None, True, 1.5):
        with pytest.raises((TypeError, ValueError), match="cuda_graph_pad_size: got"):
            builder.build_groups(LIKE, pad)


def test_small_numpy_integers_of_a_group():
    small = {name: np.array(RIGHT[name], np.uint8) for name in ("orig_seq_lens", "query_lens", "context_lens")}
    metadata, grouped = built(SequenceGroup(**RIGHT | small | {"seq_lens": np.array([5], np.int8)}))
    assert grouped.slot_mapping.tolist() == [3 * BLOCK + i for i in range(5)]
    assert metadata.seq_lens == [5]


@pytest.mark.parametrize("block", [-(2**31), 2**31 - 1])
def test_blocks_are_any_that_int32_holds(block):
    """Slots of the largest overflow it."""
    metadata, grouped = built(SequenceGroup(**RIGHT | {"block_tables": {0: [block]}}))
    assert metadata.block_tables.tolist() == [[block]]
    assert grouped.slot_mapping.tolist() == [block * BLOCK + i for i in range(5)]
