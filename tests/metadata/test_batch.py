"""Batches: their split and order, and the parts in a chunk or on a rank."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emulation
from cumla.arrays import streams
from cumla.metadata import (
    DeepseekSparseSWAMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
    vllm_helpers,
)
from cumla.metadata.batch import (
    CommonAttentionMetadata,
    get_dcp_local_seq_lens,
    split_decodes_and_prefills,
)
from cumla.metadata.vllm_helpers import (
    PerLayerParameters,
    get_kv_cache_layout,
    get_per_layer_parameters,
    infer_global_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    set_kv_cache_layout,
)
from metadata.batches import THOROUGH, shapes, tokens_of
from support import golden
from support.lab import Lab


def batch_of(query_lens, seq_lens=None, **changes):
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(query_lens if seq_lens is None else seq_lens, np.int32)
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "seq_lens_cpu": lens,
        "num_computed_tokens_cpu": lens - np.diff(starts),
        "num_reqs": len(lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": int(np.max(query_lens, initial=0)),
        "block_table_tensor": np.zeros((len(lens), 1), np.int32),
        "slot_mapping": np.arange(starts[-1] + 2),
    }
    return CommonAttentionMetadata(**(fields | changes))


FRAMEWORKS = ("numpy", "torch", "jax")


def as_array(framework, array):
    if framework == "numpy":
        return array
    module = pytest.importorskip(framework)
    return module.from_numpy(array) if framework == "torch" else module.numpy.asarray(array)


def by_hand(seq_lens, query_lens, table, block_size, put=np.asarray):
    """The constructor's arguments, token by token."""
    slots = [table[r, p // block_size] * block_size + p % block_size for r, p in tokens_of(seq_lens, query_lens)]
    fields = vars(batch_of(query_lens, seq_lens)) | {"block_table_tensor": table, "slot_mapping": np.int64(slots)}
    fields["block_size"] = block_size
    arrays = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    return fields | {name: put(fields[name]) for name in arrays}


def assert_fields(batch, want, get=np.asarray):
    assert {field.name for field in dataclasses.fields(batch)} == set(want)
    for name, value in want.items():
        got = getattr(batch, name)
        if isinstance(value, int):
            assert (type(got), got) == (int, value), name
            continue
        assert type(got) is type(value), name
        assert got.dtype == value.dtype, name
        np.testing.assert_array_equal(get(got), get(value), err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@THOROUGH
@given(shape=shapes(threshold=2), block_size=st.integers(1, 9), data=st.data())
def test_from_lengths_is_the_constructor(framework, shape, block_size, data):
    seq_lens, query_lens = shape
    columns = -(-max(seq_lens, default=0) // block_size) + data.draw(st.integers(0, 2))
    table = np.random.default_rng(columns).permutation(len(seq_lens) * columns).astype(np.int32)
    table = table.reshape(len(seq_lens), columns)
    kind = data.draw(st.sampled_from([list, tuple, np.int32, np.int64, np.uint8, np.uint64]))
    given_table = as_array(framework, table)
    batch = CommonAttentionMetadata.from_lengths(
        *(kind(lens) for lens in (query_lens, seq_lens)), given_table, block_size, backend="reference"
    )
    assert batch.block_table_tensor is given_table
    assert_fields(batch, by_hand(seq_lens, query_lens, table, block_size, lambda x: as_array(framework, x)))


def test_from_lengths_on_a_backend(lab):
    """A block table in the kernels' memory; and one in host memory, which is copied there."""
    query_lens, seq_lens, table = (
        [1, 2, 30, 0],
        [40, 2, 33, 0],
        np.arange(19, -1, -1, np.int32).reshape(4, 5),
    )
    want = by_hand(seq_lens, query_lens, table, 9, lab.put)
    for given_table, xp in ((lab.put(table), None), (lab.put(table), lab.xp), (table, lab.xp)):
        batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, given_table, 9, xp, backend=lab.backend)
        assert_fields(batch, want, lab.get)


def test_lengths_are_copied():
    """An engine that counts its lengths up in lab leaves the batch as it was."""
    query_lens, seq_lens = np.array([1, 3], np.int32), np.array([5, 3], np.int32)
    batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, np.zeros((2, 1), np.int32), 8)
    seq_lens += 1
    query_lens[:] = 1
    assert (batch.seq_lens.tolist(), batch.seq_lens_cpu.tolist()) == ([5, 3], [5, 3])
    assert batch.num_computed_tokens_cpu.tolist() == [4, 0]


def test_from_lengths_takes_torch_into_numpy():
    table = pytest.importorskip("torch").from_numpy(np.array([[1, 0]], np.int32))
    batch = CommonAttentionMetadata.from_lengths([2], [5], table, 3, np)
    assert type(batch.block_table_tensor) is type(batch.slot_mapping) is np.ndarray
    assert batch.slot_mapping.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query_lens": [1]}, ValueError, "query_lens, seq_lens: got 1 and 2 entries, expected equal numbers"),
        ({"query_lens": [1, 8]}, ValueError, "seq_lens: request 1 has 7 tokens and a query of 8, expected a query"),
        ({"query_lens": [-1, 3]}, ValueError, "query_lens: request 0 has -1 tokens, expected at least 0"),
        ({"seq_lens": [5, -7]}, ValueError, "seq_lens: request 1 has -7 tokens, expected at least 0"),
        ({"query_lens": [1.0, 3.0]}, TypeError, "query_lens: got dtype float64, expected integers"),
        ({"query_lens": [True, True]}, TypeError, "query_lens: got dtype bool, expected integers"),
        ({"query_lens": "ab"}, TypeError, "query_lens: got dtype <U2, expected integers"),
        ({"query_lens": 3}, TypeError, "query_lens: got int, expected an array"),
        ({"query_lens": [[1, 3]]}, ValueError, r"query_lens: got shape \(1, 2\), expected one axis"),
        (
            {"query_lens": [[1], [3, 4]]},
            ValueError,
            "query_lens: got a sequence of sequences, expected one of integers",
        ),
        ({"seq_lens": [5, 2**31]}, ValueError, f"seq_lens: got {2**31} tokens, expected at most {2**31 - 1}"),
        (
            {"query_lens": [2**30] * 2, "seq_lens": [2**30] * 2},
            ValueError,
            f"query_lens: got {2**31} tokens, expected at most {2**31 - 1}",
        ),
        (
            {"block_table": np.zeros((3, 2), np.int32)},
            ValueError,
            r"block_table: got shape \(3, 2\), expected \[2, any\]",
        ),
        ({"block_table": np.zeros((2, 2))}, TypeError, "block_table: got dtype float64, expected int32"),
        ({"block_table": [[0], [1]]}, TypeError, "block_table: got list, expected an array"),
        (
            {"seq_lens": [5, 9]},
            ValueError,
            "block_table: request 1 has 9 tokens, but 2 columns of 4 cover 8, expected at least 3 columns",
        ),
        ({"block_size": 0}, ValueError, "block_size: got 0, expected at least 1"),
        ({"block_size": 4.0}, TypeError, "block_size: got 4.0 of type float, expected an integer"),
        ({"xp": "numpy"}, TypeError, "xp: got str, expected the module numpy or cupy, or None"),
        ({"xp": types}, TypeError, "xp: got types, expected the module numpy or cupy, or None"),
    ],
)
def test_from_lengths_names_what_does_not_fit(changes, error, message):
    arguments = {
        "query_lens": [1, 3],
        "seq_lens": [5, 7],
        "block_table": np.zeros((2, 2), np.int32),
        "block_size": 4,
    }
    with pytest.raises(error, match=message):
        CommonAttentionMetadata.from_lengths(**(arguments | changes))


@pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))
def test_from_lengths_reads_nothing_back():
    with emulation.devices():
        put = Lab("cuda", on_device=True, emulated=True).put
        table = np.zeros((1, 1), np.int32)
        with pytest.raises(ValueError, match="xp: got numpy for a block table on CUDA device 0, expected cupy or None"):
            CommonAttentionMetadata.from_lengths([1], [1], put(table), 4, np)
        with pytest.raises(ValueError, match="seq_lens: got an array on CUDA device 0, expected one in host memory"):
            CommonAttentionMetadata.from_lengths([1], put(np.ones(1, np.int32)), table, 4)


@pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))
@pytest.mark.parametrize("on_device", [False, True])
def test_from_lengths_is_refused_in_a_capture(monkeypatch, on_device):
    """A replayed graph would use the lengths of its capture."""
    with emulation.devices():
        import cupy

        table = np.zeros((1, 1), np.int32)
        table = cupy.array(table) if on_device else table
        monkeypatch.setattr(streams, "is_capturing", lambda *_: True)
        with pytest.raises(ValueError, match="from_lengths: got a call while a CUDA graph is being captured"):
            CommonAttentionMetadata.from_lengths([1], [1], table, 4, cupy)
    assert CommonAttentionMetadata.from_lengths([1], [1], np.zeros((1, 1), np.int32), 4).num_reqs == 1


