"""The description of a layer: read from every model's configuration, and checked."""

import dataclasses
import json

import pytest

from cumla.models import LayerSpec, config_from
from support.golden import DATA

TYPES = {"v4": "deepseek_v4", "v32": "deepseek_v32"}
V32 = {"model_type": "deepseek_v32", "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128}
V4 = {
    **V32, "model_type": "deepseek_v4", "o_groups": 2, "o_lora_rank": 64, "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
}  # fmt: skip


def golden_configs():
    for kind in ("layers", "models", "v41"):
        for case in json.loads((DATA / f"{kind}.json").read_text())["cases"]:
            yield {"model_type": TYPES.get(case.get("model"), "deepseek_v41"), **case["config"]}


@pytest.mark.parametrize("config", [pytest.param(config, id=f"{i}") for i, config in enumerate(golden_configs())])
def test_every_golden_config_describes_its_layers(config):
    found = config_from(config)
    for number in range(config.get("num_hidden_layers", 1)):
        spec = found.spec(number)
        assert spec.layer == number
        assert spec.row_source is None or found.spec(spec.row_source).owns_rows
        assert spec.selection_source is None or found.spec(spec.selection_source).selects


def test_groups_of_caches():
    of_v4 = [config_from(V4).spec(layer) for layer in range(3)]
    assert [spec.groups() for spec in of_v4] == [
        ("window",), ("window", "compressed", "states4"), ("window", "compressed", "states128"),
    ]  # fmt: skip
    assert [spec.mode for spec in of_v4] == ["window", "full", "full"]
    assert config_from(V32).spec(3).groups() == ("rows",)
    assert config_from(V32).spec(3).row_dim == 576 == of_v4[0].row_dim + 64


def test_a_model_that_is_not_served_is_named():
    with pytest.raises(ValueError, match="model_type: got 'llama', expected 'deepseek_v32'"):
        config_from(V32 | {"model_type": "llama"})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"heads": 0}, "heads: got 0, expected at least 1"),
        ({"heads": 8.0}, "heads: got 8.0 of type float"),
        ({"rope_dim": 32}, "rope_dim: got 32, expected 0 or 64"),
        ({"rows": "pages"}, "rows: got 'pages', expected 'latent' or 'window'"),
        ({"window": 128}, "window: got 128, expected 0, as rows are 'latent'"),
        ({"ratio": 4}, "ratio: got 4, expected 1, as rows are 'latent'"),
        ({"row_source": None}, "row_source: got None, expected one"),
        ({"row_source": 4}, "row_source: got 4, expected at most 3"),
        ({"selection": "source"}, "selection_source: got 3, expected an earlier layer, as selection is 'source'"),
        (
            {"selection": "all", "selection_source": None},
            "selection: got all, expected own or source, as rows are 'latent'",
        ),
        ({"selection": "none"}, "selection: got none, expected own or source, as rows are"),
        ({"keys": "none"}, "keys: got none, expected tokens or pools, as selection"),
        ({"topk": 0}, "topk: got 0, expected one"),
        ({"states": "ring"}, "states: got ring, expected none, as rows are"),
        ({"candidates": "read"}, "candidates: got read, expected none, as rows are"),
        ({"o_groups": 3}, "o_groups: got 3, expected 0, as rows are"),
        ({"row_eps": 1e-5}, "row_eps: got 1e-05, expected 1e-06, as q_eps is 1e-06"),
        ({"rope_pairs": "none"}, "rope_pairs: got none, expected neighbours or halves, as rope_dim is 64"),
        ({"nope_dim": 1, "position_scale": True}, "nope_dim: got 1, expected an even number, as position_scale"),
        ({"keys": "pools", "pool": 4}, "index_pairs: got .*, expected none, as keys are of 'pools'"),
        ({"sink": 1}, "sink: got 1 of type int"),
        ({"softmax_scale": -1.0}, "softmax_scale: got -1.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type: got 'linear'"),
    ],
)
def test_a_wrong_field_is_named(changes, match):
    spec = config_from(V32).spec(3)
    with pytest.raises((TypeError, ValueError), match=match):
        dataclasses.replace(spec, **changes)


def test_fields_are_immutable_and_compare():
    spec = config_from(V32).spec(3)
    assert spec == config_from(V32).spec(3) != config_from(V32).spec(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.heads = 4
    assert isinstance(spec, LayerSpec)
