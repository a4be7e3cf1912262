"""Configurations of GLM-5.3-Flash: its sparse layers, weights' names, and rules that are refused."""

import dataclasses

import numpy as np
import pytest

from cumla.models import Glm5NextConfig, LayerCaches, StepBuilder, config_from, expected_weights, serving_of

FLASH = {
    "model_type": "glm5_next_text", "hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "index_kpool_compress": True,
    "index_kpool_always_select_tail": True, "num_hidden_layers": 45, "rms_norm_eps": 1e-5, "head_dim": 192,
    "layer_types": [("linear" if (i + 1) % 4 else "indexed") + "_attention" for i in range(45)],
    "indexer_types": ["full"] * 45, "indexer_rope_interleave": True, "max_position_embeddings": 1048576,
    "attention_bias": False, "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True,
}  # fmt: skip


def test_the_published_configuration():
    config = config_from({"model_type": "glm5_next", "text_config": FLASH})
    assert config == Glm5NextConfig.from_dict(FLASH)
    assert config.sparse == config.selecting == (*range(3, 45, 4),)
    assert [spec.layer for spec in config.specs()] == list(config.sparse)
    spec = config.spec(7)
    assert (spec.rope_dim, spec.row_dim, spec.head_dim, spec.v_dim, spec.softmax_scale) == (0, 512, 256, 256, 1 / 16)
    assert (spec.keys, spec.pool, spec.topk, spec.selected_keys, spec.listed_rows) == ("pools", 4, 2048, 512, 2051)
    assert (spec.q_eps, spec.row_eps, spec.key_eps) == (1e-5, 1e-5, 1e-6)
    assert spec.groups() == ("rows", "rings")
    assert config.spec(45).selects  # of the layer that predicts further tokens
    assert config.spec(45).row_source == 45
    names = expected_weights(config, 7)
    assert names["indexer.index_kpool_compress_gate"].shape == (128, 4096)
    assert names["indexer.index_kpool_compress_ape"].shape == (4, 128)
    assert names["kv_a_proj_with_mqa.weight"].shape == (512, 4096)
    assert names["kv_b_proj.weight"].shape == (64 * 512, 512)


def test_other_names_of_the_sparse_layers():
    full = FLASH | {"layer_types": [kind.replace("indexed", "full") for kind in FLASH["layer_types"]]}
    by_number = FLASH | {"layer_types": None, "linear_attn_config": {"full_attn_layers": list(range(3, 45, 4))}}
    for config in (full, by_number):
        assert config_from(config) == config_from(FLASH)
    assert config_from(FLASH | {"layer_types": None}).sparse == (*range(45),)


def test_a_layer_without_rope_has_a_rotation_by_nothing():
    table = config_from(FLASH).spec(3).cos_sin_table(5)
    np.testing.assert_array_equal(table, [[1, 0]] * 5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail: got False, expected True"),
        ({"index_kpool_compress": False}, "index_kpool_compress: got False"),
        ({"index_kpool": 1}, "index_kpool: got 1"),
        ({"index_kpool": 5}, "index_topk: got 2048, expected a multiple of index_kpool 5"),
        ({"index_kpool": 256}, "index_kpool: got 256"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim: got 64, expected 0"),
        ({"kv_lora_rank": 256}, "kv_lora_rank: got 256, expected 512"),
        ({"layer_types": ["linear_attention"] * 45}, "sparse: got no layers"),
        ({"layer_types": ["sliding_attention"] * 45}, r"layer_types\[0\]: got 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: got 3 entries"),
        ({"layer_types": None, "linear_attn_config": {"full_attn_layers": [45]}}, r"full_attn_layers\[0\]: got 45"),
        (
            {"indexer_types": ["full"] * 7 + ["shared"] + ["full"] * 37},
            "selecting: got .* without 7, .*: it is a layer of linear attention before layer 7",
        ),
        ({"indexer_types": ["shared"] * 45}, "selecting: got .* without 3, .*: it is the first sparse layer"),
        ({"sliding_window": 128}, "sliding_window: got 128, expected none: it changes attention"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters: got"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"model_type": "glm4"}, "model_type: got 'glm4'"),
    ],
)
def test_a_rule_that_is_not_served_is_named(changes, match):
    with pytest.raises((TypeError, ValueError), match=match):
        Glm5NextConfig.from_dict(FLASH | changes).specs()


def test_a_layer_of_linear_attention_is_named():
    with pytest.raises(ValueError, match=r"layer: got 4, a layer of linear attention \(KDA\), expected a sparse one"):
        config_from(FLASH).spec(4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pool": 1}, "pool: got 1, expected a divisor of topk = 2048, above 1, as keys are 'pools'"),
        ({"keys": "tokens"}, "pool: got 4, expected 1, as keys are 'tokens'"),
        ({"rope_pairs": "halves"}, "rope_pairs: got halves, expected none, as rope_dim is 0"),
        ({"index_pairs": "halves"}, "index_pairs: got halves, expected none, as rope_dim is 0"),
    ],
)
def test_fields_that_contradict(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(config_from(FLASH).spec(3), **changes)


def test_pages_have_whole_pools():
    config = config_from(FLASH)
    serving = serving_of(config, block_size=66)
    with pytest.raises(ValueError, match="block_size: got 66, expected a multiple of 4"):
        LayerCaches.allocate(config.spec(3), serving, {"rows": 2, "rings": 1})
    with pytest.raises(
        ValueError, match="pool: got 4, expected 1 with compressed rows, otherwise a divisor of block_si"
    ):
        StepBuilder(config.specs(), serving)
