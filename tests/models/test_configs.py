"""Configurations: entries of a config.json, and errors that name unsupported ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.test_weight_tables import weight_tables

from cumla.models import config_from
from cumla.models.config_validation import MOST_THETA
from cumla.models.deepseek_v4 import DeepseekV4Config
from cumla.models.deepseek_v32 import DeepseekV32Config
from cumla.models.deepseek_v41 import DeepseekV41Config
from cumla.models.rope import LIMITS, cos_sin_table
from support.models import GoldenLayer, V32Layer, records, relative_rms

V4, V32 = (records("models")[case]["config"] for case in (0, 2))
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512}
MAIN = {"rope_type": "default", "rope_theta": 777.0}


def ratios(second):
    return {"layer_types": None, "compress_ratios": [4, second, 4, 4]}


def table_of(config, ratio, positions):
    """Cosines and sines of the first layer of this ratio."""
    return config.spec(config.compress_ratios.index(ratio)).cos_sin_table(positions)


def yarn(**numbers):
    return {"rope_scaling": YARN | numbers, "rope_parameters": None}


WRONG = {
    "too few layer types": (V4, {"layer_types": ["sliding_attention"]}, "layer_types: got 1 entries, expected"),
    "too few ratios": (V4, {"layer_types": None, "compress_ratios": [4]}, "compress_ratios: got 1 entries"),
    "another rate": (V4, {"compress_rates": {"compressed_sparse_attention": 8}}, r"compress_rates\.compressed_sparse"),
    "another rate by its old name": (V4, {"compress_rate_hca": 64}, "compress_rate_hca: got 64, expected 128"),
    "more of a head rotated": (V4, {"partial_rotary_factor": 0.25}, "partial_rotary_factor: got 0.25, expected 0.125"),
    "more rotated, by the old name": (V4, {"qk_rope_head_dim": 128}, "qk_rope_head_dim: got 128, expected 64"),
    "YaRN without compression": (
        V4, {"rope_parameters": {"main": YARN, "compress": YARN}}, r"rope_parameters\.main: got YaRN"
    ),
    "biases": (V32, {"attention_bias": True}, "attention_bias: got True, expected False"),
    "no low rank": (V32, {"q_lora_rank": None}, "q_lora_rank: got None of type NoneType"),
    "a size in words": (V32, {"hidden_size": "256"}, "hidden_size: got '256' of type str"),
    "no heads": (V4, {"num_attention_heads": 0}, "num_attention_heads: got 0, expected at least 1"),
    "no layers": (V4, {"num_hidden_layers": None}, "num_hidden_layers: got None"),
    "no window": (V4, {"sliding_window": None}, "sliding_window: got None"),
    "a base of 0": (V4, {"compress_rope_theta": 0}, "compress_rope_theta: got 0, expected a positive number"),
    "a base of 1": (V32, {"rope_theta": 1}, "rope_theta: got 1, expected more than 1"),
    "a base beyond float32": (V32, {"rope_theta": 1e300}, "rope_theta: got 1e.300, expected a number that float32 has"),
    "another model": (V4, {"model_type": "deepseek_v3"}, "model_type: got 'deepseek_v3', expected 'deepseek_v4'"),
    "V4 as V3.2": (V32, {"model_type": "deepseek_v4"}, "model_type: got 'deepseek_v4', expected 'deepseek_v32'"),
    "V3.2 as V4": (V4, {"model_type": "deepseek_v32"}, "model_type: got 'deepseek_v32', expected 'deepseek_v4'"),
    "V4's groups as V3.2": (V32, {"o_lora_rank": 64}, "o_lora_rank: got 64, expected none: it is of a DeepSeek V4"),
    "V4's ratios as V3.2": (V32, {"compress_ratios": [4]}, r"compress_ratios: got \[4\], expected none"),
    "more heads than attention has": (V4, {"num_attention_heads": 200}, "num_attention_heads: got 200, .* most 128"),
    "so many heads in V3.2": (V32, {"num_attention_heads": 200}, "num_attention_heads: got 200, expected at most 128"),
    "no choice": (V4, {"index_topk": 0}, "index_topk: got 0, expected at least 1"),
    "no choice in V3.2": (V32, {"index_topk": 0}, "index_topk: got 0, expected at least 1"),
    "no epsilon": (V4, {"rms_norm_eps": 0}, "rms_norm_eps: got 0, expected a positive number"),
    "too small an epsilon": (V32, {"rms_norm_eps": 1e-46}, "rms_norm_eps: got 1e-46, expected a positive number"),
    "more layers than there are": (V4, {"num_hidden_layers": 2**31}, "num_hidden_layers: got 2147483648, expected at"),
    "a ratio that is none": (V4, ratios(float("nan")), r"compress_ratios\[1\]: got nan of type float"),
    "a fraction of a ratio": (V4, ratios(0.5), r"compress_ratios\[1\]: got 0.5 of type float"),
    "a whole fraction": (V4, ratios(4.0), r"compress_ratios\[1\]: got 4.0 of type float"),
    "a negative ratio": (V4, ratios(-5), r"compress_ratios\[1\]: got -5, expected at least 0"),
    "an infinite ratio": (V4, ratios(-np.inf), r"compress_ratios\[1\]: got -inf"),
    "another ratio": (V4, ratios(8), "compress_ratios: got 8, expected 1, 4 or 128"),
    "one ratio for all": (V4, {"layer_types": None, "compress_ratios": 5}, "compress_ratios: got 5 of type int"),
    "one type for all": (V4, {"layer_types": "sliding_attention"}, "layer_types: got 'sliding_attention' of type str"),
    "types that are none": (V4, {"layer_types": 5}, "layer_types: got 5 of type int, expected a list"),
    "another type": (V4, {"layer_types": ["sliding_attention"] * 3 + [7]}, r"layer_types\[3\]: got 7, expected"),
    "one rate for all": (V4, {"compress_rates": 5}, "compress_rates: got 5 of type int, expected a Mapping"),
    "YaRN without a type": (V32, {"rope_scaling": {"factor": 40}}, r"rope_scaling\.factor: got 40 without a rope_type"),
    "what no RoPE has": (V4, {"rope_parameters": {"a": 1}}, r"rope_scaling\.a: got 1 without a rope_type"),
    "main that is none": (V4, {"rope_parameters": {"main": 5, "compress": YARN}}, r"rope_parameters\.main: got 5"),
    "compress that is none": (V4, {"rope_parameters": {"compress": [5]}}, r"rope_parameters\.compress: got \[5\]"),
    "YaRN that shrinks": (V32, yarn(factor=0.5), r"rope_scaling\.factor: got 0.5, expected 1 to"),
    "YaRN by nothing": (V4, yarn(factor=1e-320), r"rope_scaling\.factor: got 1e-320"),
    "YaRN by everything": (V4, yarn(factor=1e300), r"rope_scaling\.factor: got 1e.300"),
    "a ramp from nowhere": (V4, yarn(beta_fast=1e-320), r"rope_scaling\.beta_fast: got"),
    "a ramp from too far": (V4, yarn(beta_slow=1e308), r"rope_scaling\.beta_slow: got"),
    "a ramp backwards": (V32, yarn(beta_fast=0.5), r"rope_scaling\.beta_fast: got 0.5, expected at least beta_slow"),
    "a temperature beyond float32": (V32, yarn(mscale_all_dim=1e308), r"rope_scaling\.mscale_all_dim: got"),
    "a negative temperature": (V32, yarn(mscale=-1), r"rope_scaling\.mscale: got -1"),
    "no cosines": (V32, yarn(attention_factor=0), r"rope_scaling\.attention_factor: got 0"),
    "a length that is none": (V32, yarn(original_max_position_embeddings=np.inf), "position_embeddings: got inf"),
    "a flag that is none": (V32, yarn(truncate="no"), r"rope_scaling\.truncate: got 'no'"),
    "all of it rotated": (V4, {"partial_rotary_factor": np.inf}, "partial_rotary_factor: got inf, expected a fin"),
    "nothing rotated": (V4, {"partial_rotary_factor": 0}, "partial_rotary_factor: got 0, expected 0.125"),
    "a base that is none": (V4, {"rope_theta": float("nan")}, "rope_theta: got nan, expected a finite number"),
    "another scaling": (V4, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type: got 'linear'"),
    "YaRN without a factor": (V32, {"rope_scaling": YARN | {"factor": None}}, "expected factor among YaRN's"),
    "YaRN without a length": (
        V32, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "expected original_max_position_embeddings among"
    ),
    "YaRN by a factor of 0": (V32, {"rope_scaling": YARN | {"factor": 0}}, r"rope_scaling\.factor: got 0"),
    "scaling in words": (V32, {"rope_parameters": "yarn"}, "rope_parameters: got 'yarn' of type str"),
}  # fmt: skip


def read(config):
    return (DeepseekV4Config if config["hidden_size"] and "o_groups" in config else DeepseekV32Config).from_dict(config)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_served_is_named(wrong):
    config, change, message = WRONG[wrong]
    with pytest.raises((TypeError, ValueError), match=message):
        read(config | change)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "q_lora_rank", "num_hidden_layers"])
def test_what_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"{name}: the configuration has none"):
        DeepseekV4Config.from_dict({key: value for key, value in V4.items() if key != name})


@pytest.mark.parametrize("kind", [DeepseekV4Config, DeepseekV32Config])
@pytest.mark.parametrize("wrong", [None, 5, "{}", [1]])
def test_what_is_no_configuration(kind, wrong):
    with pytest.raises(TypeError, match=r"^config: got"):
        kind.from_dict(wrong)


@pytest.mark.parametrize("model", ["deepseek_v4", None])
def test_a_configuration_of_the_other_model(model):
    """Recognised by its model_type, and without one by its fields."""
    of = {} if model is None else {"model_type": model}
    with pytest.raises(ValueError, match="^model_type" if of else "^o_groups"):
        DeepseekV32Config.from_dict(V4 | of)
    with pytest.raises(ValueError, match="^model_type" if of else "^num_key_value_heads"):
        DeepseekV4Config.from_dict(V32 | ({"model_type": "deepseek_v32"} if of else {}))


V41 = records("v41")[0]["config"] | {"model_type": "deepseek_v41_text"}
MODELS = {"v32": (DeepseekV32Config, V32), "v4": (DeepseekV4Config, V4), "v41": (DeepseekV41Config, V41)}
ALL, SOME = ["full"] * 6, ["full", "shared", "full", "shared", "full", "shared"]
SAME = {  # entries that are not fields: by model, the value that its layers compute, then another value
    "attention_bias": ({"v32": False, "v4": False, "v41": False}, True),
    "rope_interleave": ({"v32": True, "v4": True, "v41": True}, False),
    "indexer_rope_interleave": ({"v32": False, "v4": True, "v41": True}, "neither"),
    "index_topk_freq": ({"v32": 1, "v4": 1}, 4),
    "index_topk_pattern": ({"v32": "FFFFFF", "v4": "FFFFFF"}, "FSFSFS"),
    "indexer_types": ({"v32": ALL, "v4": ALL}, SOME),
    "index_kpool": ({"v32": 1, "v4": 1}, 4),
    "kv_lora_rank": ({"v32": 512, "v4": 512, "v41": 512}, 256),
    "qk_rope_head_dim": ({"v32": 64, "v4": 64, "v41": 64}, 32),
    "qk_head_dim": ({"v32": 192, "v4": 512, "v41": 512}, 100),
    "qk_nope_head_dim": ({"v4": 448, "v41": 448}, 128),
    "v_head_dim": ({"v4": 512, "v41": 512}, 128),
    "head_dim": ({"v32": 64, "v4": 512, "v41": 512}, 128),
    "num_key_value_heads": ({"v4": 1, "v41": 1}, 8),
    "partial_rotary_factor": ({"v32": 1.0, "v4": 0.125, "v41": 0.125}, 0.5),
    "layer_types": ({"v32": ["deepseek_sparse_attention"] * 6}, ["full_attention", "sliding_attention"] * 3),
    "compress_rate_csa": ({"v4": 4}, 8),
    "sliding_window_pattern": ({}, 6), "use_sliding_window": ({}, True), "kv_source_layers": ({}, [0, 0]),
    "attention_sink_size": ({}, 4), "softmax_scale": ({}, 0.5), "no_rope_layers": ({}, [1, 0]),
    "rope_anything": ({}, 1),
    "is_causal": ({"v32": True, "v4": True, "v41": True}, False),
    "use_mla": ({"v32": True, "v4": True, "v41": True}, False),
    "clip_qkv": ({}, 8.0), "dsa_topk": ({}, 64), "dual_chunk_attention_config": ({}, {"chunk_size": 8}),
    "full_attention_interval": ({}, 4), "gated_attention": ({}, True), "gated_mla": ({}, True),
    "global_attn_every_n_layers": ({}, 2), "head_size": ({}, 64), "learnable_sink": ({}, True),
    "linear_attn_config": ({}, {"full_attn_layers": [3]}), "llama_4_scaling": ({}, {"beta": 0.1}),
    "logits_soft_cap": ({}, 30.0), "logit_softcapping": ({}, 30.0), "mla_scale_q_lora": ({}, True),
    "mrope_section": ({}, [16, 8, 8]), "num_kv_heads": ({}, 2), "o_bias": ({}, True), "qkv_bias": ({}, True),
    "position_embedding_type": ({}, "absolute"), "query_pre_attn_scalar": ({}, 256), "rotary_dim": ({}, 32),
    "swa_window": ({}, 64), "use_bidirectional_attention": ({}, True), "window_size": ({}, 64),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SAME)
def test_an_entry_that_changes_attention_is_read_or_named(model, name):
    """The supported value passes and changes nothing; another value is an error."""
    (kind, base), (same, other) = MODELS[model], SAME[name]
    if (name, model) in (("qk_nope_head_dim", "v32"), ("v_head_dim", "v32"), ("num_key_value_heads", "v32")):
        pytest.skip("a field of the config, or an entry that does not change attention over latent rows")
    if model in same:
        assert kind.from_dict(base | {name: same[model]}) == kind.from_dict(base)
    assert kind.from_dict({**base, name: None} if name not in base else base) == kind.from_dict(base)
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        kind.from_dict(base | {name: other})


@pytest.mark.parametrize("model", MODELS)
def test_entries_that_change_no_attention(model):
    kind, base = MODELS[model]
    others = {
        "attention_dropout": 0.1, "index_skip_topk_offset": 3, "moe_intermediate_size": 7, "topk_group": 4,
        "hc_mult": 4, "quantization_config": {}, "dspark_block_size": 5, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    assert kind.from_dict(base | others) == kind.from_dict(base)


def test_every_configuration_of_the_golden_data_and_of_the_examples():
    kinds = {"v32": DeepseekV32Config, "v4": DeepseekV4Config, "v41": DeepseekV41Config}
    for record in (*records("models"), *records("layers"), *records("v41")):
        config = record["config"]
        model = "v41" if "kv_source_layer_ids" in config else "v4" if "o_groups" in config else "v32"
        kinds[model].from_dict(config)


def test_the_outer_part_of_v41():
    """Its entries are not read: one that changes attention must equal the text part's entry."""
    outer = {"model_type": "deepseek_v41", "vision_config": {"head_dim": 64}, "text_config": V41}
    plain = DeepseekV41Config.from_dict(V41)
    assert DeepseekV41Config.from_dict(outer | {"sliding_window": V41["sliding_window"]}) == plain
    with pytest.raises(ValueError, match=r"^sliding_window: got 64, expected 128"):
        DeepseekV41Config.from_dict(outer | {"sliding_window": 64})
    with pytest.raises(ValueError, match=r"^index_topk_freq: got 1, expected none"):
        DeepseekV41Config.from_dict(outer | {"index_topk_freq": 1})


