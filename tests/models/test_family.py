"""Layers of GLM, Mistral Large 4 and Hy4: transformers' outputs by any schedule and on ranks, and errors."""

import dataclasses

import numpy as np
import pytest

from cumla.models import GlmMoeDsaConfig, HyV4Config, config_from, expected_weights
from cumla.parallel import RankRows, Shard, ShardedAttention, local_slot_mapping, run_threads
from support.batch_kinds import padded
from support.family_stack import GOLDEN, FamilyStack

REQUESTS = [(case, request) for case, stack in enumerate(GOLDEN["stacks"]) for request in range(len(stack["requests"]))]
GLM = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_attention_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "num_hidden_layers": 78, "rms_norm_eps": 1e-5, "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0}, "rope_interleave": True,
    "indexer_rope_interleave": True, "max_position_embeddings": 1048576, "attention_bias": False,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(("case", "request_number"), REQUESTS)
def test_outputs_and_selections_are_transformers(case, request_number):
    stack = FamilyStack(case)
    stack.check(request_number, stack.run(request_number, GOLDEN["stacks"][case]["requests"][request_number]))


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (0, [216, 45]),
        (0, [1] * 36 + [225]),
        (0, [64, 1, 3, 63, 2, 128]),
        (7, [1] * 9 + [131, 73]),
        (8, [160, 73]),
        (5, [100, 137]),
        (6, [1] * 66 + [193]),
        (6, [64, 1, 3, 63, 2, 126]),
    ],
)
def test_any_schedule_gives_the_same(case, splits):
    stack = FamilyStack(case)
    stack.check(0, stack.run(0, splits))


def test_a_sink_and_a_gate_count():
    """Without the sink, and with the gate's rows exchanged, outputs are others."""
    want = FamilyStack(8).run(1, [31])
    for name, change in (("sinks", lambda x: x - 1000), ("gate_proj.weight", lambda x: x[::-1])):
        stack = FamilyStack(8, change={name: change})
        assert np.abs(stack.run(1, [31]) - want).max() > 0.01 * np.abs(want).max(), name


def test_scores_far_below_the_sink_give_nothing():
    stack = FamilyStack(8, change={"sinks": lambda x: x + 1000})
    assert np.abs(stack.run(1, [31])).max() < 1e-30


@pytest.mark.parametrize("case", [6, 8])
def test_padding_does_not_matter(case):
    """Padding tokens have hidden states without meaning, and a gate of them."""
    stack, want = FamilyStack(case), FamilyStack(case).run(1, [31])
    batch = padded(stack.paged.batch([(1, 0, 31)])[0], 4)
    metadata = stack.builder.build(batch)
    for index, (layer, number) in enumerate(zip(stack.layers, stack.numbers, strict=True)):
        x = np.full((35, 128), np.nan, np.float32)
        x[:31] = stack.hidden[1][index, :31]
        out = layer.step(x, stack.caches[number], metadata, stack.selection)
        np.testing.assert_allclose(out[:31], want[index], rtol=0, atol=1e-5 * np.abs(want[index]).max())


def test_requests_in_one_step():
    """Decodes, drafts that are rejected and computed again, and a prompt's chunks, of two requests."""
    stack, parts = FamilyStack(0), {0: [], 1: []}
    stack.step([(0, 0, 40)])
    for scheduled in ([(0, 30, 1), (1, 0, 20)], [(1, 20, 1), (0, 31, 69)], [(0, 100, 3), (1, 21, 15)], [(0, 100, 161)]):
        for (request, first, _), out in zip(scheduled, stack.step(scheduled), strict=True):
            parts[request].append((first, out))
    for request, start in ((0, 30), (1, 0)):
        whole = np.zeros((4, stack.hidden[request].shape[1], 128), np.float32)
        whole[:, :start] = FamilyStack(0).run(request, [start])[:, :start] if start else 0
        for first, out in parts[request]:
            whole[:, first : first + out.shape[1]] = out
        stack.picks = {}
        stack.check(request, whole)


