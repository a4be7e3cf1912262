"""Dense MLA metadata: views, context chunks, sequence groups, graphs and advancing, against counting by hand."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.metadata import (
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonState,
    MLAConfig,
    SequenceGroup,
)
from cumla.metadata.batch import CommonAttentionMetadata
from cumla.metadata.mla_builder import send_together
from cumla.metadata.mla_context import cut_context
from metadata.batches import BLOCK, THOROUGH, assert_equal, make_batch, shapes
from support.backends import only
from support.lab import Lab

CONFIG = {"block_size": BLOCK, "max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 256}


def builder_of(lab, **changes):
    return MLACommonMetadataBuilder(MLAConfig(**(CONFIG | changes)), backend=lab.backend)


# ---- views


def test_a_mixed_batch_in_two_views(lab):
    batch = make_batch(lab, [9, 4, 30, 12], [1, 1, 5, 12], padding=3)
    metadata = builder_of(lab).build(0, batch)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 2)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (2, 17)
    assert metadata.seq_lens == [9, 4, 30, 12]
    assert (metadata.max_decode_seq_len, metadata.max_prefill_seq_len) == (9, 30)
    assert (metadata.max_query_len, metadata.max_decode_query_len) == (12, 1)
    assert_equal(lab, metadata.context_lens_tensor, [8, 3, 25, 0])
    assert_equal(lab, metadata.seq_start_loc, [0, 9, 13, 43, 55])

    prefills, decodes = metadata.prefill_metadata, metadata.decode_metadata
    assert_equal(lab, prefills.query_start_loc, [0, 5, 17])
    assert_equal(lab, prefills.seq_lens_tensor, [30, 12])
    assert_equal(lab, prefills.context_lens_tensor, [25, 0])
    assert_equal(lab, prefills.slot_mapping, np.asarray(lab.get(batch.slot_mapping))[2:])
    assert_equal(lab, prefills.block_tables, np.asarray(lab.get(batch.block_table_tensor))[2:])
    assert prefills.decode_metadata is None
    assert prefills.context_chunk_seq_tot == [25]
    assert_equal(lab, decodes.query_start_loc, [0, 1, 2])
    assert_equal(lab, decodes.seq_lens_tensor, [9, 4])
    assert_equal(lab, decodes.context_lens_tensor, [8, 3])
    assert (decodes.max_query_len, prefills.max_query_len) == (1, 12)
    assert len(decodes.slot_mapping) == 2
    assert decodes.prefill_metadata is None
    assert decodes.context_chunk_cu_seq_lens is None
    assert metadata.prefill_metadata is prefills
    assert metadata.decode_metadata is decodes


def test_batches_of_one_kind(lab):
    builder = builder_of(lab)
    decodes = builder.build(0, make_batch(lab, [9, 4], [1, 1]))
    assert decodes.prefill_metadata is None
    assert decodes.context_chunk_starts is None, "the context of decodes needs no workspace"
    prefills = builder.build(0, make_batch(lab, [9, 4], [9, 4]))
    assert prefills.decode_metadata is None
    assert prefills.context_chunk_seq_tot is None
    assert_equal(lab, prefills.prefill_metadata.query_start_loc, [0, 9, 13])


def test_decodes_are_of_one_length(lab):
    metadata = builder_of(lab, num_speculative_tokens=2).build(0, make_batch(lab, [9, 8, 7, 30], [3, 3, 2, 30]))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 6)
    assert metadata.prefill_metadata.num_prefills == 2, "a decode of another length is a prefill with context"
    assert metadata.context_chunk_seq_tot == [5]


def test_the_only_head_size_is_576(lab):
    assert MLACommonBackend.get_supported_head_sizes() == [576]
    fields = dict.fromkeys(("slot_mapping", "seq_lens", "seq_lens_tensor", "context_lens_tensor"))
    counts = dict.fromkeys(
        ("num_prefills", "num_prefill_tokens", "num_decode_tokens", "max_prefill_seq_len", "max_decode_seq_len"), 0
    )
    for head_dim in (None, 576):
        assert MLACommonMetadata(**counts, **fields, block_tables=None, head_dim=head_dim).head_dim == head_dim
    with pytest.raises(ValueError, match="head_dim: got 512, expected one of 576"):
        MLACommonMetadata(**counts, **fields, block_tables=None, head_dim=512)
    with pytest.raises(ValueError, match="head_size: got 512"):
        MLAConfig(head_size=512)
    with pytest.raises(ValueError, match="dtype: got 'float32', expected 'bfloat16' or 'float16'"):
        MLAConfig(dtype="float32")


# ---- context chunks


@THOROUGH
@given(
    contexts=st.lists(st.integers(0, 200), min_size=1, max_size=20),
    page=st.integers(1, 16),
    spare=st.integers(0, 300),
)
def test_every_context_token_is_in_one_chunk(contexts, page, spare):
    workspace = page * max(sum(c > 0 for c in contexts), 1) + spare
    chunks = cut_context(np.array(contexts), workspace, page)
    if not any(contexts):
        assert chunks is None
        return
    seen = [[] for _ in contexts]
    for starts, cu, total, longest in zip(*chunks, strict=True):
        lens = np.diff(cu)
        assert total == lens.sum() == cu[-1] <= workspace
        assert longest == lens.max() > 0, "no chunk is empty"
        for r, (start, count) in enumerate(zip(starts, lens, strict=True)):
            assert start % page == 0
            seen[r].extend(range(start, start + count))
    assert seen == [list(range(c)) for c in contexts]


def test_a_chunk_can_fill_the_workspace():
    chunks = cut_context(np.array([64, 0, 32]), 64, 8)
    assert chunks.seq_tot == [64, 32]
    assert chunks.max_seq_lens == [32, 32]
    np.testing.assert_array_equal(chunks.starts, [[0, 0, 0], [32, 32, 32]])
    np.testing.assert_array_equal(chunks.cu_seq_lens, [[0, 32, 32, 64], [0, 32, 32, 32]])


def test_too_small_a_workspace_is_an_error():
    with pytest.raises(ValueError, match="workspace_size: got 23 tokens, expected at least 24"):
        cut_context(np.array([5, 0, 5, 5]), 23, 8)


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_context_with_either_kind_of_caching(lab, flags):
    """A prefix hit without chunked prefill has context as well."""
    chunked, prefix = flags
    builder = builder_of(lab, chunked_prefill_enabled=chunked, enable_prefix_caching=prefix)
    metadata = builder.build(0, make_batch(lab, [100, 40, 20], [20, 40, 10]))
    assert metadata.context_chunk_seq_tot == [90]
    assert_equal(lab, metadata.context_chunk_starts, [[0, 0, 0]])
    assert_equal(lab, metadata.context_chunk_cu_seq_lens, [[0, 80, 80, 90]])


def test_context_that_cannot_be_is_an_error(lab):
    builder = builder_of(lab, chunked_prefill_enabled=False, enable_prefix_caching=False)
    builder.build(0, make_batch(lab, [9, 30], [1, 30]))
    with pytest.raises(ValueError, match="seq_lens_cpu: request 1 has 10 tokens in the cache"):
        builder.build(0, make_batch(lab, [9, 30], [1, 20]))


@THOROUGH
@given(shape=shapes(threshold=1))
def test_a_long_decode_adds_no_chunks(shape):
    lab = SimpleNamespace(backend="reference", put=lambda x: x, get=lambda x: x)
    batch = make_batch(lab, *shape)
    metadata = builder_of(lab).build(0, batch)
    contexts = (np.array(shape[0]) - np.array(shape[1]))[metadata.num_decodes :]
    assert sum(metadata.context_chunk_seq_tot or []) == contexts.sum()
    assert metadata.num_decode_tokens + metadata.num_prefill_tokens == sum(shape[1])


# ---- sequence groups


def group(is_prompt, lengths, contexts, blocks, **changes):
    ids = list(range(100, 100 + len(lengths)))
    queries = [n - c for n, c in zip(lengths, contexts, strict=True)]
    tables = None if blocks is None else dict(zip(ids, blocks, strict=True))
    return SequenceGroup(is_prompt, ids, lengths, queries, contexts, tables, **changes)


def test_prompts_before_decodes_are_reordered(lab):
    builder = builder_of(lab)
    builder.add_seq_group(group(True, [10], [8], [[4, 5]]))
    builder.add_seq_group(group(False, [5, 17], [4, 16], [[7], [1, 2, 3]]))
    metadata, grouped = builder.build_groups(lab.put(np.zeros(1, np.int32)))
    assert grouped.request_order.tolist() == [1, 2, 0]
    assert grouped.token_order.tolist() == [2, 3, 0, 1]
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.seq_lens == [5, 17, 10]
    assert_equal(lab, metadata.slot_mapping, [7 * BLOCK + 4, 3 * BLOCK, 5 * BLOCK, 5 * BLOCK + 1])
    assert_equal(lab, metadata.block_tables, [[7, -1, -1], [1, 2, 3], [4, 5, -1]])
    assert metadata.context_chunk_seq_tot == [8]
    builder.prepare()
    builder.add_seq_group(group(False, [1], [0], [[0]]))
    assert builder.build_groups(lab.put(np.zeros(1, np.int32)))[0].num_decodes == 1


def test_a_sliding_window_skips_slots_of_a_prompt(lab):
    builder = builder_of(lab, sliding_window=4)
    builder.add_seq_group(group(True, [10], [0], [[4, 5]]))
    builder.add_seq_group(group(False, [20], [19], [[1, 2, 9]], seq_lens=[12], curr_sliding_window_blocks=[2]))
    metadata, _ = builder.build_groups(lab.put(np.zeros(1, np.int32)))
    wanted = [9 * BLOCK + 3] + [-1] * 6 + [4 * BLOCK + 6, 4 * BLOCK + 7, 5 * BLOCK, 5 * BLOCK + 1]
    assert_equal(lab, metadata.slot_mapping, wanted)
    assert_equal(lab, metadata.block_tables, [[2, 9], [4, 5]])
    assert metadata.seq_lens == [12, 10]


def test_groups_padded_to_a_captured_size(lab):
    builder = builder_of(lab)
    builder.add_seq_group(group(False, [5, 9], [4, 8], [[7], [1, 2]]))
    metadata, _ = builder.build_groups(lab.put(np.zeros(1, np.int32)), cuda_graph_pad_size=2)
    assert metadata.use_cuda_graph
    assert not metadata.is_profile_run
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (4, 2, 0)
    assert_equal(lab, metadata.slot_mapping, [7 * BLOCK + 4, 2 * BLOCK, -1, -1])
    assert metadata.seq_lens == [5, 9, 0, 0]


def test_a_profile_run_has_no_blocks(lab):
    builder = builder_of(lab)
    builder.add_seq_group(group(True, [10], [0], None))
    metadata, _ = builder.build_groups(lab.put(np.zeros(1, np.int32)), is_profile_run=True)
    assert metadata.is_profile_run
    assert not metadata.use_cuda_graph
    assert_equal(lab, metadata.slot_mapping, [-1] * 10)


def test_wrong_groups_are_errors():
    with pytest.raises(ValueError, match="query_lens: got 3 for sequence 7, expected 2"):
        SequenceGroup(True, [7], [10], [3], [8], {7: [1, 2]})
    with pytest.raises(ValueError, match="block_tables: got no blocks for sequence 7"):
        SequenceGroup(True, [7], [10], [2], [8], {8: [1, 2]})
    with pytest.raises(ValueError, match="context_lens: got 2 entries, expected 1"):
        SequenceGroup(True, [7], [10], [2], [8, 9], {7: [1, 2]})


# ---- state


def test_workspace_size():
    def size(**numbers):
        return MLAConfig(**numbers).context_chunk_workspace_size

    assert size(max_model_len=1000, max_num_seqs=4, block_size=64) == 8000
    assert size(max_model_len=100, max_num_seqs=16, block_size=64) == 4 * 16 * 64
    assert size(max_model_len=1 << 20, max_num_seqs=256, block_size=64) == 128 * 1024
    with pytest.raises(ValueError, match="max_num_seqs: got 4096 requests with pages of 64"):
        size(max_num_seqs=4096, block_size=64)
    config = MLAConfig(chunked_prefill_enabled=False, enable_prefix_caching=False)
    assert MLACommonState(config).context_chunk_workspace_size == 0


def test_begin_forward_allocates_once(lab):
    state = MLACommonState(MLAConfig(**CONFIG))
    steps = [SimpleNamespace(input_tokens=lab.put(np.zeros(1)), attn_metadata=SimpleNamespace()) for _ in range(2)]
    for step in steps:
        state.begin_forward(step)
    first, second = (step.attn_metadata.context_chunk_workspace for step in steps)
    assert first is second
    assert first.shape == (8 * 256, 576)
    assert first.dtype == "bfloat16"


def test_the_longest_sequence_of_a_graph(lab):
    like = lab.put(np.zeros(1, np.int32))
    for longest, want in ((40, 40), (None, 256)):  # max_model_len
        state = MLACommonState(MLAConfig(**CONFIG, max_seq_len_to_capture=longest))
        with state.graph_capture(8, like):
            assert state.graph_capture_get_metadata_for_batch(4).max_decode_seq_len == want


def test_graph_buffers_take_a_smaller_batch(lab):
    state, like = MLACommonState(MLAConfig(**CONFIG)), lab.put(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="graph_capture: not entered"):
        state.graph_capture_get_metadata_for_batch(4)
    with state.graph_capture(8, like):
        captured = state.graph_capture_get_metadata_for_batch(4)
        assert state.graph_clone(4) is not state
        with pytest.raises(ValueError, match="batch_size: got 9, expected at most 8"):
            state.graph_capture_get_metadata_for_batch(9)
        with pytest.raises(ValueError, match="is_encoder_decoder_model"):
            state.graph_capture_get_metadata_for_batch(4, True)
    assert captured.use_cuda_graph
    assert captured.max_decode_seq_len == 256
    assert_equal(lab, captured.slot_mapping, [-1] * 4)
    assert_equal(lab, captured.seq_lens_tensor, [1] * 4)
    buffers = state.get_graph_input_buffers(captured)
    assert buffers["block_tables"].shape == (4, 256 // BLOCK)

    batch = make_batch(lab, [9, 20, 3], [1, 1, 1], columns=40)
    metadata = builder_of(lab, max_model_len=320).build(0, batch)
    state.prepare_graph_input_buffers(buffers, metadata)
    assert_equal(lab, captured.seq_lens_tensor, [9, 20, 3, 0])
    assert_equal(lab, captured.slot_mapping, [*np.asarray(lab.get(batch.slot_mapping)), -1])
    table = np.asarray(lab.get(batch.block_table_tensor))[:, : 256 // BLOCK]
    assert_equal(lab, captured.block_tables, np.concatenate([table, np.zeros_like(table[:1])]))

    larger = builder_of(lab).build(0, make_batch(lab, [9] * 5, [1] * 5))
    with pytest.raises(ValueError, match="slot_mapping: got 5 requests, expected at most the graph's 4"):
        state.prepare_graph_input_buffers(buffers, larger)
    longer = builder_of(lab, max_model_len=320).build(0, make_batch(lab, [9, 257], [1, 1]))
    with pytest.raises(ValueError, match=r"input_buffers\['block_tables'\]: got 32 columns, pages of 8 .* least 33"):
        state.prepare_graph_input_buffers(buffers, longer)
    assert_equal(lab, captured.seq_lens_tensor, [9, 20, 3, 0])
    mixed = builder_of(lab).build(0, make_batch(lab, [9, 5], [1, 5]))
    with pytest.raises(ValueError, match="got 1 prefills, expected decodes only"):
        state.prepare_graph_input_buffers(buffers, mixed)


# ---- advancing


def test_prefills_turn_into_decodes_and_advance(lab):
    table = np.array([[3, 4], [5, 6], [1, 2], [0, 7]], np.int32)
    starts = np.array([0, 1, 2, 7, 7], np.int32)
    lens = np.array([8, 5, 9, 0], np.int32)
    slots = np.full(7, -1, np.int64)
    batch = CommonAttentionMetadata(
        lab.put(starts), starts, lab.put(lens), lens, lens - np.diff(starts), 4, 7, 5, lab.put(table),
        lab.put(slots),
    )  # fmt: skip
    metadata = builder_of(lab).build(0, batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    step = SimpleNamespace(input_tokens=lab.put(np.zeros(4, np.int64)), input_positions=lab.put(np.zeros(4, np.int64)))
    views = metadata.decode_metadata, metadata.prefill_metadata
    sampled = lab.put(np.array([[11], [12], [13]], np.int64))
    with only(lab.backend):
        metadata.advance_step(step, sampled, BLOCK, 4, 3, turn_prefills_into_decodes=True, backend=lab.backend)
    assert metadata.prefill_metadata is None
    assert metadata.decode_metadata not in views
    assert metadata.decode_metadata.num_decode_tokens == 4
    assert metadata.seq_lens == [9, 6, 10, 0]
    assert metadata.max_decode_seq_len == 10
    assert_equal(lab, metadata.seq_lens_tensor, [9, 6, 10, 0])
    assert_equal(lab, metadata.context_lens_tensor, [8, 5, 9, 0])
    assert_equal(lab, metadata.seq_start_loc, [0, 9, 15, 25, 25])
    assert_equal(lab, metadata.query_start_loc, [0, 1, 2, 3, 4])
    assert_equal(lab, metadata.slot_mapping, [4 * BLOCK, 5 * BLOCK + 5, 2 * BLOCK + 1, -1])
    assert_equal(lab, step.input_tokens, [11, 12, 13, 0])
    assert_equal(lab, step.input_positions, [8, 5, 9, 0])

    metadata.advance_step(step, sampled, BLOCK, 4, 3, backend=lab.backend)
    assert metadata.seq_lens == [10, 7, 11, 0]
    assert_equal(lab, metadata.slot_mapping, [4 * BLOCK + 1, 5 * BLOCK + 6, 2 * BLOCK + 2, -1])


def test_advancing_what_is_no_decode_is_an_error(lab):
    metadata = builder_of(lab).build(0, make_batch(lab, [9, 5], [1, 5]))
    step = SimpleNamespace(input_tokens=None, input_positions=None)
    with pytest.raises(ValueError, match="num_prefills: got 1 prefills"):
        metadata.advance_step(step, None, BLOCK, 2, 2)
    with pytest.raises(ValueError, match="num_seqs: got 3, expected 2"):
        metadata.advance_step(step, None, BLOCK, 3, 2, turn_prefills_into_decodes=True)
    with pytest.raises(ValueError, match="num_seqs: got 1, expected at least num_queries = 2"):
        metadata.advance_step(step, None, BLOCK, 1, 2)


def test_metadata_of_a_captured_graph_advances(lab):
    """Such metadata has neither host lengths nor contexts."""
    config = MLAConfig(**CONFIG)
    state = MLACommonState(config)
    with state.graph_capture(3, lab.put(np.zeros(1, np.int32))):
        metadata = state.graph_capture_get_metadata_for_batch(3)
    state.prepare_graph_input_buffers(
        state.get_graph_input_buffers(metadata), builder_of(lab).build(0, make_batch(lab, [9, 5], [1, 1]))
    )
    step = SimpleNamespace(input_tokens=lab.put(np.zeros(3, np.int64)), input_positions=lab.put(np.zeros(3, np.int64)))
    longest = metadata.max_decode_seq_len
    with pytest.raises(ValueError, match="num_seqs: got 2, expected 3, the requests of this metadata"):
        metadata.advance_step(step, lab.put(np.array([7, 8])), BLOCK, 2, 2, backend=lab.backend)
    metadata.advance_step(step, lab.put(np.array([7, 8])), BLOCK, 3, 2, backend=lab.backend)
    assert_equal(lab, metadata.seq_lens_tensor, [10, 6, 0])
    assert_equal(lab, step.input_tokens, [7, 8, 0])
    assert metadata.seq_lens is metadata.context_lens_tensor is None
    assert metadata.max_decode_seq_len == longest


def test_advancing_writes_nothing_before_it_fails():
    """Fields that the lengths determine have wrong values."""
    host = Lab("reference", on_device=False)

    for wrong, error in (
        ({"context_lens_tensor": np.zeros(2, np.int64)}, TypeError),
        ({"context_lens_tensor": np.frombuffer(bytes(8), np.int32)}, ValueError),  # read-only
        ({"seq_start_loc": np.zeros(2, np.int32)}, ValueError),
        ({"seq_lens_tensor": np.zeros(3, np.int32)}, ValueError),
        ({"seq_lens": [2**31 - 5, 4]}, ValueError),
        ({"block_tables": np.zeros((2, 1), np.int32)}, ValueError),
    ):
        metadata = dataclasses.replace(builder_of(host).build(0, make_batch(host, [9, 5], [1, 1])), **wrong)
        step = SimpleNamespace(input_tokens=np.full(2, -1), input_positions=np.full(2, -1))
        before = fields_of(metadata)
        with pytest.raises(error, match=f"^{'seq_start_loc' if 'seq_lens' in wrong else next(iter(wrong))}: got"):
            metadata.advance_step(step, np.array([1, 2]), BLOCK, 2, 2)
        assert (step.input_tokens == -1).all()
        assert (step.input_positions == -1).all()
        for value, was in zip(fields_of(metadata), before, strict=True):
            np.testing.assert_array_equal(value, was)


def fields_of(metadata):
    fields = [field.name for field in dataclasses.fields(metadata) if field.init and field.name != "decode_plan"]
    return [copy.copy(getattr(metadata, name)) for name in fields]


def test_starts_of_sequences(lab):
    """Offsets of the prefills are counted from the first of them; beyond int32 they are int64."""
    metadata = builder_of(lab).build(0, make_batch(lab, [9, 40, 20], [1, 30, 20]))
    assert_equal(lab, metadata.seq_start_loc, [0, 9, 49, 69])
    assert_equal(lab, metadata.prefill_metadata.seq_start_loc, [0, 40, 60])
    assert_equal(lab, metadata.decode_metadata.seq_start_loc, [0, 9])
    batch, long = make_batch(lab, [9, 40], [1, 0]), np.array([2**31 - 2, 2**31 - 1], np.int32)
    batch = dataclasses.replace(batch, seq_lens=lab.put(long), seq_lens_cpu=long, max_seq_len=2**31 - 1)
    metadata = builder_of(lab, max_model_len=2**31 - 1).build(0, batch, validate=False)
    assert_equal(lab, metadata.seq_start_loc, [0, 2**31 - 2, 2**32 - 3])
    assert_equal(lab, metadata.context_lens_tensor, long - [1, 0])
    assert lab.get(metadata.context_lens_tensor).dtype == np.int32
    parts = send_together([np.array([2**31 - 1]), np.array([2**31])], lab.put(np.zeros(1)))
    assert [lab.get(part).dtype for part in parts] == [np.int32, np.int64]


# ---- backend


def test_backend_names_its_classes():
    assert MLACommonBackend.get_name() == "TRITON_MLA"
    assert MLACommonBackend.get_metadata_cls() is MLACommonMetadata
    assert MLACommonBackend.get_builder_cls() is MLACommonMetadataBuilder
    assert MLACommonBackend.get_state_cls() is MLACommonState
    assert MLACommonBackend.get_kv_cache_shape(3, 64, 1, 576) == (3, 64, 576)
    with pytest.raises(ValueError, match="num_kv_heads: got 2"):
        MLACommonBackend.get_kv_cache_shape(3, 64, 2, 576)


def test_backend_copies_blocks(lab):
    host = np.arange(4 * 2 * 576, dtype=np.float32).reshape(4, 2, 576)
    cache, other = lab.put(host.copy()), lab.put(np.zeros_like(host))
    MLACommonBackend.copy_blocks([cache], np.array([[0, 3]]))
    assert_equal(lab, cache[3], host[0])
    MLACommonBackend.swap_blocks(cache, other, np.array([[1, 2]]))
    assert_equal(lab, other[2], host[1])


def test_a_backend_makes_its_metadata():
    """The method has the name that vLLM's builder calls."""
    fields = {
        "num_prefills": 0, "num_prefill_tokens": 0, "num_decodes": 2, "num_decode_tokens": 2, "max_prefill_seq_len": 0,
        "max_decode_seq_len": 4, "slot_mapping": np.arange(2), "seq_lens": [3, 4], "seq_lens_tensor": np.int32([3, 4]),
        "context_lens_tensor": np.int32([2, 3]), "block_tables": np.zeros((2, 1), np.int32),
    }  # fmt: skip
    made = MLACommonBackend.make_metadata(**fields, head_dim=576)
    assert type(made) is MLACommonMetadata is MLACommonBackend.get_metadata_cls()
    assert all(getattr(made, name) is value for name, value in fields.items())
    with pytest.raises(ValueError, match="head_dim: got 512"):
        MLACommonBackend.make_metadata(**fields, head_dim=512)