CONTRADICTIONS = {
    "two bases of V3.2": ("v32", {"rope_theta": 1e4, "rope_parameters": YARN | {"rope_theta": 1e6}}, "rope_theta: got"),
    "two bases of V4": (
        "v4", {"rope_theta": 1e4, "rope_parameters": {"main": MAIN, "compress": YARN}}, "rope_theta: got 10000"
    ),
    "two bases of V4's compressed layers": (
        "v4", {"compress_rope_theta": 5e3, "rope_parameters": {"main": {}, "compress": YARN | {"rope_theta": 1e4}}},
        "compress_rope_theta: got 5000",
    ),
    "two bases of V4, published": (
        "v4", {"rope_theta": 5e3, "rope_parameters": YARN | {"rope_theta": 1e4}}, "rope_parameters.rope_theta: got 1000"
    ),
    "two bases of V4.1": ("v41", {"rope_scaling": YARN | {"rope_theta": 5e3}}, "rope_scaling.rope_theta: got 5000"),
    "two scalings": (
        "v32", {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_scaling": YARN | {"factor": 40}},
        "rope_scaling.factor: got 40, expected 16",
    ),
    "two kinds of scaling": (
        "v32", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "rope_scaling"
    ),
    "ratios and types": (
        "v4", {"compress_ratios": [128] * 4}, "compress_ratios: got .*, as layer_types says"
    ),
    "a parameter that no YaRN has": ("v32", yarn(extrapolation=2), "rope_scaling.extrapolation: got 2, expected none"),
    "a parameter of other YaRNs": ("v41", yarn(attn_factor=2), "rope_scaling.attn_factor: got 2, expected 1"),
    "a fraction among RoPE's parameters": ("v41", yarn(partial_rotary_factor=0.5), "partial_rotary_factor: got 0.5"),
    "such a fraction of V3.2": ("v32", yarn(partial_rotary_factor=0.5), "partial_rotary_factor: got 0.5, expected 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_an_entry_that_another_one_contradicts(case):
    model, changes, message = CONTRADICTIONS[case]
    kind, base = MODELS[model]
    with pytest.raises(ValueError, match=f"^{message}"):
        kind.from_dict(base | changes)


def test_entries_that_say_the_same_twice():
    for changes in (
        {"rope_theta": 777.0, "rope_parameters": YARN | {"rope_theta": 777.0}},
        {"rope_parameters": YARN | {"rope_theta": 777.0}, "rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}},
        {"rope_parameters": YARN | {"attn_factor": 1, "finetuned": True, "rope_theta": 777.0}},
    ):
        config = DeepseekV32Config.from_dict(V32 | changes)
        assert config.rope_theta == 777.0
        found = cos_sin_table(64, config.rope_theta, 9, config.rope_scaling)
        np.testing.assert_array_equal(found, cos_sin_table(64, 777.0, 9, YARN))
    nested = {"rope_theta": 777.0, "rope_parameters": {"main": MAIN, "compress": YARN | {"rope_theta": 160000.0}}}
    assert DeepseekV4Config.from_dict(V4 | nested).rope_theta == 777.0
    ratios = {"compress_ratios": [0, 4, 128, 4, 0]}
    assert DeepseekV4Config.from_dict(V4 | ratios).compress_ratios == (1, 4, 128, 4)


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_ramp_of_v41_is_rounded_whatever_truncate_says(ratio):
    """The published code always rounds the ramp."""
    tables = [
        table_of(DeepseekV41Config.from_dict(V41 | {"rope_scaling": YARN | truncate}), ratio, 99)
        for truncate in ({}, {"truncate": True}, {"truncate": False})
    ]
    assert np.abs(tables[0] - cos_sin_table(64, 160000.0, 99, YARN | {"truncate": False})).max() > 0.01
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])


@pytest.mark.parametrize("name", LIMITS)
def test_the_ends_of_the_limits_are_read_and_nothing_beyond(name):
    """The length is one of positions in int32."""
    least, most = (1, 2**31 - 1) if name == "original_max_position_embeddings" else LIMITS[name]
    for end, beyond in ((least, np.nextafter(least, -np.inf)), (most, most + 1)):
        others = {"beta_fast": LIMITS["beta_fast"][1], "beta_slow": LIMITS["beta_slow"][0]}
        assert read(V32 | yarn(**others | {name: end})).rope_scaling[name] == end
        with pytest.raises(ValueError, match=rf"rope_scaling\.{name}: got"):
            read(V32 | yarn(**others | {name: beyond}))


LIMITED = {name: st.floats(least, min(most, 1e30)) for name, (least, most) in LIMITS.items()}


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries(LIMITED), st.floats(1.001, MOST_THETA), st.sampled_from([4, 128]))
def test_whatever_is_read_makes_tables_of_numbers(numbers, theta, ratio):
    """Any values within the limits: no overflow, no NaN."""
    numbers["beta_fast"] = max(numbers["beta_fast"], numbers["beta_slow"])
    changes = {"rope_parameters": {"rope_type": "yarn", **numbers}, "compress_rope_theta": theta}
    assert np.isfinite(table_of(DeepseekV4Config.from_dict(V4 | changes), ratio, 3)).all()
    changes = {"rope_scaling": {"rope_type": "yarn", **numbers}, "rope_theta": theta}
    config = DeepseekV32Config.from_dict(V32 | changes)
    assert np.isfinite(cos_sin_table(64, config.rope_theta, 3, config.rope_scaling)).all()
    assert 0 < config.softmax_scale < 1e30


def test_lists_may_be_longer_than_the_layers():
    """Published lists have entries for the layers that predict further tokens."""
    assert DeepseekV4Config.from_dict(V4 | {"num_hidden_layers": 2}).compress_ratios == (1, 4)
    ratios = {"layer_types": None, "compress_ratios": [0, 4, 128, 4, 0]}
    assert DeepseekV4Config.from_dict(V4 | ratios).compress_ratios == (1, 4, 128, 4)


def test_the_published_form_has_no_factor_on_cosines_and_the_other_what_it_says():
    """transformers writes a factor of 1 into its form; without that entry the factor is YaRN's."""
    flat = DeepseekV4Config.from_dict(V4 | {"rope_parameters": YARN})
    nested = DeepseekV4Config.from_dict(V4 | {"rope_parameters": {"main": MAIN, "compress": YARN}})
    assert nested.rope_theta == 777.0
    first = table_of(flat, 4, 2), table_of(nested, 4, 2)
    np.testing.assert_allclose(first[0][0, 0], 1, rtol=1e-7)
    np.testing.assert_allclose(first[1][0, 0], 1 + 0.1 * np.log(16), rtol=1e-7)
    np.testing.assert_array_equal(table_of(nested, 1, 4), cos_sin_table(64, 777.0, 4))


@pytest.mark.parametrize(
    "extra", [{"beta_fast": None, "beta_slow": None}, {"attention_factor": None}, {"mscale": None}]
)
def test_what_is_null_is_not_given(extra):
    np.testing.assert_array_equal(cos_sin_table(64, 1e4, 9, YARN | extra), cos_sin_table(64, 1e4, 9, YARN))


PAIRS = [0, 1, 4, 8, 9, 31]
FREQUENCIES = {
    True: [1.0, 0.67698783, 0.1932503, 0.022222221, 0.009373677, 1.6669019e-05],
    False: [1.0, 0.66852546, 0.17897615, 0.013194458, 0.009373677, 1.6669019e-05],
}


@pytest.mark.parametrize("truncate", FREQUENCIES)
def test_the_ramp_may_begin_between_two_pairs(truncate):
    """Frequencies as transformers computes them, from the angles of the second position."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": truncate}
    table = cos_sin_table(64, 1e4, 2, yarn | {"attention_factor": 1.0})
    np.testing.assert_allclose(np.arctan2(table[1, 32:], table[1, :32])[PAIRS], FREQUENCIES[truncate], rtol=1e-6)


@pytest.mark.parametrize("config", weight_tables.CONFIGS.values(), ids=weight_tables.CONFIGS)
def test_the_text_model_of_any_model(config):
    """Its entries count; the entries around them must not contradict them."""
    around = {"model_type": config["model_type"], "text_config": config}
    assert config_from(around) == config_from(config)
    with pytest.raises(ValueError, match="num_key_value_heads: got 77, expected "):
        config_from(around | {"num_key_value_heads": 77})


def test_norms_of_v32s_latents_have_an_epsilon_of_their_own():
    golden = GoldenLayer(13)
    golden.config = golden.config | {"rms_norm_eps": 1e-2}
    assert relative_rms(V32Layer(golden).run(golden.splits), golden.out) < 1e-5
