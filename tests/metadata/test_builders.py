"""Common to all builders: order, CUDA graph support, thresholds, frameworks."""

import copy
import dataclasses
import pickle
import sys
import types

import numpy as np
import pytest

from cumla.kernels.types.plan import DecodePlan, Workspace
from cumla.metadata import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
)
from metadata.batches import BLOCK, make_batch
from support.lab import Lab

HOST = Lab("cpu", on_device=False)
CONFIG = ServingConfig(
    window_size=8, compress_ratios=(1, 4), block_size=BLOCK, compressed_block_size=BLOCK, num_speculative_tokens=2,
    max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64,
)  # fmt: skip
BUILDERS = [DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder]


class Plain(AttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_prefix_len, common_attn_metadata


class Always(Plain):
    cudagraph_support = AttentionCGSupport.ALWAYS


class OneToken(Plain):
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def input_batch(lengths):
    order = [f"request {i}" for i in range(len(lengths))]

    def swap_states(i, j):
        order[i], order[j] = order[j], order[i]

    scheduled = dict(zip(order, lengths, strict=True))
    batch = types.SimpleNamespace(req_ids=order, swap_states=swap_states)
    return batch, types.SimpleNamespace(num_scheduled_tokens=scheduled)


@pytest.mark.parametrize("builder", BUILDERS)
def test_both_builders_want_the_same_order(builder):
    built = builder(CONFIG)
    assert built.reorder_batch_threshold == 3
    assert builder.reorder_batch_threshold == 1
    batch, scheduled = input_batch([9, 3, 2])
    assert built.reorder_batch(batch, scheduled)
    assert batch.req_ids == ["request 2", "request 1", "request 0"]
    assert not built.reorder_batch(batch, scheduled)


def test_a_builder_that_takes_any_order():
    batch, scheduled = input_batch([9, 3, 2])
    assert Plain(CONFIG).reorder_batch_threshold is None
    assert not Plain(CONFIG).reorder_batch(batch, scheduled)
    assert batch.req_ids[0] == "request 0"


@pytest.mark.parametrize(
    ("query_lens", "single", "uniform"),
    [
        ([1, 1, 1], True, True),
        ([1, 0, 1], True, True),
        ([3, 3], False, True),
        ([3, 3, 0, 0], False, True),
        ([3, 2], False, False),
        ([4, 4], False, False),
        ([1, 5], False, False),
        ([], True, True),
    ],
)
def test_cuda_graph_support(query_lens, single, uniform):
    batch = make_batch(HOST, [q + 5 for q in query_lens], query_lens)
    for builder in BUILDERS:
        assert builder.get_cudagraph_support(CONFIG) is AttentionCGSupport.UNIFORM_BATCH
        assert builder.full_cudagraph_supported
        assert builder(CONFIG).can_run_in_cudagraph(batch) == uniform
    assert OneToken(CONFIG).can_run_in_cudagraph(batch) == single
    assert Always(CONFIG).can_run_in_cudagraph(batch)
    assert not Plain(CONFIG).can_run_in_cudagraph(batch)
    assert not Plain.full_cudagraph_supported


def test_defaults():
    batch = make_batch(HOST, [5], [1])
    assert Plain(CONFIG).build_for_cudagraph_capture(batch) == (0, batch)
    assert not Plain(CONFIG).use_cascade_attention(
        common_prefix_len=9, query_lens=np.ones(1), num_query_heads=64, num_kv_heads=1, use_alibi=False,
        use_sliding_window=True, num_sms=132,
    )  # fmt: skip


def on_framework(framework, batch):
    """The batch with its arrays in another framework."""
    if framework == "torch":
        convert = pytest.importorskip("torch").from_numpy
    else:
        convert = pytest.importorskip("jax.numpy").asarray
    names = (
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "block_table_tensor", "slot_mapping",
    )  # fmt: skip
    if framework == "jax":
        batch = dataclasses.replace(batch, slot_mapping=batch.slot_mapping.astype(np.int32))
    return dataclasses.replace(batch, **{name: convert(np.array(getattr(batch, name))) for name in names})


def kind(framework):
    return sys.modules["torch"].Tensor if framework == "torch" else sys.modules["jax"].Array


def leaves(value, path="metadata"):
    """(path, value) of every field, through nested metadata; plans as an attention kernel uses them."""
    if isinstance(value, DecodePlan | Workspace):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, ServingConfig):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_frameworks(builder, framework):
    steps = [([9, 20, 0, 40], [3, 3, 0, 12]), ([30, 11], [3, 3]), ([50], [20]), ([9, 20], [1, 1])]
    plain, foreign = builder(CONFIG, backend="cpu"), builder(CONFIG, backend="cpu")
    frozen = []
    for i, (seq_lens, query_lens) in enumerate(steps * 2):
        # The second batch has other lengths, but the same number of requests of each kind.
        batch = make_batch(HOST, [n + i // len(steps) for n in seq_lens], query_lens, padding=2)
        want = plain.build(0, batch)
        got = foreign.build(0, on_framework(framework, batch))
        for (path, value), (_, expected) in zip(leaves(got), leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(value), np.asarray(expected), err_msg=path)
            if isinstance(expected, np.ndarray) and not path.endswith("lens_cpu"):
                assert isinstance(value, kind(framework)), path
                frozen.append((path, value, np.array(expected)))
    if framework == "jax":  # JAX arrays never change
        for path, value, expected in frozen:
            np.testing.assert_array_equal(np.asarray(value), expected, err_msg=path)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("builder", [*BUILDERS, MLACommonMetadataBuilder])
def test_a_copied_builder_has_buffers_of_its_own(builder, copied):
    config = MLAConfig(**vars(CONFIG)) if builder is MLACommonMetadataBuilder else CONFIG
    first = builder(config, "reference")
    for built in (first, copied(first)):  # before and after the first build
        before = built.build(0, make_batch(HOST, [9, 30], [1, 5]))
        other = copied(built)
        assert (type(other), other.config, other.backend) == (builder, config, "reference")
        got, want = (b.build(0, make_batch(HOST, [9, 30], [1, 1])) for b in (other, builder(config, "reference")))
        for name, value in vars(want).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(got, name), value, err_msg=name)
        if builder is DeepseekSparseSWAMetadataBuilder:
            assert not np.shares_memory(got.decode_swa_indices, before.decode_swa_indices)
            assert before.decode_swa_lens.tolist() == [8]
