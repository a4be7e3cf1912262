"""The tables of layers' weights in the docs, and checkpoints under every name that the docs promise."""

import importlib.util
import pathlib

import numpy as np
import pytest

from cumla.models import config_from, expected_weights
from cumla.models.registry import MODELS
from cumla.models.weights import weights_of_layer
from support.family_stack import FamilyStack, weights_of

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "layer-weights.md"
spec = importlib.util.spec_from_file_location("weight_tables", ROOT / "tools" / "weight_tables.py")
weight_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(weight_tables)


def test_tables_are_current():
    """After a change of weights: tools/weight_tables.py docs/reference/layer-weights.md."""
    text = PAGE.read_text()
    assert weight_tables.rewritten(text) == text
    assert all(f"<!-- weights of {name} -->\n|" in text for name in weight_tables.LAYERS)


def test_each_registered_model_has_a_table():
    tables = {type(config_from(weight_tables.CONFIGS[name])) for name in weight_tables.LAYERS}
    assert {attention.config_type for attention in MODELS.values()} == tables


@pytest.mark.parametrize("name", weight_tables.LAYERS)
@pytest.mark.parametrize("front", ["", "model.", "model.language_model."])
def test_a_checkpoint_under_published_names_is_read(name, front):
    """Every weight is found under its tensor's name, with any front; scales go with their matrix."""
    config = config_from(weight_tables.CONFIGS[name])
    for layer in weight_tables.LAYERS[name]:
        expected = expected_weights(config, layer)
        tensors = {
            front + w.tensor.removeprefix("model.").removeprefix("language_model."): number
            for number, w in enumerate(expected.values())
        }
        found = weights_of_layer(tensors, layer, config.names, first_draft=getattr(config, "num_hidden_layers", None),
                                  model_names=config.model_names)  # fmt: skip
        assert dict(found) == {w.transformers: number for number, w in enumerate(expected.values())}


def test_a_checkpoint_of_hy4_under_published_names():
    """The sink and the gate have other names than in transformers."""
    stack, parts = FamilyStack(8), weights_of(8)
    config, whole = stack.config, stack.layers[0]
    weights = {w.tensor: parts[f"model.layers.0.self_attn.{w.transformers}"]
               for w in expected_weights(config, 0).values()}  # fmt: skip
    assert "model.layers.0.self_attn.learnable_sink_param" in weights
    layer = type(whole)(config, 0, weights, activations="float32", cache_format="float32", max_position=64)
    np.testing.assert_array_equal(layer.sinks, whole.sinks)


def test_layers_that_draft_tokens_have_names_of_their_own():
    names = {"GLM-5.2": "model.layers.78.self_attn.", "Hy4": "model.mtp_layers.0.self_attn.", "V4.1": "mtp.0.attn."}
    for name, module in names.items():
        config = config_from(weight_tables.CONFIGS[name])
        for weight in expected_weights(config, config.num_hidden_layers).values():
            assert weight.tensor.startswith(module)


def test_scales_are_cut_with_their_matrix():
    """The scales of a rank's part, taken from the whole's, are the scales of the part."""
    config = config_from(weight_tables.CONFIGS["GLM-5.2"])
    for name, whole in expected_weights(config, 0).items():
        assert (whole.block is None) == (whole.dtype != "float8_e4m3fn")
        if whole.block is None:
            assert whole.scale_shape is None
            continue
        scales = np.arange(np.prod(whole.scale_shape)).reshape(whole.scale_shape)
        parts = [expected_weights(config, 0, rank=rank, ranks=8)[name] for rank in range(8)]
        cut = [scales[part.scale_part or ...] for part in parts]
        assert all(x.shape == part.scale_shape for x, part in zip(cut, parts, strict=True))
        if parts[0].part is None:
            assert all(x.shape == scales.shape for x in cut)
        else:
            axis = next(axis for axis, x in enumerate(parts[0].part) if x != slice(None))
            np.testing.assert_array_equal(np.concatenate(cut, axis), scales)


def test_a_cut_within_a_block_is_named():
    config = config_from(weight_tables.CONFIGS["Hy4"])
    part = expected_weights(config, 0, rank=1, ranks=32)["kv_b_proj.weight"]
    assert part.shape == (448, 512)
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight: a rank's part begins at 448, within a block of 128"):
        part.scale_part  # noqa: B018
