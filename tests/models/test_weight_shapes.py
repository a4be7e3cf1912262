"""expected_weights: the weights of golden layers, by names that layers accept."""

import numpy as np
import pytest
from seeded_weights import seeded_weights

from cumla.models import (
    DeepseekV4Attention,
    DeepseekV4Config,
    DeepseekV32Attention,
    DeepseekV32Config,
    DeepseekV41Attention,
    DeepseekV41Config,
    expected_weights,
)
from support.models import records
from support.v41_stack import GOLDEN

KINDS = {"v4": (DeepseekV4Config, DeepseekV4Attention), "v32": (DeepseekV32Config, DeepseekV32Attention)}


@pytest.mark.parametrize("case", range(len(records("layers"))))
def test_golden_layers(case):
    """Names and shapes equal transformers' parameters; a layer accepts them under both kinds of names."""
    record = records("layers")[case]
    config, kind = KINDS[record["model"]]
    config = config.from_dict(record["config"])
    expected = expected_weights(config, 0)
    assert {w.transformers: w.shape for w in expected.values()} == shapes_of(record)
    weights = seeded_weights(record["parameters"], record["seed"])
    options = {"activations": "float32", "cache_format": "float32", "max_position": 64}
    own = kind(config, 0, weights, **options)
    published = kind(config, 0, {name: weights[w.transformers] for name, w in expected.items()}, **options)
    for name, value in vars(own).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(published, name), value, name)


def shapes_of(record):
    return {name: tuple(shape) for name, shape in record["parameters"].items()}


@pytest.mark.parametrize("case", range(3))
def test_golden_layers_of_v41(case):
    record = GOLDEN["cases"][case]
    config, shapes = DeepseekV41Config.from_dict(record["config"]), {}
    for layer in range(config.num_hidden_layers):
        expected = expected_weights(config, layer)
        shapes |= {f"layers.{layer}.attn.{name}": weight.shape for name, weight in expected.items()}
        assert all(weight.transformers == name for name, weight in expected.items())
    assert shapes == shapes_of(record)


def test_layers_that_draft_tokens():
    config = DeepseekV41Config.from_dict(GOLDEN["cases"][0]["config"])
    draft = expected_weights(config, config.num_hidden_layers)
    weights = seeded_weights({name: weight.shape for name, weight in draft.items()}, 0)
    assert DeepseekV41Attention(config, config.num_hidden_layers, weights, max_position=64).mode == "window"


def test_two_names_of_a_weight_within_the_module():
    config = DeepseekV32Config(256, 2, 128, index_n_heads=4)
    weights = seeded_weights({name: w.shape for name, w in expected_weights(config, 0).items()}, 0)
    with pytest.raises(ValueError, match=r"^wo\.weight: got it in addition to o_proj\.weight, expected one of them"):
        DeepseekV32Attention(config, 0, {"o_proj.weight": weights["wo.weight"]} | weights, max_position=64)


def test_a_model_s_last_norm_is_no_name_within_a_module():
    config = DeepseekV4Config(256, 8, 128, 2, 64, (1,))
    shapes = {f"layers.0.attn.{name}": weight.shape for name, weight in expected_weights(config, 0).items()}
    weights = seeded_weights({**shapes, "norm.weight": (256,)}, 0)
    assert DeepseekV4Attention(config, 0, weights, max_position=64).ratio == 0
