"""The example's GLM: transformers' logits and greedy tokens of a tiny whole model."""

import glm
from seeded_weights import seeded_weights

from support.family_stack import GOLDEN, check_tiny_model


def test_logits_and_greedy_tokens_are_transformers():
    record = GOLDEN["models"][0]
    weights = seeded_weights(record["parameters"], record["seed"])
    check_tiny_model(0, glm.Model(record["config"], weights, cache_format="float32"))
