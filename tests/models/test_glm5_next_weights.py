"""Weights of GLM-5.3-Flash as its checkpoint has them: FP8 beside bfloat16, and names of a multimodal model."""

import numpy as np
import pytest
from models.test_fp8_weights import one, values

from cumla.layers.weights import BlockQuantizedWeight
from cumla.models import Glm5NextAttention
from support.family_stack import FamilyStack, weights_of
from support.lab import BF16

CASE, REQUEST = 2, 3  # golden
IN_FP8 = ("q_a_proj.weight", "self_attn.q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight")


def layers_of(stack, weights):
    options = {"activations": "float32", "cache_format": "float32", "max_position": 300, "backend": "cpu"}
    return [Glm5NextAttention(stack.config, number, weights, **options) for number in stack.numbers]


def checkpoint(change):
    """FP8 matrices by `change`, others, of the indexer and of keys and values, in bfloat16."""
    return {
        name.replace("model.", "model.language_model.", 1): change(one(w)) if name.endswith(IN_FP8) else w.astype(BF16)
        for name, w in weights_of(CASE).items()
    }


def test_fp8_and_bfloat16_matrices():
    outputs = []
    for change in (lambda weight: weight, values):
        stack = FamilyStack(CASE)
        stack.layers = layers_of(stack, checkpoint(change))
        outputs.append(stack.run(REQUEST, [61, 1, 3]))
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-5 * np.abs(outputs[0]).max())


def test_scales_under_their_own_names():
    given = {}
    for name, weight in checkpoint(lambda weight: weight).items():
        if isinstance(weight, BlockQuantizedWeight):
            given |= {name: weight.weight, name.replace("weight", "weight_scale_inv"): weight.scale}
        else:
            given[name] = weight
    outputs = []
    for weights in (given, checkpoint(lambda weight: weight)):
        stack = FamilyStack(CASE)
        stack.layers = layers_of(stack, weights)
        outputs.append(stack.run(REQUEST, [61, 1]))
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("name", ["index_kpool_compress_gate", "index_kpool_compress_ape"])
def test_a_missing_weight_is_named(name):
    weights = {whole: w for whole, w in weights_of(CASE).items() if not whole.endswith(name)}
    with pytest.raises(KeyError, match=rf"indexer\.{name}: the weights lack it"):
        layers_of(FamilyStack(CASE), weights)