@pytest.mark.parametrize("case", [0, 3, 4, 5, 6, 8])
def test_ranks_select_and_give_what_one_device_does(case):
    """The sink of Hy4 counts once; GLM-5.3-Flash's keys and rings are on every rank."""
    splits = GOLDEN["stacks"][case]["requests"][0]

    def on(comm):
        stack, page = FamilyStack(case), 5
        shard = Shard(comm.rank, comm.size, 2)
        columns = -(-sum(splits) // (page * comm.size)) + 2
        table = np.random.default_rng(comm.rank).permutation(columns).astype(np.int32)[None]
        for number, caches in stack.caches.items():
            source = stack.config.spec(number).row_source
            rows = np.zeros((columns, page, caches.rows.shape[2]), np.float32)
            stack.caches[number] = dataclasses.replace(
                caches, rows=rows if source == number else stack.caches[source].rows
            )

        class OnRank:
            def __init__(self, layer):
                self.sharded, self.layer, self.spec = ShardedAttention(layer, comm), layer.layer, layer.spec
                self.activations = layer.activations

            def step(self, x, caches, metadata, selection):
                tokens = metadata.tokens
                slots = local_slot_mapping(
                    tokens.query_start_loc, tokens.seq_lens, table, page, shard, num_tokens=len(x), backend="cpu"
                )
                return self.sharded.step(x, caches, metadata, RankRows(shard, table, slots), selection)

        stack.layers = [OnRank(layer) for layer in stack.layers]
        stack.check(0, stack.run(0, splits))
        return stack.picks

    first, second = run_threads(2, on, 60)
    for layer in first:
        for token, chosen in first[layer][0].items():
            np.testing.assert_array_equal(chosen, second[layer][0][token])


@pytest.mark.parametrize(("case", "splits"), [(0, [33, 2, 1]), (3, [50, 6, 8]), (6, [5, 1, 60])])
def test_rounded_caches_stay_near(case, splits):
    """Outputs of FP8 rows are off by about three percent, as the stack's record says. All rows are attended."""
    exact = FamilyStack(case).run(1, splits)
    for cache_format, bound in (("bfloat16", 0.02), ("fp8", 0.08)):
        got = FamilyStack(case, cache_format, activations="bfloat16").run(1, splits).astype(np.float64)
        assert np.sqrt(np.square(got - exact).mean() / np.square(exact).mean()) < bound


@pytest.mark.parametrize(
    ("case", "request_number", "cache_format"),
    [(0, 1, "fp8"), (8, 1, "fp8"), (2, 3, "fp8"), (2, 3, "bfloat16"), (6, 1, "fp8"), (6, 1, "bfloat16")],
)
def test_cuda_kernels_give_what_the_cpu_gives(here, case, request_number, cache_format):
    """Hy4 has a sink and a gate, GLM-5.3-Flash pooled keys of which some are selected."""
    splits = [30, 1] if request_number == 1 else [41, 1]
    want = FamilyStack(case, cache_format, activations="bfloat16").run(request_number, splits).astype(np.float64)
    got = FamilyStack(case, cache_format, "cuda", "bfloat16", lab=here).run(request_number, splits).astype(np.float64)
    assert np.sqrt(np.square(got - want).mean() / np.square(want).mean()) < 0.03


def test_the_published_configuration():
    config = config_from(GLM)
    assert config.selecting == (0, 1, 2, *range(6, 78, 4))
    assert len(config.selecting) == 21
    spec = config.spec(9)
    assert (spec.selection, spec.selection_source, spec.keys, spec.mode) == ("source", 6, "none", "reuse")
    assert (spec.head_dim, spec.v_dim, spec.q_eps, spec.index_pairs, spec.index_part) == (
        256, 256, 1e-5, "neighbours", "first",
    )  # fmt: skip
    assert spec.softmax_scale == 256**-0.5
    assert config.spec(78).selects
    assert config_from(GLM | {"indexer_rope_interleave": False}).spec(0).index_pairs == "halves"
    names = expected_weights(config, 9)
    assert names["q_b_proj.weight"].shape == (64 * 256, 2048)
    assert not any("indexer" in name for name in names)
    assert {name for name in expected_weights(config, 6) if "indexer" in name} == {
        "indexer.wk.weight", "indexer.k_norm.weight", "indexer.k_norm.bias", "indexer.wq_b.weight",
        "indexer.weights_proj.weight",
    }  # fmt: skip


HY = {
    **{name: value for name, value in GLM.items() if not name.startswith("index_")}, "model_type": "hy_v4",
    "hidden_size": 2816, "num_attention_heads": 32, "q_lora_rank": 1536, "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 2048, "num_hidden_layers": 34, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True,
}  # fmt: skip


def test_hy4_s_configuration():
    config = config_from(HY)
    assert config.selecting == (0, *range(1, 34, 4))
    spec = config.spec(3)
    assert (spec.selection_source, spec.sink, spec.gate, spec.rope_pairs) == (1, True, True, "neighbours")
    assert (config.spec(1).index_pairs, config.spec(1).index_part) == ("neighbours", "last")
    halves = config_from(HY | {"rope_interleave": False, "indexer_rope_interleave": False}).spec(1)
    assert (halves.rope_pairs, halves.index_pairs) == ("halves", "halves")
    names = expected_weights(config, 3)
    assert names["learnable_sink_param"].transformers == "sinks"
    assert names["linear_gate.weight"].shape == (32 * 256, 2816)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gating_type", "headwise"), ("gated_mla", False), ("learnable_sink", False), ("model_type", "glm_moe_dsa")],
)
def test_a_rule_of_hy4_that_is_not_served_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value!r}, expected"):
        HyV4Config.from_dict(HY | {name: value})


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, range(8)),
        ({"index_topk_freq": 4}, (0, 1, 5)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6)),
        ({"index_topk_pattern": "FSFSSSSF", "index_topk_freq": 4}, (0, 2, 7)),
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_pattern": "F" * 8}, (0,)),
    ],
)
def test_layers_that_select(changes, want):
    config = {name: value for name, value in GLM.items() if not name.startswith(("index_topk_f", "index_skip"))}
    assert config_from(config | {"num_hidden_layers": 8} | changes).selecting == tuple(want)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"indexer_types": ["shared"] * 78}, "selecting: got .*, expected layer 0 first"),
        ({"indexer_types": ["full"] * 3}, "indexer_types: got 3 entries, expected one for each of 78 layers"),
        ({"indexer_types": ["full"] * 77 + ["none"]}, r"indexer_types\[77\]: got 'none'"),
        ({"index_topk_pattern": "F" * 77 + "x"}, r"index_topk_pattern\[77\]: got 'x'"),
        ({"index_topk_freq": 0}, "index_topk_freq: got 0"),
        ({"rope_interleave": False}, "rope_interleave: got False, expected True"),
        ({"kv_lora_rank": 256}, "kv_lora_rank: got 256, expected 512"),
        ({"index_kpool": 4}, "index_kpool: got 4"),
        ({"sliding_window": 128}, "sliding_window: got 128, expected none: it changes attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None"),
        ({"attention_bias": True}, "attention_bias: got True"),
    ],
)
def test_a_rule_that_is_not_served_is_named(changes, match):
    with pytest.raises((TypeError, ValueError), match=match):
        GlmMoeDsaConfig.from_dict(GLM | changes)


def test_a_reader_needs_its_source():
    stack = FamilyStack(0)
    batch, _ = stack.paged.batch([(0, 0, 5)])
    metadata, x = stack.builder.build(batch), stack.hidden[0][1, :5]
    reader, caches = stack.layers[1], stack.caches[1]
    assert caches.indexer is None
    with pytest.raises(ValueError, match="selection: got no rows, expected rows of layer 0 of this step"):
        reader.step(x, caches, metadata, stack.selection)
    with pytest.raises(TypeError, match="selection: got None of type NoneType, expected a SharedSelection"):
        reader.step(x, caches, metadata)
    with pytest.raises(ValueError, match="topk_indices: got an array"):
        reader.step(x, caches, metadata, stack.selection, topk_indices=np.zeros((5, 32), np.int32))
    assert not caches.rows.any()
