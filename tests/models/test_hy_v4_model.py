"""A tiny whole model of Hy4: transformers' logits and greedy tokens."""

import deepseek_v4
import glm
import numpy as np
from serving import experts, gated_mlp, largest, rms_norm

from cumla.models import HyV4Attention
from support.family_stack import check_tiny_model

CASE = 3
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
LIMIT, SCALE, HC_EPS = 10.0, 2.827, 1e-6  # of SwiGLU of routed experts; of their sum; of hyper-connections


class Model(glm.Flash):
    """Residual streams that are not mixed, and whose weighted sum is the head's input."""

    attention, collapse = HyV4Attention, deepseek_v4.Model.collapse

    def hyper_connection(self, streams, prefix):
        count = streams.shape[1]
        base, scale, fn = (self.weights[prefix + name] for name in ("base", "scale", "fn"))
        logits = rms_norm(streams.reshape(len(streams), -1), 1, self.config["rms_norm_eps"], np) @ fn.T
        pre = deepseek_v4.sigmoid(logits[:, :count] * scale[0] + base[:count], np) + HC_EPS
        post = 2 * deepseek_v4.sigmoid(logits[:, count:] * scale[1] + base[count:], np) + HC_EPS
        return post, np.eye(count, dtype=np.float32)[None], (pre[:, :, None] * streams).sum(axis=1)

    def mlp(self, x, prefix, kind):
        weights = self.weights
        if kind == "dense":
            return gated_mlp(x, *(weights[prefix + name] for name in PARTS), None, np)
        scores = deepseek_v4.sigmoid(x @ weights[f"{prefix}gate.weight"].T, np)
        chosen = largest(scores, self.config["num_experts_per_tok"], np)
        share = np.take_along_axis(scores, chosen, axis=1)
        share = share / (share.sum(axis=1, keepdims=True) + 1e-20) * SCALE
        routed = (weights[f"{prefix}experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        shared = (weights[f"{prefix}shared_experts.{name}"] for name in PARTS)
        return experts(x, chosen, share, *routed, LIMIT, np) + gated_mlp(x, *shared, None, np)


def test_logits_and_greedy_tokens_are_transformers():
    check_tiny_model(CASE, Model)
