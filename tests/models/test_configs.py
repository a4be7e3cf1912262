"""Configurations: what a config.json may say, and that what cumla does not serve is named."""

import numpy as np
import pytest

from cumla.models.deepseek_v4 import DeepseekV4Config
from cumla.models.deepseek_v32 import DeepseekV32Config
from cumla.models.rope import cos_sin_table
from support.models import GoldenLayer, V32Layer, records, relative_rms

V4, V32 = (records("models")[case]["config"] for case in (0, 2))
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512}
MAIN = {"rope_type": "default", "rope_theta": 777.0}
WRONG = {
    "too few layer types": (V4, {"layer_types": ["sliding_attention"]}, "layer_types: got 1 entries, expected"),
    "too few ratios": (V4, {"layer_types": None, "compress_ratios": [4]}, "compress_ratios: got 1 entries"),
    "another rate": (V4, {"compress_rates": {"compressed_sparse_attention": 8}}, r"compress_rates\.compressed_sparse"),
    "another rate by its old name": (V4, {"compress_rate_hca": 64}, "compress_rate_hca: got 64, expected 128"),
    "more of a head turned": (V4, {"partial_rotary_factor": 0.25}, "partial_rotary_factor: got 0.25, expected 0.125"),
    "more turned, by the old name": (V4, {"qk_rope_head_dim": 128}, "qk_rope_head_dim: got 128, expected 64"),
    "YaRN without compression": (
        V4, {"rope_parameters": {"main": YARN, "compress": YARN}}, r"rope_parameters\.main: got YaRN"
    ),
    "biases": (V32, {"attention_bias": True}, "attention_bias: got True, expected False"),
    "no low rank": (V32, {"q_lora_rank": None}, "q_lora_rank: got None of type NoneType"),
    "a size in words": (V32, {"hidden_size": "256"}, "hidden_size: got '256' of type str"),
    "no heads": (V4, {"num_attention_heads": 0}, "num_attention_heads: got 0, expected at least 1"),
    "no layers": (V4, {"num_hidden_layers": None}, "num_hidden_layers: got None"),
    "no window": (V4, {"sliding_window": None}, "sliding_window: got None"),
    "a base of 0": (V4, {"compress_rope_theta": 0}, "compress_rope_theta: got 0, expected at least 1"),
    "a base that is none": (V4, {"rope_theta": float("nan")}, "rope_theta: got nan, expected a finite number"),
    "another scaling": (V4, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type: got 'linear'"),
    "YaRN without a factor": (V32, {"rope_scaling": YARN | {"factor": None}}, "expected factor among YaRN's numbers"),
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


def test_lists_may_go_on_behind_the_layers():
    """Published lists have entries for the layers that predict further tokens."""
    assert DeepseekV4Config.from_dict(V4 | {"num_hidden_layers": 2}).compress_ratios == (1, 4)
    ratios = {"layer_types": None, "compress_ratios": [0, 4, 128, 4, 0]}
    assert DeepseekV4Config.from_dict(V4 | ratios).compress_ratios == (1, 4, 128, 4)


def test_the_published_form_has_no_factor_on_cosines_and_the_other_what_it_says():
    """transformers writes a factor of 1 into its own form; one without it has YaRN's."""
    flat = DeepseekV4Config.from_dict(V4 | {"rope_parameters": YARN})
    nested = DeepseekV4Config.from_dict(V4 | {"rope_parameters": {"main": MAIN, "compress": YARN}})
    assert nested.rope_theta == 777.0
    first = flat.cos_sin_table(4, 2), nested.cos_sin_table(4, 2)
    np.testing.assert_allclose(first[0][0, 0], 1, rtol=1e-7)
    np.testing.assert_allclose(first[1][0, 0], 1 + 0.1 * np.log(16), rtol=1e-7)
    np.testing.assert_array_equal(nested.cos_sin_table(1, 4), cos_sin_table(64, 777.0, 4))


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
    """Frequencies as transformers makes them, by the angles of the second position."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": truncate}
    table = cos_sin_table(64, 1e4, 2, yarn | {"attention_factor": 1.0})
    np.testing.assert_allclose(np.arctan2(table[1, 32:], table[1, :32])[PAIRS], FREQUENCIES[truncate], rtol=1e-6)


def test_norms_of_v32s_latents_have_an_epsilon_of_their_own():
    golden = GoldenLayer(13)
    golden.config = golden.config | {"rms_norm_eps": 1e-2}
    assert relative_rms(V32Layer(golden).run(golden.splits), golden.out) < 1e-5
