"""Radians of RoPE of GLM, Mistral Large 4 (YaRN, learned factors) and Hy4, as transformers computes them."""

import json

import numpy as np
import pytest

from cumla.models.rope import cos_sin_table, radians
from support.golden import DATA

STACKS = json.loads((DATA / "family.json").read_text())["stacks"]


def alpha_of(stack):
    """The learned factors, by the rule for weights; None if the model has none."""
    rng = np.random.Generator(np.random.PCG64(stack["seed"]))
    alpha = None
    for name, shape in sorted(stack["parameters"].items()):
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("rotary_emb.alpha"):
            alpha = np.float32(0.1) * values
    return alpha


@pytest.mark.parametrize("stack", [x for x in STACKS if x["radians"]], ids=lambda x: x["config"]["model_type"])
def test_radians(stack):
    parameters, alpha = dict(stack["config"]["rope_parameters"]), alpha_of(stack)
    theta = parameters.pop("rope_theta")
    assert (alpha is None) == (stack["config"]["model_type"] != "mistral_large4_text")
    np.testing.assert_allclose(radians(64, theta, parameters, alpha), stack["radians"], rtol=1e-6)
    table = cos_sin_table(64, theta, 4, parameters, alpha)
    np.testing.assert_allclose(table[3, :32], np.cos(3 * np.array(stack["radians"])), atol=1e-6)


def test_alpha_of_another_shape():
    with pytest.raises(ValueError, match=r"^alpha: got shape \(31,\), expected \(32,\), one factor a pair"):
        cos_sin_table(64, 10000.0, 2, alpha=np.zeros(31))