def test_max_seq_len_is_taken_from_the_lengths():
    assert batch_of([1, 2], [9, 4]).max_seq_len == 9
    assert batch_of([]).max_seq_len == 0
    assert batch_of([1], [9], max_seq_len=20).max_seq_len == 20


@pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))
def test_host_numbers_on_a_device_are_an_error():
    """Reading them would wait for the device."""
    with emulation.devices():
        put = Lab("cuda", on_device=True, emulated=True).put
        for name in ("seq_lens_cpu", "query_start_loc_cpu"):
            batch = batch_of([1, 2], [9, 4], max_seq_len=9)
            batch = dataclasses.replace(batch, **{name: put(getattr(batch, name))})
            with pytest.raises(ValueError, match=f"{name}: got an array on CUDA device 0, expected one in host memory"):
                split_decodes_and_prefills(batch)


def test_padding_of_the_slot_mapping():
    batch = batch_of([1, 2])
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4]  # constructing it changes nothing
    batch.pad_slot_mapping()
    assert batch.slot_mapping.tolist() == [0, 1, 2, -1, -1]


@pytest.mark.parametrize("case", golden.metadata("split_decodes_and_prefills"))
def test_golden_split(case):
    given_, want = case
    query_lens = np.diff(given_["query_start_loc"])
    threshold = given_["decode_threshold"]
    assert list(split_decodes_and_prefills(batch_of(query_lens), threshold)) == want["result"]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "want"),
    [
        ([], 1, False, (0, 0, 0, 0)),
        ([], 2, True, (0, 0, 0, 0)),
        ([1, 1, 5], 1, False, (2, 1, 2, 5)),
        ([1, 0, 5, 0, 0], 1, False, (2, 3, 1, 5)),
        ([5, 6], 1, False, (0, 2, 0, 11)),
        ([5, 6], 2, True, (0, 2, 0, 11)),
        ([2, 2, 1, 5], 2, False, (3, 1, 5, 5)),
        ([2, 2, 1, 5], 2, True, (2, 2, 4, 6)),
        ([2, 2, 1], 2, True, (2, 1, 4, 1)),
        ([2, 2, 0, 0], 2, True, (4, 0, 4, 0)),
        ([1, 1, 0], 2, True, (3, 0, 2, 0)),
        ([0, 0], 2, True, (2, 0, 0, 0)),
        ([0, 2, 2], 2, True, (1, 2, 0, 4)),  # padding goes behind
        ([0, 0, 1, 5], 2, True, (2, 2, 0, 6)),
        ([0, 1, 1], 1, True, (3, 0, 2, 0)),  # queries of one token are uniform
    ],
)
def test_split(query_lens, threshold, uniform, want):
    assert split_decodes_and_prefills(batch_of(query_lens), threshold, uniform) == want


