"""expected_weights: the weights of golden layers, by names that layers accept."""

import dataclasses

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
from support.family_stack import FamilyStack, weights_of
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


@pytest.mark.parametrize(("case", "request_number"), [(0, 1), (2, 3), (8, 1)])
def test_the_sum_of_tensor_parallel_ranks_is_the_layers_output(case, request_number):
    """A layer of half the heads, with a rank's part of the weights: layers of GLM-5, GLM-5.3-Flash and Hy4."""
    stack = FamilyStack(case)
    want, whole, ranks = stack.run(request_number, [31])[0], stack.layers[0], 2
    weights = {
        name.removeprefix("model.layers.0.self_attn."): w for name, w in weights_of(case).items() if ".0." in name
    }
    config = dataclasses.replace(stack.config, num_attention_heads=stack.config.num_attention_heads // ranks)
    total = np.zeros_like(want)
    for rank in range(ranks):
        parts = {
            weight.transformers: weights[weight.transformers][weight.part or ...]
            for weight in expected_weights(stack.config, 0, rank=rank, ranks=ranks).values()
        }
        assert {name: x.shape for name, x in parts.items()} == {
            weight.transformers: weight.shape for weight in expected_weights(config, 0).values()
        }
        made = FamilyStack(case)
        made.layers = [
            type(whole)(
                config, 0, parts, activations="float32", cache_format="float32", max_position=64, backend="cpu"
            )
        ]  # fmt: skip
        made.numbers, made.picks = [0], {}
        total += made.run(request_number, [31])[0]
    np.testing.assert_allclose(total, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_parts_of_ranks_cover_each_weight():
    config = DeepseekV4Config(256, 8, 128, 4, 64, (4,))
    whole = expected_weights(config, 0)
    for name, weight in whole.items():
        counted = np.zeros(weight.shape, int)
        for rank in range(4):
            part = expected_weights(config, 0, rank=rank, ranks=4)[name]
            counted[part.part or ...] += 1
            assert counted[part.part or ...].shape == part.shape
        cut = {"wq_b.weight", "attn_sink", "wo_a.weight", "wo_b.weight"}
        assert (counted == (1 if name in cut else 4)).all(), name


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranks": 3}, "ranks: got 3, expected a divisor of 8 heads"),
        ({"ranks": 8}, "ranks: got 8, expected a divisor of 4 groups of heads"),
        ({"ranks": 0}, "ranks: got 0"), ({"ranks": 2, "rank": 2}, "rank: got 2"), ({"rank": -1}, "rank: got -1"),
    ],
)  # fmt: skip
def test_wrong_ranks_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        expected_weights(DeepseekV4Config(256, 8, 128, 4, 64, (4,)), 0, **options)
