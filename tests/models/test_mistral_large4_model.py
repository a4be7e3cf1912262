"""A tiny whole model of Mistral Large 4: transformers' logits and greedy tokens."""

import glm
import numpy as np
from serving import experts, gated_mlp, largest

from cumla.models import MistralLarge4Attention
from support.family_stack import check_tiny_model

CASE = 2
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
CAP = 30.0  # of logits


class Model(glm.Model):
    """Experts by a softmax router, capped logits; layers share rows and selections."""

    attention = MistralLarge4Attention

    def head(self, x):
        return CAP * np.tanh(super().head(x) / CAP)

    def mlp(self, x, prefix, kind):
        weights = self.weights
        if kind == "dense":
            return gated_mlp(x, *(weights[prefix + name] for name in PARTS), None, np)
        scores = np.exp(x @ weights[f"{prefix}gate.weight"].T)
        chosen = largest(scores, self.config["num_experts_per_tok"], np)
        share = np.take_along_axis(scores, chosen, axis=1)
        share = share / share.sum(axis=1, keepdims=True)
        routed = (weights[f"{prefix}experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        shared = (weights[f"{prefix}shared_experts.{name}"] for name in PARTS)
        return experts(x, chosen, share, *routed, None, np) + gated_mlp(x, *shared, None, np)


def test_logits_and_greedy_tokens_are_transformers():
    check_tiny_model(CASE, Model)