def test_padding_tokens_of_a_captured_size_are_the_decodes():
    batch = batch_of([2, 2, 0, 0], num_actual_tokens=8)
    assert split_decodes_and_prefills(batch, 2, require_uniform=True) == (4, 0, 8, 0)


def test_split_wants_the_batchs_shapes():
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(2,\), expected \(2,\) and \(1,\)"):
        split_decodes_and_prefills(batch_of([1, 2], num_reqs=1))


class InputBatch:
    """A persistent batch that counts its swaps."""

    def __init__(self, lengths):
        self.req_ids = list(range(len(lengths)))
        self.scheduled = types.SimpleNamespace(num_scheduled_tokens=dict(enumerate(lengths)))
        self.swaps = 0

    def swap_states(self, i, j):
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]
        self.swaps += 1


@pytest.mark.parametrize("case", golden.metadata("reorder_batch_to_split_decodes_and_prefills"))
def test_golden_reorder(case):
    given_, want = case
    batch = InputBatch(given_["num_scheduled_tokens"])
    modified = reorder_batch_to_split_decodes_and_prefills(batch, batch.scheduled, given_["decode_threshold"])
    assert (batch.req_ids, modified) == (want["order"], want["modified"])


@given(lengths=st.lists(st.integers(0, 6), max_size=20), threshold=st.integers(1, 4))
def test_reorder_swaps_as_few_as_can_be(lengths, threshold):
    batch = InputBatch(lengths)
    modified = reorder_batch_to_split_decodes_and_prefills(batch, batch.scheduled, threshold)
    is_prefill = [lengths[i] > threshold for i in batch.req_ids]
    assert is_prefill == sorted(is_prefill)
    assert sorted(batch.req_ids) == list(range(len(lengths)))
    misplaced = sum(length > threshold for length in lengths[: is_prefill.count(False)])
    assert batch.swaps == misplaced  # each swap can correct at most one prefill at the front
    assert modified == (misplaced > 0)


