"""The example's GLM: transformers' logits and greedy tokens of a tiny whole model."""

import glm
import numpy as np
from seeded_weights import seeded_weights

from support.family_stack import GOLDEN, golden_arrays


def test_logits_and_greedy_tokens_are_transformers():
    record, arrays = GOLDEN["models"][0], golden_arrays()
    tokens, first = arrays["m0/tokens"], record["n_prompt"]
    weights = seeded_weights(record["parameters"], record["seed"])
    model = glm.Model(record["config"], weights, cache_format="float32")
    splits = [first // 2, first - first // 2, *[1] * (len(tokens) - first)]
    ends = np.cumsum(splits)
    got = np.concatenate([model.logits(tokens[end - n : end], end - n) for n, end in zip(splits, ends, strict=True)])
    for found, want in ((got[first - 1 :], arrays["m0/logits"]), (got[:first:16], arrays["m0/prompt_logits"])):
        assert np.sqrt(np.square(found - want.astype(np.float64)).mean() / np.square(want).mean()) < 1e-4
    np.testing.assert_array_equal(got[first - 1 : -1].argmax(axis=1), tokens[first:])