@pytest.mark.parametrize("case", golden.metadata("make_local_attention_virtual_batches"))
def test_golden_local_attention(case):
    given_, want = case
    got = make_local_attention_virtual_batches(
        given_["attn_chunk_size"], np.array(given_["query_start_loc"]), np.array(given_["seq_lens"]),
        np.array(given_["block_table"]), given_["block_size"],
    )  # fmt: skip
    names = ("seqlens_q_local", "cu_seqlens_q_local", "seqlens_k_local", "block_table_local")
    for name, value in zip(names, got, strict=True):
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=6),
    block_size=st.integers(1, 4),
    blocks=st.integers(1, 4),
)
def test_local_attention_sees_a_tokens_own_chunk(requests, block_size, blocks):
    chunk = block_size * blocks
    query_lens, seq_lens = [q for q, _ in requests], [q + context for q, context in requests]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    columns = max(-(-max(seq_lens, default=0) // chunk), 1) * blocks
    table = np.arange(len(requests) * columns, dtype=np.int32).reshape(-1, columns)
    q_local, cu_q_local, k_local, table_local = make_local_attention_virtual_batches(
        chunk, starts, np.array(seq_lens, np.int32), table, block_size
    )
    assert cu_q_local.tolist() == [0, *np.cumsum(q_local)]
    assert all(q_local)  # none without queries
    got = []  # the slots that each query token of each virtual request sees
    for queries, keys, blocks_of in zip(q_local, k_local, table_local, strict=True):
        slots = (blocks_of[:, None] * block_size + np.arange(block_size)).ravel()
        got += [slots[: keys - queries + i + 1].tolist() for i in range(queries)]
    want = []
    for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for p in range(s - q, s):
            seen = range(p // chunk * chunk, p + 1)
            want.append([int(table[r, i // block_size]) * block_size + i % block_size for i in seen])
    assert got == want


def test_local_attention_errors():
    starts, lens, table = np.array([0, 2]), np.array([4]), np.zeros((1, 4), np.int32)
    for block_size in (0, 3):
        with pytest.raises(ValueError, match=f"block_size: got {block_size}, expected a positive divisor of"):
            make_local_attention_virtual_batches(4, starts, lens, table, block_size)
    with pytest.raises(ValueError, match=r"block_table: got shape \(1, 0\), expected at least one column"):
        make_local_attention_virtual_batches(4, starts, lens, table[:, :0], 2)


@given(lens=st.lists(st.integers(0, 200), max_size=6), world=st.integers(1, 5), interleave=st.integers(1, 7))
def test_dcp_lens_count_a_ranks_tokens(lens, world, interleave):
    seq_lens = np.array(lens, np.int32)
    owners = [[token // interleave % world for token in range(n)] for n in lens]
    want = np.array([[owner.count(rank) for rank in range(world)] for owner in owners]).reshape(-1, world)
    got = get_dcp_local_seq_lens(seq_lens, world, None, interleave)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    for rank in range(world):
        np.testing.assert_array_equal(get_dcp_local_seq_lens(seq_lens, world, rank, interleave), want[:, rank])


def test_dcp_errors():
    with pytest.raises(ValueError, match="dcp_rank: got 2, expected 0 to 1"):
        get_dcp_local_seq_lens(np.array([3]), 2, 2)
    with pytest.raises(ValueError, match="dcp_world_size: got 0, expected at least 1"):
        get_dcp_local_seq_lens(np.array([3]), 0)


def layer(scale=0.5, **values):
    return types.SimpleNamespace(impl=types.SimpleNamespace(scale=scale, **values))


def test_per_layer_parameters():
    layers = {"a": layer(), "b": layer(0.25, sliding_window=(127, 0), logits_soft_cap=30.0)}
    got = get_per_layer_parameters(layers, types.SimpleNamespace)
    assert got == {"a": PerLayerParameters(-1, None, 0.5), "b": PerLayerParameters(127, 30.0, 0.25)}
    with pytest.raises(TypeError, match=r"layers\['a'\].impl: got SimpleNamespace, expected int"):
        get_per_layer_parameters(layers, int)
    with pytest.raises(ValueError, match=r"per_layer_params: 'b' has .* expected .* as 'a' has"):
        infer_global_hyperparameters(got)
    with pytest.raises(ValueError, match="per_layer_params: got no layers, expected at least one"):
        infer_global_hyperparameters({})
    assert infer_global_hyperparameters({"a": got["a"], "c": got["a"]}) == got["a"]


def test_kv_cache_layout():
    assert get_kv_cache_layout() == "NHD"
    try:
        set_kv_cache_layout("HND")
        assert get_kv_cache_layout() == vllm_helpers._KV_CACHE_LAYOUT_OVERRIDE == "HND"
        with pytest.raises(ValueError, match="cache_layout: got 'HNN', expected one of NHD, HND"):
            set_kv_cache_layout("HNN")
        assert get_kv_cache_layout() == "HND"
    finally:
        set_kv_cache_layout(None)
    assert get_kv_cache_layout() == "NHD"


def test_kv_cache_layout_of_the_environment(monkeypatch):
    """The variable is read at every call; a layout that was set takes precedence."""
    monkeypatch.setenv("CUMLA_KV_CACHE_LAYOUT", "HND")
    assert get_kv_cache_layout() == "HND"
    set_kv_cache_layout("NHD")
    assert get_kv_cache_layout() == "NHD"
    set_kv_cache_layout(None)
    monkeypatch.setenv("CUMLA_KV_CACHE_LAYOUT", "hnd")
    with pytest.raises(ValueError, match="CUMLA_KV_CACHE_LAYOUT: got 'hnd', expected one of NHD, HND"):
        get_kv_cache_layout()
    monkeypatch.setenv("CUMLA_KV_CACHE_LAYOUT", "")
    assert get_kv_cache_layout() == "NHD"


def test_queries_longer_than_their_sequences():
    starts, lens, table = np.array([0, 1, 4]), np.array([4, 2]), np.zeros((2, 4), np.int32)
    with pytest.raises(ValueError, match="seq_lens_np: request 1 has 2 tokens and a query of 3"):
        make_local_attention_virtual_batches(4, starts, lens, table, 2)
    with pytest.raises(ValueError, match="seq_lens_np: request 0 has 4 tokens and a query of -1"):
        make_local_attention_virtual_batches(4, np.array([1, 0, 1]), lens, table, 2)
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(1,\), expected \[R \+ 1\] and \[R\]"):
        make_local_attention_virtual_batches(4, starts, lens[:1], table, 2)


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
def test_counts_are_integers(name):
    for wrong in (None, True, 1.0, "1", np.array(1)):
        with pytest.raises(TypeError, match=f"{name}: got .* of type .*, expected an integer"):
            batch_of([1, 2], **{name: wrong})
    assert type(getattr(batch_of([1, 2], **{name: np.int16(2)}), name)) is int


def test_fields_may_be_assigned():
    """Engines that draft several tokens assign fields: the next build uses the new values."""
    config = ServingConfig(block_size=8, num_speculative_tokens=1, max_num_batched_tokens=16, max_num_seqs=4)
    builder = DeepseekSparseSWAMetadataBuilder(config, "cpu")
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    batch = CommonAttentionMetadata.from_lengths([2, 2], [9, 20], table, 8)
    builder.build(0, batch)
    later = CommonAttentionMetadata.from_lengths([1, 1], [10, 21], table, 8)
    for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "slot_mapping"):
        setattr(batch, name, getattr(later, name))
    batch.num_computed_tokens_cpu = None
    batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len = np.int16(2), 1, -1
    assert (batch.num_actual_tokens, batch.max_seq_len) == (2, 21)
    assert type(batch.num_actual_tokens) is int
    found, want = builder.build(0, batch), DeepseekSparseSWAMetadataBuilder(config, "cpu").build(0, later)
    for name in ("positions", "decode_swa_indices", "decode_swa_lens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name))


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [("num_reqs", 1.5, TypeError), ("max_query_len", -1, ValueError), ("max_seq_len", 2**40, ValueError)],
)
def test_a_count_is_checked_when_it_is_assigned(name, wrong, error):
    batch = batch_of([1, 2])
    before = getattr(batch, name)
    with pytest.raises(error, match=f"^{name}: got"):
        setattr(batch, name, wrong)
    assert getattr(batch, name) == before


def test_small_numpy_integers_do_not_wrap_around():
    """Sums and products of these overflow 8 bits."""
    small, starts, table = np.uint8(200), np.array([0, 300]), np.arange(4, dtype=np.int32)[None]
    got = make_local_attention_virtual_batches(small, starts, np.array([300]), table, np.uint8(100))
    want = make_local_attention_virtual_batches(200, starts, np.array([300]), table, 100)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sizes = 16, 3, 17
    assert get_dcp_local_seq_lens(starts, *map(np.uint8, sizes))[1] == get_dcp_local_seq_lens(starts, *sizes)[1]
    assert split_decodes_and_prefills(batch_of([1, 300]), np.uint8(255)) == (1, 1, 1, 300)


def test_builders_refuse_a_batch_of_pages_of_another_size():
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    batch = CommonAttentionMetadata.from_lengths([1, 3], [4, 3], table, 64)
    assert batch.block_size == 64
    swa = DeepseekSparseSWAMetadataBuilder(ServingConfig(block_size=32))
    with pytest.raises(ValueError, match="block_size: got a batch with pages of 64 positions, expected 32"):
        swa.build(0, batch)
    mla = MLACommonMetadataBuilder(MLAConfig(block_size=16, num_heads=8))
    with pytest.raises(ValueError, match="block_size: got a batch with pages of 64 positions, expected 16"):
        mla.build(0, batch)
    swa.build(0, dataclasses.replace(batch, block_size=None))  # a batch without a page size
